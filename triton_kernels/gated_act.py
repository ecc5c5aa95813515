"""act(gate) * up and its gradient, f32 inside. A program owns BLOCK columns of a row; formulas are those of
`ops.gated_act`.

z is what the logistic function is taken of: x for SiLU and the sigmoid, 1.702 x for gpt-oss' SwiGLU, and for tanh-GELU
k (x + 0.044715 x^3) with k = 2 sqrt(2 / pi), since (1 + tanh(u)) / 2 is the logistic function of 2 u.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import gated_act as formulas
from dasllama_torch.ops.gated_act import _check as check_act
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels.functions import logistic
from dasllama_torch.triton_kernels.launch import check, on_device, rows_of

GELU_TANH, SIGMOID = tl.constexpr(formulas.GELU_TANH), tl.constexpr(formulas.SIGMOID)
SWIGLU_OAI = tl.constexpr(formulas.SWIGLU_OAI)
SLOPE, LIMIT = tl.constexpr(formulas._SLOPE), tl.constexpr(formulas._LIMIT)
BLOCK = 1024


@triton.jit
def _clamped(x, u, ACT: tl.constexpr):
    """gate and up as they enter the formula; a NaN stays one."""
    if ACT == SWIGLU_OAI:
        x = tl.where(x > LIMIT, LIMIT, x)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)) + 1.0
    return x, u


@triton.jit
def _z(x, ACT: tl.constexpr):
    if ACT == GELU_TANH:
        b = tl.where(x > 30.0, 30.0, tl.where(x < -30.0, -30.0, x))  # beyond, the function is 0 or 1; keeps b^3 finite
        return 1.5957691216057308 * (b + 0.044715 * b * b * b)
    elif ACT == SWIGLU_OAI:
        return SLOPE * x
    else:
        return x


@triton.jit
def gated_act_kernel(y, gate, gate_stride, up, up_stride, C, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_stride + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + c, mask=c < C, other=0.0).to(tl.float32)
    x, u = _clamped(x, u, ACT)
    v = logistic(_z(x, ACT))
    if ACT != SIGMOID:
        v = x * v
    tl.store(y + row * C + c, (v * u).to(y.dtype.element_ty), mask=c < C)


@triton.jit
def gated_act_backward_kernel(
    dgate, dup, grad, grad_stride, gate, gate_stride, up, up_stride, C, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + row * grad_stride + c, mask=c < C, other=0.0).to(tl.float32)
    gate_x = tl.load(gate + row * gate_stride + c, mask=c < C, other=0.0).to(tl.float32)
    up_x = tl.load(up + row * up_stride + c, mask=c < C, other=0.0).to(tl.float32)
    x, u = _clamped(gate_x, up_x, ACT)
    v = logistic(_z(x, ACT))
    if ACT == SIGMOID:
        y, slope = v, v * (1.0 - v)
    else:
        y, dz = x * v, 1.0
        if ACT == GELU_TANH:
            b = tl.where(x > 30.0, 30.0, tl.where(x < -30.0, -30.0, x))
            dz = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * b * b)
        elif ACT == SWIGLU_OAI:
            dz = SLOPE
        slope = v + y * (1.0 - v) * dz
    dx, du = g * u * slope, g * y
    if ACT == SWIGLU_OAI:  # a clamp passes no gradient to what lies beyond it
        dx = tl.where(gate_x > LIMIT, 0.0, dx)
        du = tl.where((up_x > LIMIT) | (up_x < -LIMIT), 0.0, du)
    tl.store(dgate + row * C + c, dx.to(dgate.dtype.element_ty), mask=c < C)
    tl.store(dup + row * C + c, du.to(dup.dtype.element_ty), mask=c < C)


def activate(y: Tensor, gate: Tensor, up: Tensor, act: int) -> None:
    """act(gate) * up into y, contiguous."""
    if y.numel():
        g, u, C = rows_of(gate), rows_of(up), gate.shape[-1]
        with on_device(gate):
            gated_act_kernel[(len(g), triton.cdiv(C, BLOCK))](y, g, g.stride(0), u, u.stride(0), C, act, BLOCK)


@implement(formulas.gated_act, "CUDA")
def gated_act(gate: Tensor, up: Tensor, act: int) -> Tensor:
    check_act(act)
    check("gated_act", "gate", gate, gate)
    check("gated_act", "up", up, gate, shape=gate.shape)
    count_call("gated_act", "triton")
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    activate(y, gate, up, act)
    return y


@implement(formulas.gated_act_backward, "CUDA")
def gated_act_backward(grad: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    check_act(act)
    check("gated_act_backward", "grad", grad, gate, shape=gate.shape)
    check("gated_act_backward", "up", up, gate, shape=gate.shape)
    count_call("gated_act_backward", "triton")
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if dgate.numel():
        d, g, u, C = rows_of(grad), rows_of(gate), rows_of(up), gate.shape[-1]
        with on_device(gate):
            gated_act_backward_kernel[(len(g), triton.cdiv(C, BLOCK))](
                dgate, dup, d, d.stride(0), g, g.stride(0), u, u.stride(0), C, act, BLOCK
            )
    return dgate, dup
