"""Packed weights to floats: y = factor * q + offset, element by element.

A program owns UNITS units of blocks that lie one after the other (`blocks.py`), four words of each in every plane; a
thread decodes words, whose elements it writes side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize as op
from dasllama_torch.ops.dequantize import row_length
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels import blocks
from dasllama_torch.triton_kernels.launch import PTX, aligned, on_device

UNITS = 64  # a multiple of every block's


@triton.jit
def write_units(
    out, packed, n_units, scale, table,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The first min(n_units, UNITS) units of the blocks at packed, times scale -> out."""
    i = tl.arange(0, 4 * UNITS)[None, :]
    w = i % 4
    at, u, _ = blocks.place(tl.minimum(i // 4, n_units - 1), PLANES, WIDTH, BLOCK, BYTES)
    lane = tl.arange(0, 4 * UNITS // WORDS)[None, :] // (4 // WORDS)  # the unit whose scales a thread needs
    lane_at, lane_u, _ = blocks.place(tl.minimum(lane, n_units - 1), PLANES, WIDTH, BLOCK, BYTES)
    j = tl.arange(0, 16 * UNITS)[None, :]
    _, _, start = blocks.place(j // 16, PLANES, WIDTH, BLOCK, BYTES)
    for p in tl.static_range(PLANES):
        q = blocks.word(QTYPE, packed + at, u, p, w, table, PTX)
        f = blocks.per_word(blocks.factor(QTYPE, packed + lane_at, lane_u, p), 1, UNITS, WORDS)
        e0, e1 = f * blocks.element(q, 0), f * blocks.element(q, 1)
        e2, e3 = f * blocks.element(q, 2), f * blocks.element(q, 3)
        if OFFSET:
            o = blocks.per_word(blocks.offset(QTYPE, packed + lane_at, lane_u, p), 1, UNITS, WORDS)
            e0, e1, e2, e3 = e0 + o, e1 + o, e2 + o, e3 + o
        y = blocks.in_order(e0, e1, e2, e3, 1, 4 * UNITS) * scale
        tl.store(out + start + p * WIDTH + j % 16, y.to(out.dtype.element_ty), mask=j // 16 < n_units)


@triton.jit
def dequantize_kernel(
    out, packed, counts, table, n_units,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """n_units: of a matrix, the one of program (., e), which is left as it is where counts[e] is 0."""
    pid, e = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_blocks: tl.constexpr = UNITS * 16 * PLANES // BLOCK
    wanted = True if counts is None else tl.load(counts + e) > 0
    if wanted:
        before = e.to(tl.int64) * (n_units // (BLOCK // (16 * PLANES))) + pid * n_blocks
        write_units(
            out + before * BLOCK, packed + before * BYTES, n_units - tl.program_id(0) * UNITS, 1.0, table,
            QTYPE, OFFSET, PLANES, WIDTH, BLOCK, BYTES, WORDS, UNITS, PTX,
        )  # fmt: skip


FLOATS = {ggml_types.F32: torch.float32, ggml_types.F16: torch.float16, ggml_types.BF16: torch.bfloat16}


def floats(qweight: Tensor, qtype: int) -> Tensor:
    """qweight u8 [..., row_bytes] of F32, F16 or BF16 -> [..., K] of that dtype, in place where it is aligned."""
    dtype = FLOATS[qtype]
    steps = (*qweight.stride()[:-1], qweight.storage_offset())
    whole = qweight.stride(-1) == 1 and all(step % dtype.itemsize == 0 for step in steps)
    return (qweight if whole else qweight.clone(memory_format=torch.contiguous_format)).view(dtype)


def unpack(qweight: Tensor, qtype: int, dtype: torch.dtype, counts: Tensor | None = None) -> Tensor:
    """qweight u8 [..., row_bytes] of a packed type -> [..., K] in dtype, rounded once.

    counts: int32 [E, ...] for qweight [E, N, row_bytes]: where it is 0, a matrix is not decoded, and anything.
    """
    kind = blocks.layout(qtype)
    K = row_length("dequantize", qweight, qtype)
    out = torch.empty((*qweight.shape[:-1], K), dtype=dtype, device=qweight.device)
    matrices = 1 if counts is None else len(qweight)
    if out.numel():
        n_units = out.numel() // matrices // (16 * kind.planes)
        with on_device(qweight):
            dequantize_kernel[(triton.cdiv(n_units, UNITS), matrices)](
                out, aligned(qweight, qtype), counts, blocks.table(qtype, qweight.device), n_units,
                qtype, qtype in blocks.OFFSETS, *kind, UNITS, PTX, num_warps=4 if kind.words == 1 else 2,
            )  # fmt: skip
    return out


@implement(op, "CUDA")
def dequantize(qweight: Tensor, qtype: int) -> Tensor:
    row_length("dequantize", qweight, qtype)
    if ggml_types.GGML_TYPES[qtype].is_float:
        count_call("dequantize", "torch")
        return floats(qweight, qtype).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    count_call("dequantize", "triton")
    return unpack(qweight, qtype, torch.float32)
