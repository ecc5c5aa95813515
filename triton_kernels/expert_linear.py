"""A product per row with the matrix that an id names. One token, and few rows of a type that tensor cores do not take
as it is: every row on its own, as `quant_linear` multiplies few. Few rows for an expert: those of one share a read of
its packed matrix. More of them, and float weights: rows grouped by expert, of matrices that are decoded first."""

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.expert_linear import _check_all as check
from dasllama_torch.ops.expert_linear import _fake_backward as check_backward
from dasllama_torch.ops.expert_linear import expert_linear as op
from dasllama_torch.ops.expert_linear import expert_linear_backward as op_backward
from dasllama_torch.ops.halves import half_of
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels import blocks, few_rows_mma
from dasllama_torch.triton_kernels.dequantize import FLOATS
from dasllama_torch.triton_kernels.few_rows import few_rows_float, few_rows_native
from dasllama_torch.triton_kernels.few_rows_experts import few_rows_experts
from dasllama_torch.triton_kernels.grouped_rows import grouped_rows
from dasllama_torch.triton_kernels.launch import rows_of
from dasllama_torch.triton_kernels.quant_linear import product_backward

# Rows for an expert, on average: up to which reading its packed matrix for each costs less than decoding it once, and
# up to which reading it for some of them together does.
FEW, TOGETHER = 3, 16


def _least(qtype: int) -> int:
    """Rows for an expert, on average, from which those of one expert had better share what is read of its matrix."""
    return 2 if qtype == ggml_types.Q8_0 or qtype in blocks.TABLES else 1


@implement(op, "CUDA")
def expert_linear(x: Tensor, qweight: Tensor, qtype: int, ids: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    N = check(x, qweight, qtype, ids, bias)
    rows, flat = rows_of(x), ids.reshape(-1).contiguous()
    bias = bias if bias is None else bias.contiguous()
    is_float = ggml_types.GGML_TYPES[qtype].is_float
    together = native and few_rows_mma.serves(qtype) and len(flat) > ids.shape[-1]
    if together and _least(qtype) * len(qweight) <= len(flat) <= TOGETHER * len(qweight):
        kernel = "triton/few_rows_experts"
        y = few_rows_experts(rows, qweight, qtype, bias, flat)
    elif not is_float and len(flat) <= FEW * len(qweight):
        multiply = few_rows_native if native else few_rows_float
        kernel = f"triton/{multiply.__name__}"
        y = multiply(rows, qweight, qtype, bias, flat, len(flat) // max(len(rows), 1))
    else:
        kernel, dtype = "triton/grouped_rows", torch.float32
        if native:
            dtype = FLOATS[qtype] if is_float else half_of(x)
        y = grouped_rows(rows.to(dtype), qweight, qtype, bias, flat, x.dtype)
    count_call("expert_linear", kernel)
    return y.view(*ids.shape, N)


@implement(op_backward, "CUDA")
def expert_linear_backward(grad: Tensor, qweight: Tensor, qtype: int, ids: Tensor, shared: bool) -> Tensor:
    dx = check_backward(grad, qweight, qtype, ids, shared)
    count_call("expert_linear_backward", "triton/unpack")
    rows, flat = grad.reshape(-1, grad.shape[-1]).float(), ids.reshape(-1)
    each = rows.new_full((len(flat), dx.shape[-1]), float("nan"))  # of an id that is none
    for e in flat.unique().tolist():
        if 0 <= e < len(qweight):
            own = flat == e
            each[own] = product_backward(rows[own], qweight[e], qtype)
    each = each.view(*ids.shape, -1)
    return (each.sum(-2) if shared else each).to(dx.dtype)
