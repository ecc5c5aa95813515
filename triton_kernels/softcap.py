"""cap * tanh(x / cap) and its gradient, f32 inside. A program owns BLOCK elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.softcap import softcap as op
from dasllama_torch.ops.softcap import softcap_backward as op_backward
from dasllama_torch.triton_kernels.functions import tanh
from dasllama_torch.triton_kernels.launch import check, on_device

BLOCK = 1024


@triton.jit
def softcap_kernel(y, x, n, cap, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + i, (tanh(v / cap) * cap).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def softcap_backward_kernel(dx, grad, y, n, cap, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(y + i, mask=i < n, other=0.0).to(tl.float32)
    g = tl.load(grad + i, mask=i < n, other=0.0).to(tl.float32)
    slope = ((cap - v) / cap) * ((cap + v) / cap)  # 1 - (y / cap)^2 without the loss of digits near the cap
    tl.store(dx + i, (g * slope).to(dx.dtype.element_ty), mask=i < n)


@implement(op, "CUDA")
def softcap(x: Tensor, cap: float) -> Tensor:
    check("softcap", "x", x, x)
    count_call("softcap", "triton")
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        with on_device(x):
            softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](y, x, x.numel(), cap, BLOCK)
    return y


@implement(op_backward, "CUDA")
def softcap_backward(grad: Tensor, y: Tensor, cap: float) -> Tensor:
    check("softcap_backward", "grad", grad, y, shape=y.shape)
    count_call("softcap_backward", "triton")
    grad, y = grad.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    if y.numel():
        with on_device(y):
            softcap_backward_kernel[(triton.cdiv(y.numel(), BLOCK),)](dx, grad, y, y.numel(), cap, BLOCK)
    return dx
