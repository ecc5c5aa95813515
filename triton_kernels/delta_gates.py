"""What each head of a gated delta rule forgets and takes in. A program owns BLOCK elements of T x H.

The softplus is max(x, 0) + log(1 + e^-|x|), whose second part is taken in f64: a GPU's f32 logarithm loses the small
results that a head with little to forget has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.delta_gates import delta_gates as op
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels.functions import logistic
from dasllama_torch.triton_kernels.launch import check, on_device, rows_of

BLOCK = 256


@triton.jit
def _softplus(x):
    u = tl.exp(-tl.abs(x).to(tl.float64))
    return tl.where(x > 0, x, 0.0) + tl.where(u < 1e-9, u, tl.log(1.0 + u)).to(tl.float32)


@triton.jit
def delta_gates_kernel(g, beta, a, a_stride, b, b_stride, decay, dt_bias, n, H, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, t, h = i < n, i // H, i % H
    x = tl.load(a + t * a_stride + h, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias + h)
    tl.store(g + i, tl.load(decay + h) * _softplus(x), mask=live)
    v = tl.load(b + t * b_stride + h, mask=live, other=0.0).to(tl.float32)
    tl.store(beta + i, logistic(v), mask=live)


@implement(op, "CUDA")
def delta_gates(a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    H = decay.shape[0]
    check("delta_gates", "a", a, decay)
    check("delta_gates", "b", b, decay, shape=a.shape)
    check("delta_gates", "decay", decay, decay, (torch.float32,), (a.shape[-1],))
    check("delta_gates", "dt_bias", dt_bias, decay, (torch.float32,), (H,))
    count_call("delta_gates", "triton")
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if g.numel():
        rows_a, rows_b = rows_of(a), rows_of(b)
        with on_device(a):
            delta_gates_kernel[(triton.cdiv(g.numel(), BLOCK),)](
                g, beta, rows_a, rows_a.stride(0), rows_b, rows_b.stride(0), decay.contiguous(), dt_bias.contiguous(),
                g.numel(), H, BLOCK,
            )  # fmt: skip
    return g, beta
