"""Checkpoints of llama2.c (github.com/karpathy/llama2.c, export.py) as what a GGUF file of architecture `llama` holds.

    file = Llama2cFile("stories15M.bin")
    file.metadata.arch.int("block_count")
    file.tensors["blk.0.attn_q.weight"].data         # uint8 [rows, row_bytes], a view of the file

A header of seven int32 and f32 matrices, little-endian, Q and K rows with rotary pairs next to each other as in GGUF.
Version 0 has no magic number: only its size, which must be exactly what the header says, tells it from any other file.
Epsilon and the base of the rotation are constants of llama2.c. It keeps vocabularies in files of their own.
"""

import os
import struct
from math import prod
from pathlib import Path

import numpy as np

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFTensor, ModelFile, map_file
from dasllama_torch.ops.ggml_types import F32

MAGIC = 0x616B3432  # "ak42", of version 1 and later
PARAMETERS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
HEADER_BYTES = {0: 28, 1: 256}
MOST, MOST_LAYERS = 1 << 24, 4096  # far above any model
NORM_EPS, ROPE_THETA = 1e-5, 10000.0


class Llama2cFile(ModelFile):
    """A llama2.c checkpoint of version 0 or 1. Raises GGUFError for a file that is none, UnsupportedModel for
    version 2, whose matrices are int8."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.paths = [self.path]
        buffer = map_file(self.path)
        self.nbytes = len(buffer)
        version, p, tied = _header(self.path, buffer)
        self.tensors = _place(self.path, buffer, HEADER_BYTES[version], _layout(version, p, tied))
        keys = {
            "block_count": p["n_layers"],
            "context_length": p["max_seq_len"],
            "embedding_length": p["dim"],
            "feed_forward_length": p["hidden_dim"],
            "attention.head_count": p["n_heads"],
            "attention.head_count_kv": p["n_kv_heads"],
            "attention.layer_norm_rms_epsilon": NORM_EPS,
            "rope.freq_base": ROPE_THETA,
            "vocab_size": p["vocab_size"],
        }
        values = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()}
        self.metadata = Metadata(values, origin=str(self.path))


def _header(path: Path, buffer: np.ndarray) -> tuple[int, dict[str, int], bool]:
    """version, parameters by name, and whether the head is the embedding table."""
    head = buffer[: HEADER_BYTES[1]].tobytes()
    version = 0
    if head[:4] == struct.pack("<I", MAGIC):
        (version,) = struct.unpack_from("<i", head.ljust(8, b"\0"), 4)
        if version != 1:
            raise UnsupportedModel(f"{path}: llama2.c checkpoint of version {version}, wanted 0 or 1, which hold f32")
    if len(head) < HEADER_BYTES[version]:
        raise GGUFError(f"{path}: {len(buffer)} bytes, wanted {HEADER_BYTES[version]} of a llama2.c header at least")
    p = dict(zip(PARAMETERS, struct.unpack_from("<7i", head, 8 * version), strict=True))
    # Version 0 marks a head of its own by the sign of the vocabulary's size.
    tied = bool(head[36]) if version else p["vocab_size"] > 0
    if not version:
        p["vocab_size"] = abs(p["vocab_size"])
    for name, value in p.items():
        most = MOST_LAYERS if name == "n_layers" else MOST
        if not 1 <= value <= most:
            raise GGUFError(f"{path}: not a llama2.c checkpoint: {name} is {value}, wanted 1 to {most}")
    for name, divisor in (("dim", 2 * p["n_heads"]), ("n_heads", p["n_kv_heads"])):
        if p[name] % divisor:
            raise GGUFError(f"{path}: not a llama2.c checkpoint: {name} is {p[name]}, wanted a multiple of {divisor}")
    return version, p, tied


def _layout(version: int, p: dict[str, int], tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the matrices in the order of the file; what nobody needs has no name."""

    def each(name: str, *shape: int):
        return [(f"blk.{i}.{name}.weight", shape) for i in range(p["n_layers"])]

    def one(name: str, *shape: int):
        return [(f"{name}.weight", shape)]

    C, F, D = p["dim"], p["hidden_dim"], p["dim"] // p["n_heads"]
    embeddings, norm = one("token_embd", p["vocab_size"], C), one("output_norm", C)
    attn_norm, ffn_norm = each("attn_norm", C), each("ffn_norm", C)
    attention = each("attn_q", C, C) + each("attn_k", p["n_kv_heads"] * D, C) + each("attn_v", p["n_kv_heads"] * D, C)
    attention += each("attn_output", C, C)
    ffn = each("ffn_gate", F, C) + each("ffn_down", C, F) + each("ffn_up", F, C)
    head = [] if tied else one("output", p["vocab_size"], C)
    if version == 0:
        cosines_and_sines = [("", (2 * p["max_seq_len"], D // 2))]
        return embeddings + attn_norm + attention + ffn_norm + ffn + norm + cosines_and_sines + head
    return attn_norm + ffn_norm + norm + embeddings + attention + ffn + head


def _place(path: Path, buffer: np.ndarray, begin: int, layout) -> dict[str, GGUFTensor]:
    end = begin + sum(4 * prod(shape) for _, shape in layout)
    if len(buffer) != end:
        raise GGUFError(f"{path}: not a llama2.c checkpoint, or truncated: {len(buffer)} bytes, its header wants {end}")
    tensors = {}
    for name, shape in layout:
        size = 4 * prod(shape)
        if name:
            data = buffer[begin : begin + size].reshape(*shape[:-1], 4 * shape[-1])
            tensors[name] = GGUFTensor(name, shape, F32, data, begin, path)
        begin += size
    return tensors
