"""GLM-4.5 and later: grouped-query attention with heads rotated in part and, in the larger models, a norm on every head
of q and k; the first layers dense, the others with experts that sigmoids choose, and one more for all tokens.
Source: GLM-4.5 technical report, arXiv:2508.06471; GGUF arch `glm4moe`.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass

from torch import Tensor

from dasllama_torch.config import (
    DecoderConfig,
    MoESpec,
    leave_nextn,
    read_geometry,
    read_moe,
    read_rope,
    read_rotary_dim,
)
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.moe import Experts, TopKRouter
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Glm4MoeConfig":
        g = read_geometry(md, w)
        n_layers = leave_nextn(md, w, g.n_layers)
        n_dense = md.arch.int("leading_dense_block_count", 0, min=0, max=n_layers)
        moe = read_moe(md, gate="sigmoid", renormalize=True, shared=True)
        rope = read_rope(md, read_rotary_dim(md, g.head_dim))
        return cls.build(md, g, (g.layer(i, rope=rope, moe=moe if i >= n_dense else None) for i in range(n_layers)))


class Glm4MoeAttention(Module):
    def __init__(self, cfg: Glm4MoeConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, bias="optional")
        self.k_proj = Linear(w, "attn_k", G * D, C, bias="optional")
        self.v_proj = Linear(w, "attn_v", G * D, C, bias="optional")
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.has_norms = w.has("attn_q_norm.weight")
        if self.has_norms:
            self.q_norm = RMSNorm(w, "attn_q_norm", D, cfg.norm_eps)
            self.k_norm = RMSNorm(w, "attn_k_norm", D, cfg.norm_eps)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Glm4MoeMoE(Module):
    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec):
        super().__init__()
        self.gate = TopKRouter(w, n_embd, spec, selection_bias=True)
        self.experts = Experts(w, n_embd, spec, "silu")
        self.shared_experts = GatedMLP(w, n_embd, spec.shared_width, "silu", suffix="_shexp")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        _, weights, ids = self.gate(rows)
        return self.experts(rows, ids, weights).view(x.shape) + self.shared_experts(x)


class Glm4MoeDecoderLayer(Module):
    def __init__(self, cfg: Glm4MoeConfig, w: TensorSource, layer: int):
        super().__init__()
        spec, C = cfg.layers[layer], cfg.n_embd
        self.self_attn = Glm4MoeAttention(cfg, w, layer)
        self.mlp = Glm4MoeMoE(w, C, spec.moe) if spec.moe else GatedMLP(w, C, spec.ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", C, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Glm4MoeForCausalLM(CausalLM):
    def __init__(self, cfg: Glm4MoeConfig, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Glm4MoeDecoderLayer))
