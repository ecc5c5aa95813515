"""Root-mean-square norm and its gradient, f32 inside. A program owns a row, which it reads twice by parts of BLOCK."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.rms_norm import rms_norm as op
from dasllama_torch.ops.rms_norm import rms_norm_backward as op_backward
from dasllama_torch.triton_kernels.launch import check, on_device, rows_of


@triton.jit
def _part(x, weight, first, C, BLOCK: tl.constexpr):
    """Columns [first, first + BLOCK) of a row as f32, times weight if there is one."""
    c = first + tl.arange(0, BLOCK)
    v = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)
    return v if weight is None else v * tl.load(weight + c, mask=c < C, other=0.0)


@triton.jit
def rms_norm_kernel(y, x, stride, weight, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, C, BLOCK):
        v = _part(x + row * stride, None, first, C, BLOCK)
        squares += v * v
    r = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        v = _part(x + row * stride, None, first, C, BLOCK) * r
        if weight is not None:
            v *= tl.load(weight + c, mask=c < C, other=0.0)
        tl.store(y + row * C + c, v.to(y.dtype.element_ty), mask=c < C)


@triton.jit
def rms_norm_backward_kernel(dx, grad, grad_stride, x, stride, weight, C, eps, BLOCK: tl.constexpr):
    """dx = r * (g - x * r^2 * mean(g * x)), with r = 1 / sqrt(mean(x^2) + eps) and g = grad * weight."""
    row = tl.program_id(0).to(tl.int64)
    squares, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, C, BLOCK):
        v = _part(x + row * stride, None, first, C, BLOCK)
        squares += v * v
        products += v * _part(grad + row * grad_stride, weight, first, C, BLOCK)
    r = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    along = tl.sum(products, 0) / C * r * r
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        v = _part(x + row * stride, None, first, C, BLOCK)
        d = r * (_part(grad + row * grad_stride, weight, first, C, BLOCK) - v * along)
        tl.store(dx + row * C + c, d.to(dx.dtype.element_ty), mask=c < C)


def _block(C: int) -> tuple[int, int]:
    """Columns of a part, and warps that share them."""
    block = min(triton.next_power_of_2(max(C, 1)), 4096)
    return block, max(1, min(8, block // 256))


def _check(op: str, x: Tensor, weight: Tensor | None) -> None:
    check(op, "x", x, x)
    if weight is not None:
        check(op, "weight", weight, x, (torch.float32,), (x.shape[-1],))


def normalize(y: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
    """The norm of x into y, contiguous."""
    if y.numel():
        rows, C = rows_of(x), x.shape[-1]
        weight = weight if weight is None else weight.contiguous()
        block, warps = _block(C)
        with on_device(x):
            rms_norm_kernel[(len(rows),)](y, rows, rows.stride(0), weight, C, eps, block, num_warps=warps)


@implement(op, "CUDA")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _check("rms_norm", x, weight)
    count_call("rms_norm", "triton")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normalize(y, x, weight, eps)
    return y


@implement(op_backward, "CUDA")
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _check("rms_norm_backward", x, weight)
    check("rms_norm_backward", "grad", grad, x, shape=x.shape)
    count_call("rms_norm_backward", "triton")
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        rows, grads, C = rows_of(x), rows_of(grad), x.shape[-1]
        weight = weight if weight is None else weight.contiguous()
        block, warps = _block(C)
        with on_device(x):
            rms_norm_backward_kernel[(len(rows),)](
                dx, grads, grads.stride(0), rows, rows.stride(0), weight, C, eps, block, num_warps=warps
            )
    return dx
