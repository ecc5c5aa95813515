"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), f32 inside."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward


@define(fake=lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., C] / sqrt(mean(x^2) + eps) * weight f32 [C] -> [..., C] in x.dtype, contiguous; no weight means ones."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype).contiguous()


@define(fake=lambda grad, x, weight, eps: x.new_empty(x.shape))
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Gradient of `rms_norm` with respect to x [..., C]."""
    x32, g = x.float(), grad.float()
    if weight is not None:
        g = g * weight
    r = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (r * (g - x32 * r * r * (g * x32).mean(-1, keepdim=True))).to(x.dtype).contiguous()


def _setup(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dweight = None
    if ctx.needs_input_grad[1]:
        dweight = (grad.float() * rms_norm(x, None, ctx.eps).float()).reshape(-1, x.shape[-1]).sum(0)
    return rms_norm_backward(grad, x, weight, ctx.eps) if ctx.needs_input_grad[0] else None, dweight, None


register_backward(rms_norm, _backward, _setup)
