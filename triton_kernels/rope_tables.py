"""Rotary tables. The angle is an f32 product, and its cosine and sine are taken in f64. A program owns a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.require import require
from dasllama_torch.ops.rope_tables import long_rope_tables as op_long
from dasllama_torch.ops.rope_tables import rope_tables as op
from dasllama_torch.triton_kernels.launch import check, on_device

INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _store(cos, sin, at, position, inv_freq, scale, live):
    angle = (position.to(tl.float32) * inv_freq).to(tl.float64)
    tl.store(cos + at, tl.cos(angle).to(tl.float32) * scale, mask=live)
    tl.store(sin + at, tl.sin(angle).to(tl.float32) * scale, mask=live)


@triton.jit
def rope_tables_kernel(cos, sin, positions, stride, A, inv_freq, axes, half, scale, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < half
    frequency = tl.load(inv_freq + i, mask=live, other=0.0)
    if axes is None:
        position = tl.load(positions + t * stride)
    else:  # an axis that a row does not have gives NaN
        axis = tl.load(axes + i, mask=live, other=0)
        known = (axis >= 0) & (axis < A)
        position = tl.load(positions + t * stride + axis, mask=known, other=0)
        frequency = tl.where(known, frequency, float("nan"))
    _store(cos, sin, t * half + i, position, frequency, scale, live)


@triton.jit
def long_rope_tables_kernel(cos, sin, positions, lengths, short, long, original, half, scale, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < half
    is_long = tl.load(lengths + t) > original
    frequency = tl.where(is_long, tl.load(long + i, mask=live, other=0.0), tl.load(short + i, mask=live, other=0.0))
    _store(cos, sin, t * half + i, tl.load(positions + t), frequency, scale, live)


def _tables(T: int, like: Tensor) -> tuple[Tensor, Tensor, int]:
    half = like.shape[0]
    cos, sin = (torch.empty((T, half), dtype=torch.float32, device=like.device) for _ in range(2))
    return cos, sin, triton.next_power_of_2(max(half, 16))


@implement(op, "CUDA")
def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    check("rope_tables", "positions", positions, inv_freq, INTEGERS)
    check("rope_tables", "inv_freq", inv_freq, inv_freq, (torch.float32,))
    if positions.dim() == 1:
        axes = None
    else:
        require(
            positions.dim() == 2 and axes is not None,
            lambda: f"dasllama::rope_tables: positions {list(positions.shape)} need axes",
        )
        check("rope_tables", "axes", axes, inv_freq, (torch.int32,), inv_freq.shape)
        axes = axes.contiguous()
    count_call("rope_tables", "triton")
    positions = positions.contiguous()
    A = 1 if axes is None else positions.shape[1]
    cos, sin, block = _tables(len(positions), inv_freq)
    if cos.numel():
        with on_device(inv_freq):
            rope_tables_kernel[(len(positions),)](
                cos, sin, positions, A, A, inv_freq.contiguous(), axes,
                cos.shape[1], scale, block, num_warps=1,
            )  # fmt: skip
    return cos, sin


@implement(op_long, "CUDA")
def long_rope_tables(
    positions: Tensor, lengths: Tensor, short: Tensor, long: Tensor, original: int, scale: float
) -> tuple[Tensor, Tensor]:
    check("long_rope_tables", "positions", positions, short, INTEGERS)
    check("long_rope_tables", "lengths", lengths, short, INTEGERS, positions.shape)
    check("long_rope_tables", "short", short, short, (torch.float32,))
    check("long_rope_tables", "long", long, short, (torch.float32,), short.shape)
    count_call("long_rope_tables", "triton")
    cos, sin, block = _tables(len(positions), short)
    if cos.numel():
        with on_device(short):
            long_rope_tables_kernel[(len(positions),)](
                cos, sin, positions.contiguous(), lengths.contiguous(), short.contiguous(), long.contiguous(), original,
                cos.shape[1], scale, block, num_warps=1,
            )  # fmt: skip
    return cos, sin
