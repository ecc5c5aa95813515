"""Rotary position embedding as a module, so that rotated queries and keys can be hooked."""

from torch import Tensor

from dasllama_torch.config import RopeSpec
from dasllama_torch.modules.base import Module
from dasllama_torch.ops.rope import rope
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

    def forward(self, x: Tensor, step: Step) -> Tensor:
        cos, sin = step.rope_tables(self.key, self.spec, self.inv_freq)
        return rope(x, cos, sin)

    def extra_repr(self) -> str:
        return f"dim={self.spec.dim}, theta={self.spec.theta:g}"
