"""Soft capping of logits (Bello et al. 2016, arXiv:1611.09940; Gemma 2, arXiv:2408.00118), f32 inside."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward


@define(fake=lambda x, cap: x.new_empty(x.shape))
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of x [...] -> the same shape in x.dtype, contiguous; cap > 0 bounds the magnitude."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype).contiguous()


@define(fake=lambda grad, y, cap: y.new_empty(y.shape))
def softcap_backward(grad: Tensor, y: Tensor, cap: float) -> Tensor:
    """Gradient with respect to x of y = softcap(x, cap): grad * (1 - (y / cap)^2)."""
    return (grad.float() * (1 - (y.float() / cap) ** 2)).to(y.dtype).contiguous()


def _setup(ctx, inputs, output):
    _, ctx.cap = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return softcap_backward(grad, y, ctx.cap), None


register_backward(softcap, _backward, _setup)
