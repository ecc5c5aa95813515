"""y = x W^T + bias with packed W: which kernel multiplies how many rows.

native, few rows: integer dots on the CPU's activation lattice (`few_rows.py`), equal to the CPU's results but for the
order of f32 sums. native, more rows: x and W rounded to bf16 or f16 (`ops/halves.py`), products on tensor cores, f32
sums; W is decoded into scratch, once, and the library multiplies, which was faster than tiles that decode W for
themselves. Not native: f32 throughout. Float weights go to the library, which takes them as they are.
"""

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.halves import half_of
from dasllama_torch.ops.quant_linear import _check_all as check
from dasllama_torch.ops.quant_linear import _fake_backward as check_backward
from dasllama_torch.ops.quant_linear import quant_linear as op
from dasllama_torch.ops.quant_linear import quant_linear_backward as op_backward
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels import blocks, few_rows_mma
from dasllama_torch.triton_kernels.dequantize import floats, unpack
from dasllama_torch.triton_kernels.few_rows import few_rows_float, few_rows_native
from dasllama_torch.triton_kernels.launch import rows_of


def few(qtype: int, native: bool = True) -> int:
    """Up to how many rows `few_rows.py` is the faster way."""
    return 16 if (few_rows_mma.serves(qtype) if native else blocks.layout(qtype).words == 4) else 8


@implement(op, "CUDA")
def quant_linear(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, native: bool) -> Tensor:
    N = check(x, qweight, qtype, bias)
    rows = rows_of(x)
    if ggml_types.GGML_TYPES[qtype].is_float:
        kernel, y = "torch", _product(rows, floats(qweight, qtype), native)
    elif rows.shape[0] <= few(qtype, native):
        multiply = few_rows_native if native else few_rows_float
        kernel, y = f"triton/{multiply.__name__}", multiply(rows, qweight, qtype, bias)
    else:
        dtype = half_of(x) if native else torch.float32
        kernel, y = "triton/unpack", _product(rows, unpack(qweight, qtype, dtype), native)
    count_call("quant_linear", kernel)
    if bias is not None and kernel in ("torch", "triton/unpack"):
        y = y + bias
    return y.to(x.dtype).view(*x.shape[:-1], N)


def _product(x: Tensor, w: Tensor, native: bool) -> Tensor:
    """x [M, K] @ w [N, K]^T -> f32 [M, N]; native: with x rounded to w's dtype; else both in f32."""
    if w.dtype == torch.float32 or not native:
        return x.float() @ w.float().T
    if not x.is_cuda:  # the library's product of halves into f32 is CUDA's alone
        return x.to(w.dtype).float() @ w.float().T
    return torch.mm(x.to(w.dtype), w.T, out_dtype=torch.float32)


@implement(op_backward, "CUDA")
def quant_linear_backward(grad: Tensor, qweight: Tensor, qtype: int) -> Tensor:
    dx = check_backward(grad, qweight, qtype)
    count_call("quant_linear_backward", "triton/unpack")
    return product_backward(grad.reshape(-1, grad.shape[-1]).float(), qweight, qtype).to(dx.dtype).view(dx.shape)


def product_backward(grad: Tensor, qweight: Tensor, qtype: int) -> Tensor:
    """grad f32 [M, N] times qweight u8 [N, row_bytes] of any type, in f32 -> [M, K]."""
    is_float = ggml_types.GGML_TYPES[qtype].is_float
    return grad @ (floats(qweight, qtype).float() if is_float else unpack(qweight, qtype, torch.float32))
