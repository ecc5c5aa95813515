"""A norm, or a gated activation, and the rounding of its result for the products that take it, in one launch each. The
result itself is written too."""

import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import gated_act as formulas
from dasllama_torch.triton_kernels.functions import logistic
from dasllama_torch.triton_kernels.gated_act import _clamped, _z
from dasllama_torch.triton_kernels.launch import await_inputs, early, on_device
from dasllama_torch.triton_kernels.quantize_activation import ROUNDS, Rounded, round_blocks, unrounded

SIGMOID = tl.constexpr(formulas.SIGMOID)
WIDEST = 16384  # columns of a norm that a program holds in registers


@triton.jit
def norm_round_kernel(
    y, q, d, s, x, weight, M, C, eps, LATTICE: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCKS blocks of a row of C <= ALL columns, and reads all of it: there are few rows, and one
    program to each would take longer than what they all read again."""
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < C // SPAN
    at, column = block[:, None] * SPAN + tl.arange(0, SPAN)[None, :], tl.arange(0, ALL)
    gain = 1.0
    if weight is not None:
        gain = tl.load(weight + at, mask=live[:, None], other=0.0)
    await_inputs(EARLY)
    v = tl.load(x + m * C + at, mask=live[:, None], other=0.0)
    row = tl.load(x + m * C + column, mask=column < C, other=0.0)
    v *= tl.rsqrt(tl.sum(row * row, 0) / C + eps) * gain
    tl.store(y + m * C + at, v, mask=live[:, None])
    round_blocks(v, q, d, s, m, block, live, M, LATTICE, SPAN, BLOCKS)


@triton.jit
def act_round_kernel(
    y, q, d, s, gate, gate_stride, up, up_stride, M, C,
    ACT: tl.constexpr, LATTICE: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCKS blocks of a row."""
    await_inputs(EARLY)
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < C // SPAN
    at = block[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    x = tl.load(gate + m * gate_stride + at, mask=live[:, None], other=0.0)
    u = tl.load(up + m * up_stride + at, mask=live[:, None], other=0.0)
    x, u = _clamped(x, u, ACT)
    v = logistic(_z(x, ACT))
    if ACT != SIGMOID:
        v = x * v
    v *= u
    tl.store(y + m * C + at, v, mask=live[:, None])
    round_blocks(v, q, d, s, m, block, live, M, LATTICE, SPAN, BLOCKS)


def norm_rounded(y: Tensor, x: Tensor, weight: Tensor | None, eps: float, lattice: int) -> Rounded:
    """The norm of x f32 [M, C <= WIDEST] into y, both contiguous, and y on a lattice of integers that divides C."""
    (M, C), a = x.shape, unrounded(*x.shape, lattice, x.device)
    count, all_of_it = 256 // a.span, triton.next_power_of_2(C)
    with on_device(x):
        norm_round_kernel[(M, triton.cdiv(C // a.span, count))](
            y, a.q, a.d, a.s, x, weight, M, C, eps, lattice, a.span, count, all_of_it,
            num_warps=max(1, min(16, all_of_it // 1024)), enable_fp_fusion=ROUNDS, **early(x),
        )  # fmt: skip
    return a


def act_rounded(y: Tensor, gate: Tensor, up: Tensor, act: int, lattice: int) -> Rounded:
    """act(gate) * up of f32 [M, C], rows contiguous, into y, contiguous, and y on a lattice that divides C."""
    (M, C), a = gate.shape, unrounded(*gate.shape, lattice, gate.device)
    count = 512 // a.span
    with on_device(gate):
        act_round_kernel[(M, triton.cdiv(C // a.span, count))](
            y, a.q, a.d, a.s, gate, gate.stride(0), up, up.stride(0), M, C, act, lattice, a.span, count,
            num_warps=4, enable_fp_fusion=ROUNDS, **early(gate),
        )  # fmt: skip
    return a
