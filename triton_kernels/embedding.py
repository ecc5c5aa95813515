"""Rows of a packed table: y[t] = dequantize(qweight[ids[t]]) * scale.

A program owns UNITS units of one row, as in `dequantize.py`. A GPU cannot raise without waiting for it: an id outside
of the table gives a row of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.embedding import _check as check
from dasllama_torch.ops.embedding import embedding as op
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels import blocks
from dasllama_torch.triton_kernels.dequantize import UNITS, floats, write_units
from dasllama_torch.triton_kernels.launch import PTX, aligned, on_device

TILE = 1024


@triton.jit
def embedding_kernel(
    out, ids, packed, table, V, C, scale,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    id_ = tl.load(ids + t).to(tl.int64)
    known = (id_ >= 0) & (id_ < V)
    n_blocks: tl.constexpr = UNITS * 16 * PLANES // BLOCK
    block = tl.program_id(1) * n_blocks
    write_units(
        out + t * C + block * BLOCK, packed + tl.where(known, id_, 0) * (C // BLOCK * BYTES) + block * BYTES,
        C // (16 * PLANES) - tl.program_id(1) * UNITS, tl.where(known, scale, float("nan")), table,
        QTYPE, OFFSET, PLANES, WIDTH, BLOCK, BYTES, WORDS, UNITS, PTX,
    )  # fmt: skip


@triton.jit
def embedding_float_kernel(out, ids, rows, V, C, scale, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    id_ = tl.load(ids + t).to(tl.int64)
    known = (id_ >= 0) & (id_ < V)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    y = tl.load(rows + tl.where(known, id_, 0) * C + i, mask=i < C, other=0.0).to(tl.float32) * scale
    tl.store(out + t * C + i, tl.where(known, y, float("nan")), mask=i < C)


@implement(op, "CUDA")
def embedding(ids: Tensor, qweight: Tensor, qtype: int, scale: float) -> Tensor:
    V, C = check(ids, qweight, qtype)
    count_call("embedding", "triton")
    out = torch.empty((*ids.shape, C), dtype=torch.float32, device=ids.device)
    if V == 0:
        return out.fill_(float("nan"))
    if out.numel():
        ids = ids.contiguous()
        with on_device(ids):
            if ggml_types.GGML_TYPES[qtype].is_float:
                embedding_float_kernel[(ids.numel(), triton.cdiv(C, TILE))](
                    out, ids, floats(qweight, qtype), V, C, scale, TILE
                )
            else:
                kind = blocks.layout(qtype)
                embedding_kernel[(ids.numel(), triton.cdiv(C // (16 * kind.planes), UNITS))](
                    out, ids, aligned(qweight, qtype), blocks.table(qtype, ids.device), V, C, scale,
                    qtype, qtype in blocks.OFFSETS, *kind, UNITS, PTX, num_warps=4 if kind.words == 1 else 2,
                )  # fmt: skip
    return out
