"""transformers' own model classes, running on our packed modules.

    model = packed_transformers("model.gguf")        # a transformers model; its matrices are those of the file
    model.generate(ids)                              # its code, its caches, our kernels
    pack(loaded, "model.gguf")                       # the same, of a model of transformers that is there already

Only what holds matrices is ours (Linear, Embedding, Experts, at the same paths and with the same calls); attention,
norms, rotary positions and whatever else a model does is transformers' code. No weight is ever dequantized to be kept.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dasllama_torch.api import load_model
from dasllama_torch.arch import FAMILIES
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.export.foreign import foreign_parts
from dasllama_torch.export.hf_config import hf_class, hf_config
from dasllama_torch.export.weights import hf_floats, packed_parts
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.hf.common import import_transformers
from dasllama_torch.modules.causal_lm import CausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def packed_transformers(
    path: str | os.PathLike, mode: str = "native", *, config: "PretrainedConfig | None" = None
) -> "PreTrainedModel":
    """transformers' model of a GGUF file, built without weights and filled with packed modules.

    mode: as in `load_model`. config: transformers' config; None: the one that follows from the file. Where this package
    has no implementation of the file's architecture the config must be given, and the architecture be one whose files
    hold transformers' tensors as they are (`foreign.PLAIN`).
    Of a model that also sees, the tower for pictures is None: files of text hold none.
    Raises UnsupportedModel for an architecture of which neither is true, and for a model with parts that the file
    does not fill; DasllamaError where transformers is missing.
    """
    transformers = import_transformers("for its model classes")
    file = GGUFFile(path)
    arch = file.metadata.architecture
    source = load_model(path, mode) if arch in FAMILIES else None
    if config is None:
        if source is None:
            raise UnsupportedModel(f"{path}: architecture {arch!r} is not implemented: wanted transformers' config")
        config = transformers.AutoConfig.for_model(**hf_config(source))
        config.name_or_path = str(path)
    with torch.device("meta"):
        if source is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = getattr(transformers, hf_class(arch))(config)
    if hasattr(model.base_model, "visual"):
        model.base_model.visual = None
    _compute_buffers(model)
    pack(model, source if source is not None else file, mode)
    empty = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if empty:
        raise UnsupportedModel(f"{path}: has nothing for {', '.join(empty[:4])} of {type(model).__name__}")
    return model.eval()


def pack(model: "PreTrainedModel", source: CausalLM | GGUFFile | str | os.PathLike, mode: str = "native") -> None:
    """Put the packed modules of a GGUF file into a model of transformers, in place of its own, and its other weights
    into its parameters.

    source: the file's path, or a model of ours, whose modules are then shared. mode: as in `load_model`.
    Raises UnsupportedModel where the two are not of one shape; the model is then as it was.
    """
    if isinstance(source, str | os.PathLike):
        file = GGUFFile(source)
        source = load_model(source, mode) if file.metadata.architecture in FAMILIES else file
    if isinstance(source, CausalLM):
        parts, floats = dict(packed_parts(source)), dict(hf_floats(source))
    else:
        parts, floats = foreign_parts(model, source, mode)
    _check(model, parts, floats)
    for path, part in parts.items():
        model.set_submodule(path, part)
    for name, value in floats.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._parameters:
            setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
        else:
            setattr(owner, leaf, value)


def _check(model: nn.Module, parts: dict[str, nn.Module], floats: dict[str, Tensor]) -> None:
    """Refuse what would not go where it has to."""
    theirs = dict(_tensors(model))
    places = {path for path, _ in model.named_modules()}
    for path, part in parts.items():
        if path not in places:
            raise UnsupportedModel(f"{type(model).__name__} has no module {path}, and the file has a matrix for it")
        wanted = theirs.get(f"{path}.weight")
        found = getattr(part, "shape", None)
        if wanted is not None and found is not None and tuple(wanted.shape) != tuple(found):
            raise UnsupportedModel(
                f"{path} of {type(model).__name__} is {list(wanted.shape)}, the file's {list(found)}"
            )
    for name, value in floats.items():
        wanted = theirs.get(name)
        if wanted is None or wanted.shape != value.shape:
            shape = None if wanted is None else list(wanted.shape)
            raise UnsupportedModel(f"{name} of {type(model).__name__} is {shape}, the file's {list(value.shape)}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _compute_buffers(model: nn.Module) -> None:
    """Buffers that no file holds (rotary frequencies) have no values on the meta device: make their modules anew."""
    for path, module in list(model.named_modules()):
        if "RotaryEmbedding" in type(module).__name__ and any(b.is_meta for b in module.buffers(recurse=False)):
            model.set_submodule(path, type(module)(config=module.config))
