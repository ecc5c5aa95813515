"""Gated activations (Shazeer 2020, arXiv:2002.05202), f32 inside."""

import math

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward

SILU, GELU_TANH, SIGMOID = 0, 1, 2


@define(fake=lambda gate, up, act: gate.new_empty(gate.shape))
def gated_act(gate: Tensor, up: Tensor, act: int) -> Tensor:
    """act(gate) * up, both [...] of one shape -> the same shape in gate.dtype, contiguous.

    act: 0 SiLU; 1 tanh-GELU, computed exactly as transformers' `gelu_pytorch_tanh` defines it (no table); 2 the
    logistic function alone.
    """
    g = gate.float()
    if act == GELU_TANH:
        y = torch.nn.functional.gelu(g, approximate="tanh")
    else:
        y = torch.sigmoid(g) * (g if act == SILU else 1)
    return (y * up.float()).to(gate.dtype).contiguous()


@define(fake=lambda grad, gate, up, act: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def gated_act_backward(grad: Tensor, gate: Tensor, up: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Gradients of `gated_act` with respect to gate and up."""
    x, g = gate.float(), grad.float()
    z, dz = x, torch.ones_like(x)
    if act == GELU_TANH:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u. Beyond 30 it is 0 or 1; the clamp keeps the cube finite.
        b, k = x.clamp(-30, 30), 2 * math.sqrt(2 / math.pi)
        z, dz = k * (b + 0.044715 * b**3), k * (1 + 3 * 0.044715 * b**2)
    logistic = torch.sigmoid(z)
    if act == SIGMOID:
        y, slope = logistic, logistic * (1 - logistic)
    else:
        y = x * logistic
        slope = logistic + y * (1 - logistic) * dz
    return (g * up.float() * slope).to(gate.dtype).contiguous(), (g * y).to(up.dtype).contiguous()


def _setup(ctx, inputs, output):
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    return *gated_act_backward(grad, gate, up, ctx.act), None


register_backward(gated_act, _backward, _setup)
