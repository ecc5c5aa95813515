"""A model as a folder that transformers loads: config.json, safetensors, and the tokenizer where there is one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dasllama_torch.errors import FolderError, UnsupportedModel
from dasllama_torch.export.hf_config import hf_config
from dasllama_torch.export.weights import hf_tensors, in_dtype
from dasllama_torch.hf.tokenizer import hf_tokenizer
from dasllama_torch.modules.causal_lm import CausalLM, ConditionalLM

SHARD_BYTES = 5 << 30  # transformers' own default


def save_safetensors(
    model: CausalLM,
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the model, dequantized, as a folder for `AutoModelForCausalLM.from_pretrained`; returns the folder.

    folder: made if it is not there. dtype: of the tensors; float32 loses nothing of a quantized file, the halves may.
    max_shard_bytes: of one file; memory stays at about one of them. A head that is the embedding table is not written
    twice. The tokenizer is written if the file has a vocabulary, by transformers, which must be installed then. What is
    interrupted leaves no safetensors behind.
    Raises FolderError for a file in the folder's place, and for a folder that holds safetensors already, which would
    mix with these; UnsupportedModel for what a config cannot say (see hf_config.py; `to_hf` gives the weights without
    one), for a value beyond dtype, and for a model that also sees: a file of text holds no tower, and transformers
    would make one of random weights; ValueError for a dtype that is none of floats.
    """
    folder, config = Path(folder), hf_config(model)
    if isinstance(model, ConditionalLM):
        origin = model.metadata.origin if model.metadata else config["model_type"]
        raise UnsupportedModel(
            f"{origin}: {config['architectures'][0]} has a tower for pictures, which the file lacks; "
            "to_hf gives the weights that there are"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}, wanted 1 or more")
    tensors = in_dtype(hf_tensors(model), dtype)
    has_tokenizer = model.tokenizer is not None and model.tokenizer.has_vocab
    tokenizer = hf_tokenizer(model) if has_tokenizer else None
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder}: is a file, wanted a folder or a new name")
    if found := sorted(folder.glob("*.safetensors*")):
        raise FolderError(f"{folder}: holds {found[0].name} already, wanted a folder without safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder, tensors, max_shard_bytes)
    config |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    written: list[tuple[Path, list[str]]] = []  # each file, and the tensors in it
    total = 0
    try:
        for shard in _shards(tensors, max_shard_bytes):
            # How many there will be is known at the end.
            written.append((folder / f"model-{len(written) + 1:05}.safetensors", list(shard)))
            save_file(shard, written[-1][0], metadata={"format": "pt"})
            total += sum(tensor.nbytes for tensor in shard.values())
    except BaseException:
        for path, _ in written:
            path.unlink(missing_ok=True)
        raise
    where: dict[str, str] = {}
    for i, (path, names) in enumerate(written):
        whole = "model.safetensors" if len(written) == 1 else f"model-{i + 1:05}-of-{len(written):05}.safetensors"
        path.replace(folder / whole)
        where |= dict.fromkeys(names, whole)
    if len(written) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Groups of tensors of at most max_bytes, or one tensor that is larger."""
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.contiguous()
        held += tensor.nbytes
    if shard:
        yield shard
