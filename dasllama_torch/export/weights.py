"""A model's tensors as transformers' class of the family has them: its names, its order, its conventions, in floats.

Modules already have transformers' paths, and matrices its order of rows and columns. What remains is what a file states
otherwise: norms that contain the one which transformers adds, stacks of experts in two parts or another order, decays
as they are used.

E experts, N outputs, K inputs.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dasllama_torch.arch.qwen3next import ProjectionByHead
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.hf.names import adds_one, canonical, to_gguf
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.gated_delta import GatedDeltaNet
from dasllama_torch.modules.linear import Packed
from dasllama_torch.modules.moe import Experts

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def to_hf(model: CausalLM, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict of transformers' class of the model, dequantized: `load_state_dict` takes it as it is.

    dtype: of all tensors; float32 loses nothing. A head that is the embedding table is the same tensor twice. Models
    that also see give their text decoder, as files of text hold no tower. Takes the memory of all weights in dtype;
    what makes one tensor at a time is `hf_tensors`.
    Raises ValueError for a dtype that is none of floats, UnsupportedModel for a value beyond it.
    """
    tensors = dict(in_dtype(hf_tensors(model), dtype))
    if is_tied(model):
        tensors["lm_head.weight"] = next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    return tensors


def in_dtype(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors in another type, one after the other. Errors as of `to_hf`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}, wanted one of {', '.join(map(str, DTYPES))}")
    return ((name, _cast(name, tensor, dtype)) for name, tensor in tensors)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if (tensor.isfinite() & cast.isinf()).any():
        raise UnsupportedModel(f"{name} holds {tensor.abs().max():g}, beyond {dtype}: wanted bfloat16 or float32")
    return cast


def is_tied(model: CausalLM) -> bool:
    """Whether the head is the embedding table."""
    return model.lm_head.gguf_name == model.get_input_embeddings().gguf_name


def hf_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Name and f32 tensor of each entry of transformers' state dict, made one after the other; without `lm_head.weight`
    where it is the embedding table."""
    yield from hf_floats(model)
    for path, module in packed_parts(model):
        if isinstance(module, Experts):
            yield from _experts(path, module)
        elif path != "lm_head" or not is_tied(model):
            yield f"{path}.weight", module.weight
            if getattr(module, "bias", None) is not None:
                yield f"{path}.bias", module.bias


def packed_parts(model: CausalLM) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of everything that holds packed matrices and is one module in transformers too."""
    for path, module in model.named_modules():
        above = model.get_submodule(path.rpartition(".")[0])
        is_part = isinstance(module, Packed) and not isinstance(above, Experts | ProjectionByHead)
        if is_part or isinstance(module, Experts | ProjectionByHead):
            yield path, module


def hf_floats(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Name and f32 tensor of the entries that are no part of `packed_parts`: norms, routers, sinks, decays."""
    parts = tuple(f"{path}." for path, _ in packed_parts(model))
    for name, tensor in model.state_dict().items():
        if name.startswith(parts):
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf == "decay" and isinstance(module, GatedDeltaNet):
            yield f"{path}.A_log", module.A_log
            continue
        gguf_name = to_gguf(model.config.arch, canonical(name))
        yield name, tensor - 1 if gguf_name and adds_one(model.config.arch, gguf_name) else tensor


def _experts(path: str, experts: Experts) -> Iterator[tuple[str, Tensor]]:
    """The two parameters and two biases that transformers has of a stack [E, N, K]: gate and up in one."""
    if experts.fused:
        stack = experts.gate_up_proj
        weights = stack.weight.chunk(2, 1)
        biases = None if stack.bias is None else stack.bias.chunk(2, 1)
    else:
        halves = experts.gate_proj, experts.up_proj
        weights = [half.weight for half in halves]
        biases = None if halves[0].bias is None else [half.bias for half in halves]
    gate_up = _join(experts, weights)
    down = experts.down_proj.weight
    if _input_major(experts):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    yield f"{path}.gate_up_proj", gate_up
    yield f"{path}.down_proj", down
    if biases is not None:
        yield f"{path}.gate_up_proj_bias", _join(experts, biases)
        yield f"{path}.down_proj_bias", experts.down_proj.bias


def _input_major(experts: Experts) -> bool:
    """gpt-oss, the only one with this activation, has experts as [E, K, N], and rows of gate and up in turns."""
    return experts.act == "swiglu_oai"


def _join(experts: Experts, halves: Sequence[Tensor]) -> Tensor:
    return torch.stack(halves, 2).flatten(1, 2) if _input_major(experts) else torch.cat(halves, 1)
