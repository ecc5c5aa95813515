"""Positions in attention: rotary embedding and query temperature as modules, so that what they change can be hooked."""

import torch
from torch import Tensor

from dasllama_torch.config import RopeSpec
from dasllama_torch.modules.base import Module
from dasllama_torch.ops.query_temperature import query_temperature
from dasllama_torch.ops.rope import rope
from dasllama_torch.ops.rope_tables import long_rope_tables, rope_tables
from dasllama_torch.step import Step


class Rope(Module):
    """Rotates the first `spec.dim` dims of every head. x [..., H, D] -> the same shape. Tables: once per Step and
    spec.
    """

    def __init__(self, spec: RopeSpec):
        super().__init__()
        self.spec = spec
        self.key = repr(spec)
        self.register_buffer("inv_freq", spec.inv_freq(), persistent=False)
        self.register_buffer("long_inv_freq", spec.long_inv_freq() if spec.long else None, persistent=False)
        axes = None if spec.axes is None else torch.tensor(spec.axes, dtype=torch.int32)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        cos, sin = step.once(self.key, lambda: self.tables(step))
        return rope(x, cos, sin)

    def tables(self, step: Step) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's rows, f32 [T, dim/2]."""
        spec = self.spec
        if spec.long is None:
            return rope_tables(step.positions, self.inv_freq, spec.attention_factor, self.axes)
        return long_rope_tables(
            step.positions, step.row_context, self.inv_freq, self.long_inv_freq, spec.long.original_context,
            spec.attention_factor,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"dim={self.spec.dim}, theta={self.spec.theta:g}"


class QueryTemperature(Module):
    """Multiplies queries beyond the original context. q [..., H, D] -> the same shape; see ops/query_temperature.py."""

    def __init__(self, beta: float, original: int):
        super().__init__()
        self.beta, self.original = beta, original
        self.key = f"temperature {beta} {original}"

    def forward(self, q: Tensor, step: Step) -> Tensor:
        factor = step.once(self.key, lambda: query_temperature(step.positions, self.beta, self.original))
        return q * factor.view(*q.shape[:-2], 1, 1)

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, original={self.original}"
