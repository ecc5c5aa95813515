"""What is computed from a module's input and not handed on by it: the scale of a norm, the probabilities of attention.

B batch, T rows, C embedding, H query heads, G kv heads, D head dim, S keys.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.step import Step


def scale(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """What an RMS norm divides x [..., C] by: sqrt(mean(x^2) + eps), f32 [..., 1]."""
    return (args[0].float().square().mean(-1, keepdim=True) + norm.eps).sqrt()


def normalized(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """x [..., C] / `scale`, f32 [..., C], to which the norm then puts its weight."""
    return args[0].float() / scale(norm, args, step)


def pattern(attn: PagedAttention, args: tuple, step: Step) -> tuple[Tensor, Tensor | None]:
    """Probabilities f32 [B, T, H, S] of the S keys in each row's sequence, by position, and what goes to the head's
    sink, f32 [B, T, H]; None if there are no sinks. They sum to 1, and to 0 for an inert row."""
    return attn.probabilities(*args)


DERIVED: dict[str, Callable[[Any, tuple, Step], Any]] = {"scale": scale, "normalized": normalized, "pattern": pattern}
