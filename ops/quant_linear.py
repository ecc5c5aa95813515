"""y = x W^T + bias with packed W, and its gradient with respect to x.

With native=False the weight is dequantized and multiplied in f32. With native=True the activation is first rounded to
the lattice of the weight's type (`lattices.py`); products of integers are exact, and their floats are folded into one
f32 accumulator per output in a fixed order. Every kernel on the CPU follows this order to the bit, whatever its tile,
thread or instruction set, so that results do not depend on how many rows are multiplied at once:

    acc = 0; for each unit of K, ascending (32 elements; 256 on Q8_K; 16 for NVFP4, whose scales are per 16):
        isum = sum over the unit of scale[g] * q_w * q_x            int32, exact
        acc = fma(float(isum), d_w * d_x, acc)                      d_w * d_x is one f32 product
        on Q8_1:       acc = fma(m_w, s_x, acc)
        K-types with minima (Q2_K, Q4_K, Q5_K):
                       acc = fma(-float(sum over g of min[g] * sum_x[g]), dmin_w * d_x, acc)
    y = acc + bias

q_w, scale, d_w, dmin_w, min and m_w are those of `blocks.Parts`: constants such as 1/8 are part of d_w (exactly), so
that q_w and scale are integers; sum_x[g] is the sum of q_x over the elements of min[g]. A type whose d_w spans more
than a unit (Q1_0: 128, Q2_0: 64) uses the same d_w in each. fma rounds once. F16 and BF16 weights: the activation is
rounded to that type, products and sums are f32 in any order; F32 weights: the same without rounding.
"""

import contextlib

import torch
from torch import Tensor

from dasllama_torch.ops import blocks, ggml_types
from dasllama_torch.ops.dequantize import dequantize, matrix_shape
from dasllama_torch.ops.lattices import FLOATS, quantize_activation, unpack_activation
from dasllama_torch.ops.registry import Cost, define, native_library, register_backward
from dasllama_torch.ops.require import require


def _check(op: str, what: str, t: Tensor, width: int, qweight: Tensor) -> None:
    require(
        t.dtype in FLOATS and t.dim() >= 1 and t.shape[-1] == width and t.device == qweight.device,
        lambda: (
            f"dasllama::{op}: {what} must be f32, f16 or bf16 [..., {width}] on {qweight.device} for this qweight, "
            f"found {t.dtype} {list(t.shape)} on {t.device}"
        ),
    )


def _check_all(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None) -> int:
    N, K = matrix_shape("quant_linear", qweight, qtype)
    _check("quant_linear", "x", x, K, qweight)
    require(
        bias is None or (bias.dtype == torch.float32 and bias.shape == (N,) and bias.device == x.device),
        lambda: (
            f"dasllama::quant_linear: bias must be f32 [{N}] on {x.device}, "
            f"found {bias.dtype} {list(bias.shape)} on {bias.device}"
        ),
    )
    return N


def _fake(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, native: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], _check_all(x, qweight, qtype, bias)))


def _cost(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, native: bool) -> Cost:
    N, K = matrix_shape("quant_linear", qweight, qtype)
    M, row = x.numel() // K, ggml_types.GGML_TYPES[qtype]
    nbytes = qweight.nbytes + x.nbytes + M * N * x.element_size()
    return Cost(nbytes, 2 * M * N * K, f"{M} x {K} -> {N} {row.name}", native and not row.is_float)


@define(fake=_fake, cost=_cost)
def quant_linear(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, native: bool) -> Tensor:
    """x floating [..., K], qweight u8 [N, row_bytes] of type qtype, bias f32 [N] -> [..., N] in x.dtype, f32 inside.

    native: round the activation to the type's lattice as ggml does; else multiply in f32 with dequantized weights.
    """
    N = _check_all(x, qweight, qtype, bias)
    row = ggml_types.GGML_TYPES[qtype]
    rows = x.reshape(-1, x.shape[-1])
    if not native:
        y = rows.float() @ dequantize.reference(qweight, qtype).T
    elif row.is_float:
        y = quantize_activation.reference(rows, row.lattice).float() @ dequantize.reference(qweight, qtype).T
    else:
        y = _fold(rows, qweight, row)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).view(*x.shape[:-1], N)


def _fold(x: Tensor, qweight: Tensor, row: ggml_types.GGMLType) -> Tensor:
    """x [M, K] on the lattice of a packed type -> f32 [M, N], in the order given at the top of this file."""
    M, N, K = x.shape[0], qweight.shape[0], x.shape[1]
    w = blocks.unpack_blocks(row.id, qweight.reshape(-1, row.bytes))
    a = unpack_activation(row.lattice, quantize_activation.reference(x, row.lattice))
    span_x, span_w = ggml_types.GGML_TYPES[row.lattice].block, row.block // w.d.shape[1]  # elements under one d
    unit = min(span_x, span_w)
    units = K // unit
    # Integer products as f64: below 2^53, so that a matrix product of them is exact in any order.
    qw = w.q if w.scale is None else w.q * w.scale.repeat_interleave(row.block // w.scale.shape[1], 1)
    qw, qx = qw.view(N, units, unit).double(), a.q.view(M, units, unit).double()
    dw = w.d.view(N, K // span_w)
    acc = x.new_zeros(M, N, dtype=torch.float32)
    for u in range(units):
        dx = a.d[:, u * unit // span_x, None]
        acc = _fma((qx[:, u] @ qw[:, u].T).float(), dw[None, :, u * unit // span_w] * dx, acc)
        if w.m is not None:
            acc = _fma(w.m.view(N, units)[None, :, u], a.s[:, u, None], acc)
        if w.min is not None:
            low = w.min.view(N, units, w.min.shape[1])[:, u].double()
            sums = a.sums[:, u].view(M, low.shape[1], 16 // low.shape[1]).sum(-1).double()
            acc = _fma(-(sums @ low.T).float(), w.dmin.view(N, units)[None, :, u] * dx, acc)
    return acc


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of f32 tensors, rounded once.

    The f64 product is exact; the f64 sum is rounded to odd, which makes the second rounding to f32 harmless (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    p, c = a.double() * b.double(), c.double()
    total = p + c
    t = total - p
    error = (p - (total - t)) + (c - t)  # what the sum lost, exactly (Knuth's two-sum)
    bits = total.view(torch.int64)
    inward = (error < 0) ^ (total < 0)  # the true sum is nearer to zero
    lost = (error != 0) & total.isfinite()
    odd = torch.where(lost & (bits & 1 == 0), bits + torch.where(inward, -1, 1), bits)
    return odd.view(torch.float64).float()


def _fake_backward(grad: Tensor, qweight: Tensor, qtype: int) -> Tensor:
    N, K = matrix_shape("quant_linear_backward", qweight, qtype)
    _check("quant_linear_backward", "grad", grad, N, qweight)
    return grad.new_empty((*grad.shape[:-1], K))


@define(fake=_fake_backward)
def quant_linear_backward(grad: Tensor, qweight: Tensor, qtype: int) -> Tensor:
    """Gradient of `quant_linear` with respect to x: grad [..., N] times the dequantized weight -> [..., K], f32 inside.

    The rounding of the activation passes gradients straight through, so both modes have this one gradient.
    """
    N, K = matrix_shape("quant_linear_backward", qweight, qtype)
    _check("quant_linear_backward", "grad", grad, N, qweight)
    dx = grad.reshape(-1, N).float() @ dequantize.reference(qweight, qtype)
    return dx.to(grad.dtype).view(*grad.shape[:-1], K)


def _setup(ctx, inputs, output):
    _, qweight, ctx.qtype, _, _ = inputs
    ctx.save_for_backward(qweight)


def _backward(ctx, grad):
    (qweight,) = ctx.saved_tensors
    dx = quant_linear_backward(grad, qweight, ctx.qtype) if ctx.needs_input_grad[0] else None
    dbias = grad.reshape(-1, grad.shape[-1]).float().sum(0) if ctx.needs_input_grad[3] else None
    return dx, None, None, dbias, None


register_backward(quant_linear, _backward, _setup)


@contextlib.contextmanager
def shared_activations():
    """Context: `quant_linear` rounds an x once for all weights that take it one after the other on this thread.

    For callers who know that nobody writes to such an x in between: a forward of modules that only call ops.
    """
    native_library.dasllama_share_activations(1)
    try:
        yield
    finally:
        native_library.dasllama_share_activations(0)
