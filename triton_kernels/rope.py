"""Rotation of half-split heads, f32 inside. A program owns HEADS heads of a row: pairs (i, i + R/2), and what lies
beyond."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.require import require
from dasllama_torch.ops.rope import rope as op
from dasllama_torch.triton_kernels.launch import check, heads_of, on_device

HEADS = 4


@triton.jit
def rope_kernel(y, x, row_stride, head_stride, cos, sin, H, D, half, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    x += t * row_stride + h.to(tl.int64) * head_stride
    y += (t * H + h) * D
    pair = (h < H) & (i < half)
    a = tl.load(x + i, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(x + half + i, mask=pair, other=0.0).to(tl.float32)
    c = tl.load(cos + t * half + i, mask=i < half, other=0.0)
    s = tl.load(sin + t * half + i, mask=i < half, other=0.0)
    tl.store(y + i, (a * c - b * s).to(y.dtype.element_ty), mask=pair)
    tl.store(y + half + i, (b * c + a * s).to(y.dtype.element_ty), mask=pair)
    for first in range(2 * half, D, BLOCK):
        rest = (h < H) & (first + i < D)
        tl.store(y + first + i, tl.load(x + first + i, mask=rest), mask=rest)


def rotate(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x rotated, into y, contiguous."""
    (T, half), (H, D) = cos.shape, x.shape[-2:]
    if y.numel():
        heads = heads_of(x)
        block = triton.next_power_of_2(max(half, 16))
        with on_device(x):
            rope_kernel[(T, triton.cdiv(H, HEADS))](
                y, heads, heads.stride(0), heads.stride(1), cos.contiguous(), sin.contiguous(), H, D, half, HEADS, block
            )


@implement(op, "CUDA")
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    T, half = cos.shape
    H, D = x.shape[-2:]
    check("rope", "x", x, x)
    check("rope", "cos", cos, x, (torch.float32,))
    check("rope", "sin", sin, x, (torch.float32,), cos.shape)
    require(
        x.numel() == T * H * D and 2 * half <= D,
        lambda: f"dasllama::rope: cos must be [rows of x, at most {D // 2}] for x {list(x.shape)}, found {[T, half]}",
    )
    count_call("rope", "triton")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate(y, x, cos, sin)
    return y
