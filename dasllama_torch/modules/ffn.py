"""Feed-forward parts."""

from torch import Tensor

from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.linear import Linear
from dasllama_torch.ops.gated_act import GELU_TANH, SILU, SWIGLU_OAI, gated_act

ACTS = {"silu": SILU, "gelu_tanh": GELU_TANH, "swiglu_oai": SWIGLU_OAI}


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)). act: "silu" (SwiGLU) or "gelu_tanh" (GeGLU), Shazeer 2020, arXiv:2002.05202.

    suffix: of the tensors' names, "_shexp" for a shared expert.
    """

    def __init__(self, w: TensorSource, n_embd: int, width: int, act: str, suffix: str = ""):
        super().__init__()
        self.gate_proj = Linear(w, f"ffn_gate{suffix}", width, n_embd)
        self.up_proj = Linear(w, f"ffn_up{suffix}", width, n_embd)
        self.down_proj = Linear(w, f"ffn_down{suffix}", n_embd, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_act(self.gate_proj(x), self.up_proj(x), ACTS[self.act]))

    def extra_repr(self) -> str:
        return self.act


class FusedGatedMLP(Module):
    """GatedMLP with gate and up in one matrix, the gate's rows first (Phi-3)."""

    def __init__(self, w: TensorSource, n_embd: int, width: int, act: str):
        super().__init__()
        self.gate_up_proj = Linear(w, "ffn_up", 2 * width, n_embd)
        self.down_proj = Linear(w, "ffn_down", n_embd, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gated_act(gate, up, ACTS[self.act]))

    def extra_repr(self) -> str:
        return self.act
