"""What each head of a gated delta rule forgets and takes in (Yang et al. 2024, arXiv:2412.06464; Mamba2's decay)."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward


def _fake(a, b, decay, dt_bias):
    return decay.new_empty(a.shape), decay.new_empty(b.shape)


@define(fake=_fake)
def delta_gates(a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = decay * softplus(a + dt_bias) and beta = sigmoid(b), both f32 [..., H].

    a, b: [..., H]. decay: f32 [H], negative: -exp(A_log) in transformers' words. dt_bias: f32 [H].
    """
    return decay * torch.nn.functional.softplus(a.float() + dt_bias), torch.sigmoid(b.float())


@define(fake=lambda dg, dbeta, a, b, decay, dt_bias: (a.new_empty(a.shape), b.new_empty(b.shape)))
def delta_gates_backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `delta_gates` with respect to a and b."""
    beta = torch.sigmoid(b.float())
    da = dg.float() * decay * torch.sigmoid(a.float() + dt_bias)
    return da.to(a.dtype), (dbeta.float() * beta * (1 - beta)).to(b.dtype)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dg, dbeta):
    return *delta_gates_backward(dg, dbeta, *ctx.saved_tensors), None, None


register_backward(delta_gates, _backward, _setup)
