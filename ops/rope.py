"""Rotary position embedding, half split (the convention of transformers' `rotate_half`), f32 inside."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, register_backward


@define(fake=lambda x, cos, sin: x.new_empty(x.shape))
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of every head of x [..., H, D] by cos, sin f32 [T, R/2] -> x's shape, dtype; contiguous.

    The leading dims of x are the T rows. Dim i < R/2 pairs with i + R/2; dims from R on are copied.
    """
    half = cos.shape[1]
    rows = x.reshape(cos.shape[0], *x.shape[-2:]).float()  # [T, H, D]
    a, b, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1).reshape(x.shape).to(x.dtype)


def _setup(ctx, inputs, output):
    _, cos, sin = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return rope(grad, cos, -sin), None, None


register_backward(rope, _backward, _setup)
