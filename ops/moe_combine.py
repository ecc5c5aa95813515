"""The weighted sum of experts' outputs."""

import torch
from torch import Tensor

from dasllama_torch.ops.lattices import FLOATS
from dasllama_torch.ops.registry import define, register_backward
from dasllama_torch.ops.require import require


def _check(y: Tensor, weights: Tensor) -> None:
    require(
        y.dtype in FLOATS
        and y.dim() >= 2
        and weights.dtype == torch.float32
        and weights.shape == y.shape[:-1]
        and weights.device == y.device,
        lambda: (
            f"dasllama::moe_combine: y must be f32, f16 or bf16 [..., k, C] and weights f32 [..., k] on one device, "
            f"found {y.dtype} {list(y.shape)} on {y.device} and {weights.dtype} {list(weights.shape)} on "
            f"{weights.device}"
        ),
    )


def _fake(y: Tensor, weights: Tensor) -> Tensor:
    _check(y, weights)
    return y.new_empty((*y.shape[:-2], y.shape[-1]))


@define(fake=_fake)
def moe_combine(y: Tensor, weights: Tensor) -> Tensor:
    """y [..., k, C], weights f32 [..., k] -> sum over k of weights * y, [..., C] in y.dtype; f32 sums, k ascending."""
    _check(y, weights)
    products = y.float() * weights.unsqueeze(-1)
    total = products.new_zeros((*y.shape[:-2], y.shape[-1]))
    for part in products.unbind(-2):
        total = total + part
    return total.to(y.dtype)


@define(fake=lambda grad, y, weights: (y.new_empty(y.shape), weights.new_empty(weights.shape)))
def moe_combine_backward(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `moe_combine` with respect to y and weights; grad [..., C]."""
    g = grad.float().unsqueeze(-2)
    return (g * weights.unsqueeze(-1)).to(y.dtype), (g * y.float()).sum(-1)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return moe_combine_backward(grad, *ctx.saved_tensors)


register_backward(moe_combine, _backward, _setup)
