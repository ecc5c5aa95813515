"""Mistral 3: the llama shape with YaRN, and queries that grow beyond the original context (Ministral 3, Mistral
Medium 3.5).
Source: Mistral AI 2025; GGUF arch `mistral3`, whose Q and K rows hold rotary pairs next to each other.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass

from torch import Tensor

from dasllama_torch.config import DecoderConfig, read_geometry, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.linear import Linear, half_split_order
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import QueryTemperature, Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(DecoderConfig):
    """temperature_scale: beta of `QueryTemperature`, 0 for none; original_context: where it sets in."""

    temperature_scale: float
    original_context: int

    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Mistral3Config":
        g = read_geometry(md, w)
        a = md.arch
        a.expect("expert_count", 0)
        a.expect("attention.sliding_window", 0)
        rope = read_rope(md, g.head_dim)
        return cls.build(
            md,
            g,
            (g.layer(i, rope=rope) for i in range(g.n_layers)),
            temperature_scale=a.float("attention.temperature_scale", 0.0, min=0.0),
            original_context=a.int("rope.scaling.original_context_length", g.n_ctx, min=1),
        )


class Mistral3Attention(Module):
    def __init__(self, cfg: Mistral3Config, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, row_order=half_split_order(H, D))
        self.k_proj = Linear(w, "attn_k", G * D, C, row_order=half_split_order(G, D))
        self.v_proj = Linear(w, "attn_v", G * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope)
        beta, original = cfg.temperature_scale, cfg.original_context
        self.temperature = QueryTemperature(beta, original) if beta else None
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        if self.temperature:
            q = self.temperature(q, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Mistral3DecoderLayer(Module):
    def __init__(self, cfg: Mistral3Config, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = Mistral3Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, cfg.n_embd, cfg.layers[layer].ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Mistral3ForCausalLM(CausalLM):
    def __init__(self, cfg: Mistral3Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Mistral3DecoderLayer))
