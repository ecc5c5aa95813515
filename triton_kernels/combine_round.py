"""What programs that share a row's keys found (`paged_attention.py`), added up and rounded for the product that takes
it, in one launch. The result itself is written too."""

import triton
import triton.language as tl

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels.launch import await_inputs, early, on_device
from dasllama_torch.triton_kernels.paged_attention import Shared, finish, merge
from dasllama_torch.triton_kernels.quantize_activation import ROUNDS, Rounded, round_blocks, unrounded


@triton.jit
def combine_round_kernel(
    y, q, d, s, parts, tops, totals, sinks, M, H, splits,
    LATTICE: tl.constexpr, SPAN: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program owns HEADS heads of a row of M, whole blocks of SPAN."""
    await_inputs(EARLY)
    m = tl.program_id(0).to(tl.int64)
    h, dv = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DV)[None, :]
    at = m * H + h
    top, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DV], tl.float32)
    for first in range(0, splits, SPLITS):
        acc, top, total = merge(acc, top, total, parts, tops, totals, at, dv, DV, DV, M * H, first, splits, SPLITS)
    acc = finish(acc, top, total, sinks, h, tl.full([HEADS], 1, tl.int1))
    tl.store(y + at[:, None] * DV + dv, acc)
    BLOCKS: tl.constexpr = HEADS * DV // SPAN
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    round_blocks(tl.reshape(acc, [BLOCKS, SPAN]), q, d, s, m, block, block >= 0, M, LATTICE, SPAN, BLOCKS)


def _heads(shared: Shared, lattice: int) -> int:
    """Heads of a program; 0 if they are no whole blocks."""
    H, Dv = shared.out.shape[-2:]
    span = ggml_types.GGML_TYPES[lattice].block
    heads = max(1, span // Dv)
    return heads if Dv & (Dv - 1) == 0 and H % heads == 0 and Dv >= 16 else 0


def can_round(shared: Shared, lattice: int) -> bool:
    return bool(_heads(shared, lattice))


def combine_rounded(shared: Shared, lattice: int) -> Rounded:
    """The sum of the parts into shared.out, f32 [..., H, Dv], and on a lattice of integers, as rows of H Dv."""
    (splits, M, H, Dv), heads = shared.sums.shape, _heads(shared, lattice)
    a = unrounded(M, H * Dv, lattice, shared.out.device)
    with on_device(shared.out):
        combine_round_kernel[(M, H // heads)](
            shared.out, a.q, a.d, a.s, shared.sums, shared.tops, shared.totals, shared.sinks, M, H, splits,
            lattice, a.span, heads, Dv, shared.chunk,
            num_warps=4, enable_fp_fusion=ROUNDS, **early(shared.out),
        )  # fmt: skip
    return a
