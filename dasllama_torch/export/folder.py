"""A model as a folder that transformers loads: config.json, safetensors, and the tokenizer where there is one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dasllama_torch.errors import FolderError, UnsupportedModel
from dasllama_torch.export.hf_config import hf_config
from dasllama_torch.export.weights import hf_tensors
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

    dtype: of the tensors; float32 loses nothing of a quantized file, the halves may. max_shard_bytes: of one file;
    memory stays at about one of them. A head that is the embedding table is not written twice. The tokenizer is written
    if the file has a vocabulary, by transformers, which must be installed then.
    Raises FolderError for a folder that holds safetensors already, which would mix with these; UnsupportedModel for
    what a config cannot say (see hf_config.py), and for a model that also sees: a file of
    text holds no tower, and transformers would make one of random weights.
    """
    config = hf_config(model)
    if isinstance(model, ConditionalLM):
        origin = model.metadata.origin if model.metadata else config["model_type"]
        raise UnsupportedModel(f"{origin}: {config['architectures'][0]} has a tower for pictures, which the file lacks")
    has_tokenizer = model.tokenizer is not None and model.tokenizer.has_vocab
    tokenizer = hf_tokenizer(model) if has_tokenizer else None
    folder = Path(folder)
    if found := sorted(folder.glob("*.safetensors*")):
        raise FolderError(f"{folder}: holds {found[0].name} already, wanted a folder without safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    config |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    _write_tensors(folder, ((name, tensor.to(dtype)) for name, tensor in hf_tensors(model)), max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        # How many there will be is known at the end.
        save_file(shard, folder / f"model-{len(shards) + 1:05}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for i, name in enumerate(names):
        (folder / f"model-{i + 1:05}.safetensors").replace(folder / name)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
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
