"""The 16-bit float that a GPU multiplies many rows in, on tensor cores: a setting of the model."""

from contextvars import ContextVar

import torch

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
_DEFAULT = HALVES["bf16"]
_chosen: ContextVar[torch.dtype] = ContextVar("dasllama_torch.half", default=_DEFAULT)


class multiplied_in:
    """Context: products of many rows round f32 activations and packed weights to `half` first.

    What torch.compile traces runs later, outside of it: there only bf16 can be had, which needs no context.
    """

    __slots__ = "_half", "_token"

    def __init__(self, half: torch.dtype):
        self._half = half

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self._token = _chosen.set(self._half)
        elif self._half != _DEFAULT:
            raise RuntimeError(f"torch.compile traces products in {_DEFAULT} only, found {self._half}")

    def __exit__(self, *exc) -> None:
        if not torch.compiler.is_compiling():
            _chosen.reset(self._token)


def half_of(x: torch.Tensor) -> torch.dtype:
    """What a product with x [..., K] rounds to: x's own dtype if that is one of 16 bits."""
    return x.dtype if x.dtype != torch.float32 else _chosen.get()
