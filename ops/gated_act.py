"""Gated activations (Shazeer 2020, arXiv:2002.05202), f32 inside."""

import math

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward
from dasllama_torch.ops.require import require

SILU, GELU_TANH, SIGMOID, SWIGLU_OAI = 0, 1, 2, 3
_SLOPE, _LIMIT = 1.702, 7.0  # of gpt-oss' SwiGLU


def _check(act: int) -> None:
    require(
        SILU <= act <= SWIGLU_OAI,
        lambda: (
            f"dasllama::gated_act: act must be 0 (SiLU), 1 (tanh-GELU), 2 (sigmoid) or 3 (clamped SwiGLU), found {act}"
        ),
    )


@define(fake=lambda gate, up, act: gate.new_empty(gate.shape))
def gated_act(gate: Tensor, up: Tensor, act: int) -> Tensor:
    """act(gate) * up, both [...] of one shape -> the same shape in gate.dtype, contiguous.

    act: 0 SiLU; 1 tanh-GELU, computed exactly as transformers' `gelu_pytorch_tanh` defines it (no table); 2 the
    logistic function alone; 3 gpt-oss' SwiGLU: x * sigmoid(1.702 x) with x = min(gate, 7), times 1 + up, which is
    clamped to [-7, 7] first.
    """
    _check(act)
    g, u = gate.float(), up.float()
    if act == SILU:
        y = torch.nn.functional.silu(g)
    elif act == GELU_TANH:
        y = torch.nn.functional.gelu(g, approximate="tanh")
    elif act == SWIGLU_OAI:
        g, u = g.clamp(max=_LIMIT), u.clamp(-_LIMIT, _LIMIT) + 1
        y = g * torch.sigmoid(_SLOPE * g)
    else:
        y = torch.sigmoid(g)
    return (y * u).to(gate.dtype).contiguous()


@define(fake=lambda grad, gate, up, act: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def gated_act_backward(grad: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Gradients of `gated_act` with respect to gate and up; a clamp passes none to what lies beyond it."""
    _check(act)
    x, u, g = gate.float(), up.float(), grad.float()
    inside = up_inside = 1.0
    if act == SWIGLU_OAI:
        inside, up_inside = ~(x > _LIMIT), ~((u > _LIMIT) | (u < -_LIMIT))
        x, u = x.clamp(max=_LIMIT), u.clamp(-_LIMIT, _LIMIT) + 1
        z, dz = _SLOPE * x, _SLOPE
    elif act == GELU_TANH:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u. Beyond 30 it is 0 or 1; the clamp keeps the cube finite.
        b, k = x.clamp(-30, 30), 2 * math.sqrt(2 / math.pi)
        z, dz = k * (b + 0.044715 * b**3), k * (1 + 3 * 0.044715 * b**2)
    else:
        z, dz = x, 1.0
    logistic = torch.sigmoid(z)
    y = logistic if act == SIGMOID else x * logistic
    slope = (0.0 if act == SIGMOID else logistic) + y * (1 - logistic) * dz
    return (g * u * slope * inside).to(gate.dtype).contiguous(), (g * y * up_inside).to(up.dtype).contiguous()


def _setup(ctx, inputs, output):
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    return *gated_act_backward(grad, gate, up, ctx.act), None


register_backward(gated_act, _backward, _setup)
