"""add, mul, copy, join and columns as ops of ours: what a recorded program runs where model code says `x + y`, `x * y`,
`.contiguous()`, `torch.cat([x, y], -1)` or `x[..., index]`. Their results are those of torch to the bit."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, refuse_gradient

MAX_DIMS = 6


def _fake_binary(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(torch.broadcast_shapes(a.shape, b.shape))


@define(fake=_fake_binary)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, f32, of shapes that broadcast."""
    return a + b


@define(fake=_fake_binary)
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b, f32, of shapes that broadcast."""
    return a * b


@define(fake=lambda x: x.new_empty(x.shape))
def copy(x: Tensor) -> Tensor:
    """x f32 -> the same, contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


@define(fake=lambda a, b: a.new_empty((*a.shape[:-1], a.shape[-1] + b.shape[-1])))
def join(a: Tensor, b: Tensor) -> Tensor:
    """a f32 [..., A] and b f32 [..., B], of the same leading dims -> [..., A + B]."""
    return torch.cat([a, b], -1)


@define(fake=lambda x, index: x.new_empty((*x.shape[:-1], *index.shape)))
def columns(x: Tensor, index: Tensor) -> Tensor:
    """x f32 [..., C], index int64 [...] of 0 to C - 1 -> x[..., index], with index's shape in the place of C."""
    return x[..., index].contiguous()


for _op in (add, mul, copy, join, columns):
    refuse_gradient(_op, "use torch's own")
