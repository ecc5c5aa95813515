"""A product per row with the matrix that an id names: experts of a mixture (Shazeer et al. 2017, arXiv:1701.06538).

Every output row is, bit for bit, what `quant_linear` gives for that row of x and the matrix of its expert, however many
rows an expert has in a call: kernels may group rows by expert or take them one by one.
"""

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import row_length
from dasllama_torch.ops.lattices import FLOATS
from dasllama_torch.ops.quant_linear import quant_linear, quant_linear_backward
from dasllama_torch.ops.registry import Cost, define, register_backward
from dasllama_torch.ops.require import require


def _stack_shape(op: str, qweight: Tensor, qtype: int) -> tuple[int, int, int]:
    """(E, N, K) of packed matrices [E, N, row_bytes], which ops address in place."""
    K = row_length(op, qweight, qtype)
    require(
        qweight.dim() == 3 and qweight.is_contiguous(),
        lambda: (
            f"dasllama::{op}: qweight must be a contiguous [E, N, row_bytes], "
            f"found {'' if qweight.is_contiguous() else 'strided '}{list(qweight.shape)}"
        ),
    )
    return qweight.shape[0], qweight.shape[1], K


def _check(op: str, what: str, rows: Tensor, shapes: tuple[tuple[int, ...], ...], ids: Tensor, qweight: Tensor) -> None:
    require(
        ids.dtype in (torch.int64, torch.int32) and ids.dim() >= 1 and ids.device == qweight.device,
        lambda: (
            f"dasllama::{op}: ids must be int64 or int32 [..., k] on {qweight.device} like qweight, "
            f"found {ids.dtype} {list(ids.shape)} on {ids.device}"
        ),
    )
    require(
        rows.dtype in FLOATS and rows.shape in shapes and rows.device == qweight.device,
        lambda: (
            f"dasllama::{op}: {what} must be f32, f16 or bf16 {' or '.join(str(list(s)) for s in shapes)} on "
            f"{qweight.device} for these ids and qweight, found {rows.dtype} {list(rows.shape)} on {rows.device}"
        ),
    )


def _check_all(x: Tensor, qweight: Tensor, qtype: int, ids: Tensor, bias: Tensor | None) -> int:
    E, N, K = _stack_shape("expert_linear", qweight, qtype)
    _check("expert_linear", "x", x, ((*ids.shape[:-1], K), (*ids.shape, K)), ids, qweight)
    require(
        bias is None or (bias.dtype == torch.float32 and bias.shape == (E, N) and bias.device == x.device),
        lambda: (
            f"dasllama::expert_linear: bias must be f32 {[E, N]} on {x.device}, "
            f"found {bias.dtype} {list(bias.shape)} on {bias.device}"
        ),
    )
    return N


def _check_ids(op: str, ids: Tensor, E: int) -> Tensor:
    flat = ids.reshape(-1)
    for bad in flat[(flat < 0) | (flat >= E)][:1].tolist():
        raise RuntimeError(f"dasllama::{op}: id {bad} is not one of {E} experts")
    return flat


def _fake(x: Tensor, qweight: Tensor, qtype: int, ids: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    return x.new_empty((*ids.shape, _check_all(x, qweight, qtype, ids, bias)))


def _cost(x: Tensor, qweight: Tensor, qtype: int, ids: Tensor, bias: Tensor | None, native: bool) -> Cost:
    E, N, K = _stack_shape("expert_linear", qweight, qtype)
    rows, used, row = ids.numel(), ids.unique().numel(), ggml_types.GGML_TYPES[qtype]
    nbytes = used * (qweight.nbytes // E) + x.nbytes + rows * N * x.element_size()
    work = f"{rows} x {K} -> {N} {row.name}, {used} of {E} experts"
    return Cost(nbytes, 2 * rows * N * K, work, native and not row.is_float)


@define(fake=_fake, cost=_cost)
def expert_linear(x: Tensor, qweight: Tensor, qtype: int, ids: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    """x times the matrix qweight[id], for k ids per token: floating [..., K] or [..., k, K] -> [..., k, N] in x.dtype.

    qweight: u8 [E, N, row_bytes] of type qtype. ids: int64 or int32 [..., k]; one outside [0, E) raises. x of ids' rank
    is a row per token that all its k experts share, x of one rank more a row per id. bias: f32 [E, N]. native: as in
    `quant_linear`.
    """
    N = _check_all(x, qweight, qtype, ids, bias)
    flat = _check_ids("expert_linear", ids, qweight.shape[0])
    if x.dim() == ids.dim():
        x = x.unsqueeze(-2).expand(*ids.shape, -1)
    rows, y = x.reshape(-1, x.shape[-1]), x.new_empty((flat.numel(), N))
    for e in flat.unique().tolist():
        own = flat == e
        y[own] = quant_linear.reference(rows[own], qweight[e], qtype, None if bias is None else bias[e], native)
    return y.view(*ids.shape, N)


def _fake_backward(grad: Tensor, qweight: Tensor, qtype: int, ids: Tensor, shared: bool) -> Tensor:
    _, N, K = _stack_shape("expert_linear_backward", qweight, qtype)
    _check("expert_linear_backward", "grad", grad, ((*ids.shape, N),), ids, qweight)
    return grad.new_empty((*(ids.shape[:-1] if shared else ids.shape), K))


@define(fake=_fake_backward)
def expert_linear_backward(grad: Tensor, qweight: Tensor, qtype: int, ids: Tensor, shared: bool) -> Tensor:
    """Gradient of `expert_linear` with respect to x: grad [..., k, N] -> [..., k, K], f32 inside.

    shared: the k experts of a token read one row, whose gradient is the sum over them, in order: -> [..., K].
    """
    E, N, K = _stack_shape("expert_linear_backward", qweight, qtype)
    _check("expert_linear_backward", "grad", grad, ((*ids.shape, N),), ids, qweight)
    flat = _check_ids("expert_linear_backward", ids, E)
    rows = grad.reshape(-1, N).float()
    dx = rows.new_empty((flat.numel(), K))
    for e in flat.unique().tolist():
        own = flat == e
        dx[own] = quant_linear_backward.reference(rows[own], qweight[e], qtype)
    dx = dx.view(*ids.shape, K)
    return (dx.sum(-2) if shared else dx).to(grad.dtype)


def _setup(ctx, inputs, output):
    x, qweight, ctx.qtype, ids, bias, _ = inputs
    ctx.shared = x.dim() == ids.dim()
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(qweight, ids)


def _backward(ctx, grad):
    qweight, ids = ctx.saved_tensors
    dx = expert_linear_backward(grad, qweight, ctx.qtype, ids, ctx.shared) if ctx.needs_input_grad[0] else None
    dbias = None
    if ctx.needs_input_grad[4]:
        rows = grad.reshape(-1, grad.shape[-1]).float()
        dbias = rows.new_zeros(ctx.bias_shape).index_add(0, ids.reshape(-1), rows)
    return dx, None, None, None, dbias, None


register_backward(expert_linear, _backward, _setup)
