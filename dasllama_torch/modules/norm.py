"""Norms with their weights."""

from torch import Tensor, nn

from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.ops.rms_norm import rms_norm


class RMSNorm(Module):
    """x / rms(x) * weight over the last dim. weight f32 [C] as the file holds it: gemma files already contain the
    +1.
    """

    def __init__(self, w: TensorSource, name: str, n: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(w.f32(f"{name}.weight", n), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class WeightlessRMSNorm(Module):
    """x / rms(x) over the last dim."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
