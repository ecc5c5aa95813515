"""The weighted sum of experts' outputs, f32 inside, k ascending. A program owns BLOCK columns of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.moe_combine import _check as check_combine
from dasllama_torch.ops.moe_combine import moe_combine as op
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels.launch import on_device

BLOCK = 512


@triton.jit
def moe_combine_kernel(out, y, weights, k, C, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(k):
        v = tl.load(y + (t * k + j) * C + c, mask=c < C, other=0.0).to(tl.float32)
        total += v * tl.load(weights + t * k + j)
    tl.store(out + t * C + c, total.to(out.dtype.element_ty), mask=c < C)


@implement(op, "CUDA")
def moe_combine(y: Tensor, weights: Tensor) -> Tensor:
    check_combine(y, weights)
    count_call("moe_combine", "triton")
    *leading, k, C = y.shape
    out = torch.empty((*leading, C), dtype=y.dtype, device=y.device)
    if out.numel():
        with on_device(y):
            moe_combine_kernel[(out.numel() // C, triton.cdiv(C, BLOCK))](
                out, y.contiguous(), weights.contiguous(), k, C, BLOCK
            )
    return out
