"""Activations rounded to a lattice of integers, bit for bit as `ops.lattices` says.

A program owns BLOCKS blocks of one row, of SPAN elements each: the largest magnitude of a block gives d and q = x / d.
Arrays lie apart, as integer dots read them, pieces of all rows beside each other: q int8 [K / 32, M, 32],
d f32 [K / SPAN, M] and, for types with offsets, s f32 [K / SPAN, M, SPAN / 16], the sums that `least` multiplies: of 16
elements q on Q8_K; on Q8_1 it is d * sum(q) of 32 elements, rounded to f16, which stands with the first 16 and zero
with the others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.lattices import _check as check
from dasllama_torch.ops.lattices import quantize_activation as op
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels.launch import await_inputs, early, on_device, rows_of

Q8_1, Q8_K = tl.constexpr(ggml_types.Q8_1), tl.constexpr(ggml_types.Q8_K)


ROUNDS = False  # enable_fp_fusion: products must round before 1.5 * 2^23 is added to them


class Rounded(NamedTuple):
    """M rows on a lattice, whose blocks have `span` elements."""

    q: Tensor  # int8 [K / 32, M, 32]
    d: Tensor  # f32 [K / span, M]
    s: Tensor  # f32 [K / span, M, span / 16]
    span: int

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def width(self) -> int:
        return 32 * len(self.q)


@triton.jit
def round_blocks(
    v, q_out, d_out, s_out, m, block, live, M, LATTICE: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr
):
    """v f32 [BLOCKS, SPAN], `block`s of row m of M, those that are live, to their places."""
    # Magnitudes compare as integers, where NaN is above all numbers; of equal ones the first decides the sign in Q8_K.
    i = tl.arange(0, SPAN)[None, :]
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    most = tl.max(magnitude, 1)
    top = most.to(tl.float32, bitcast=True)
    if LATTICE == Q8_K:
        first = tl.min(tl.where(magnitude == most[:, None], i, SPAN), 1)
        top = tl.sum(tl.where(i == first[:, None], bits, 0), 1).to(tl.float32, bitcast=True)
        inverse = tl.where(top == 0, 0.0, tl.div_rn(tl.full([BLOCKS], -127.0, tl.float32), top))
        d = tl.where(top == 0, 0.0, tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), inverse))
    else:
        inverse = tl.where(top == 0, 0.0, tl.div_rn(tl.full([BLOCKS], 127.0, tl.float32), top))
        d = tl.div_rn(top, tl.full([BLOCKS], 127.0, tl.float32))
    # Adding 1.5 * 2^23 leaves a whole number, halves to even; what is no number, or beyond int8, becomes 0.
    scaled = v * inverse[:, None]
    whole = (scaled + 12582912.0) - 12582912.0
    q = tl.where(tl.abs(whole) <= 127, whole, 0.0).to(tl.int32)
    piece = block[:, None] * (SPAN // 32) + i // 32
    tl.store(q_out + (piece * M + m) * 32 + i % 32, q.to(tl.int8), mask=live[:, None])

    sums = tl.sum(tl.reshape(q, [BLOCKS, SPAN // 16, 16]), 2)
    half = tl.arange(0, SPAN // 16)[None, :]
    if LATTICE == Q8_K:
        s = sums.to(tl.float32)
    else:
        total = (d * tl.sum(sums, 1).to(tl.float32)).to(tl.float16).to(tl.float32)
        s = tl.where(half == 0, total[:, None], 0.0)
        d = d.to(tl.float16).to(tl.float32)
    at = block * M + m
    tl.store(d_out + at, d, mask=live)
    tl.store(s_out + at[:, None] * (SPAN // 16) + half, s, mask=live[:, None])


@triton.jit
def quantize_activation_kernel(
    q_out, d_out, s_out, x, x_stride, M, K,
    LATTICE: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < K // SPAN
    at = block[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    v = tl.load(x + m * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    round_blocks(v, q_out, d_out, s_out, m, block, live, M, LATTICE, SPAN, BLOCKS)


def unrounded(M: int, K: int, lattice: int, device: torch.device) -> Rounded:
    """Memory for M rows on Q8_0, Q8_1 or Q8_K."""
    span = ggml_types.GGML_TYPES[lattice].block
    q = torch.empty((K // 32, M, 32), dtype=torch.int8, device=device)
    d = torch.empty((K // span, M), dtype=torch.float32, device=device)
    s = torch.empty((K // span, M, span // 16), dtype=torch.float32, device=device)
    return Rounded(q, d, s, span)


def rounded(x: Tensor, lattice: int) -> Rounded:
    """x floating [M, K], rows contiguous, on Q8_0, Q8_1 or Q8_K."""
    (M, K), a = x.shape, unrounded(*x.shape, lattice, x.device)
    count = 1024 // a.span
    if x.numel():
        with on_device(x):
            quantize_activation_kernel[(M, triton.cdiv(K // a.span, count))](
                a.q, a.d, a.s, x, x.stride(0), M, K, lattice, a.span, count,
                num_warps=4, enable_fp_fusion=ROUNDS, **early(x),
            )  # fmt: skip
    return a


@implement(op, "CUDA")
def quantize_activation(x: Tensor, lattice: int) -> Tensor:
    check(x, lattice)
    row = ggml_types.GGML_TYPES[lattice]
    if row.is_float:
        count_call("quantize_activation", "torch")
        return op.reference(x, lattice)
    count_call("quantize_activation", "triton")
    r = rounded(rows_of(x), lattice)

    def of_blocks(t: Tensor, size: int) -> Tensor:
        return t.contiguous().view(torch.uint8).view(-1, size)

    q = r.q.transpose(0, 1).contiguous()
    parts = [of_blocks(q, row.block)]
    if lattice == ggml_types.Q8_K:
        sums = q.view(-1, 16).sum(-1, dtype=torch.int16)
        parts = [of_blocks(r.d.T, 4), *parts, of_blocks(sums, 32)]
    else:
        s = [of_blocks(r.s[..., 0].T.half(), 2)] if lattice == ggml_types.Q8_1 else []
        parts = [of_blocks(r.d.T.half(), 2), *s, *parts]
    return torch.cat(parts, 1).view(*x.shape[:-1], row.row_bytes(x.shape[-1]))
