"""Mixtures of experts: routers, stacks of expert matrices, and the blocks that several families make of them.

E experts, k of them per token, T tokens, C embedding. transformers keeps each stack as one parameter of `experts`
(`gate_up_proj`, gate and up fused, and `down_proj`); here every stack of the file is a module of that name, or
`gate_proj` and `up_proj` where the file has two, so that it can be hooked and has a type of its own.
"""

from torch import Tensor, nn

from dasllama_torch.config import MoESpec
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.ffn import ACTS, GatedMLP
from dasllama_torch.modules.linear import F32Linear, Packed
from dasllama_torch.ops.expert_linear import expert_linear
from dasllama_torch.ops.gated_act import SIGMOID, gated_act
from dasllama_torch.ops.halves import multiplied_in
from dasllama_torch.ops.moe_combine import moe_combine
from dasllama_torch.ops.moe_router import SIGMOID as SIGMOID_GATE
from dasllama_torch.ops.moe_router import SOFTMAX as SOFTMAX_GATE
from dasllama_torch.ops.moe_router import moe_router

GATES = {"softmax": SOFTMAX_GATE, "sigmoid": SIGMOID_GATE}


def choose(logits: Tensor, spec: MoESpec, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights f32 and ids int64 [T, k] of the experts that logits [T, E] choose, see ops/moe_router.py."""
    return moe_router(logits, selection_bias, spec.n_used, GATES[spec.gate], spec.renormalize, spec.scale)


class TopKRouter(F32Linear):
    """x [T, C] -> logits f32 [T, E], weights f32 [T, k] and ids int64 [T, k] of the chosen experts, as in transformers.

    bias: of the logits, "yes" or "no". selection_bias: the file has one that counts for the choice only.
    """

    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec, *, bias: str = "no", selection_bias: bool = False):
        super().__init__(w, "ffn_gate_inp", spec.n_experts, n_embd, bias=bias)
        self.spec = spec
        chosen_by = w.f32("exp_probs_b.bias", spec.n_experts) if selection_bias else None
        self.register_buffer("e_score_correction_bias", chosen_by)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = super().forward(x.float())
        return logits, *choose(logits, self.spec, self.e_score_correction_bias)

    def extra_repr(self) -> str:
        s = self.spec
        return f"{super().extra_repr()}, {s.n_used} by {s.gate}" + (", renormalized" if s.renormalize else "")


class ExpertLinear(Packed):
    """A stack of matrices [E, N, K], one for each expert. x [T, K] or [T, k, K], ids [T, k] -> [T, k, N]."""

    def __init__(self, w: TensorSource, name: str, e: int, n: int, k: int, *, bias: str = "no"):
        super().__init__(w, name, e, n, k)
        self.native, self.half_dtype = w.native, w.half_dtype
        self.bias = nn.Parameter(w.f32(f"{name}.bias", e, n), requires_grad=False) if bias == "yes" else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with multiplied_in(self.half_dtype):
            return expert_linear(x, self.qweight, self.qtype, ids, self.bias, self.native)


class Experts(Module):
    """x [T, C], ids and weights [T, k] -> [T, C]: the weighted sum of gated FFNs, in f32. act, bias: as in a GatedMLP
    and in its matrices.
    """

    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec, act: str, *, bias: str = "no"):
        super().__init__()
        E, C, width = spec.n_experts, n_embd, spec.width
        self.fused = w.has("ffn_gate_up_exps.weight")
        if self.fused:
            self.gate_up_proj = ExpertLinear(w, "ffn_gate_up_exps", E, 2 * width, C, bias=bias)
        else:
            self.gate_proj = ExpertLinear(w, "ffn_gate_exps", E, width, C, bias=bias)
            self.up_proj = ExpertLinear(w, "ffn_up_exps", E, width, C, bias=bias)
        self.down_proj = ExpertLinear(w, "ffn_down_exps", E, C, width, bias=bias)
        self.act = act

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up_proj(x, ids).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x, ids), self.up_proj(x, ids)
        return moe_combine(self.down_proj(gated_act(gate, up, ACTS[self.act]), ids), weights)

    def extra_repr(self) -> str:
        return self.act


class SparseMoeBlock(Module):
    """x [..., C] -> [..., C]: a router and SwiGLU experts, nothing shared."""

    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec):
        super().__init__()
        self.gate = TopKRouter(w, n_embd, spec)
        self.experts = Experts(w, n_embd, spec, "silu")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        _, weights, ids = self.gate(rows)
        return self.experts(rows, ids, weights).view(x.shape)


class SharedExpertMoeBlock(SparseMoeBlock):
    """A SparseMoeBlock beside one expert for all tokens, which is multiplied by a gate of its own (Qwen2-MoE)."""

    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec):
        super().__init__(w, n_embd, spec)
        self.shared_expert = GatedMLP(w, n_embd, spec.shared_width, "silu", suffix="_shexp")
        self.shared_expert_gate = F32Linear(w, "ffn_gate_inp_shexp", 1, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shared = self.shared_expert(rows)
        shared = gated_act(self.shared_expert_gate(rows).expand_as(shared), shared, SIGMOID)
        return super().forward(x) + shared.view(x.shape)
