"""Llama: grouped-query attention, rotary positions, SwiGLU, pre-norm. Also Mistral, SmolLM2, TinyLlama.
Source: Touvron et al. 2023, arXiv:2302.13971; GGUF arch `llama`, whose Q and K rows hold rotary pairs next to each
other. T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim, V vocab."""

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
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "LlamaConfig":
        g = read_geometry(md, w)
        md.arch.expect("expert_count", 0)
        md.arch.expect("attention.sliding_window", 0)
        factors = tuple(w.f32("rope_freqs.weight", g.head_dim // 2).tolist()) if w.has("rope_freqs.weight") else None
        rope = read_rope(md, g.head_dim, factors)
        return cls.build(md, g, (g.layer(i, rope=rope) for i in range(g.n_layers)))


class LlamaAttention(Module):
    def __init__(self, cfg: LlamaConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, bias="optional", row_order=half_split_order(H, D))
        self.k_proj = Linear(w, "attn_k", G * D, C, bias="optional", row_order=half_split_order(G, D))
        self.v_proj = Linear(w, "attn_v", G * D, C, bias="optional")
        self.o_proj = Linear(w, "attn_output", C, H * D, bias="optional")
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class LlamaDecoderLayer(Module):
    def __init__(self, cfg: LlamaConfig, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = LlamaAttention(cfg, w, layer)
        self.mlp = GatedMLP(w, cfg.n_embd, cfg.layers[layer].ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(CausalLM):
    def __init__(self, cfg: LlamaConfig, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, LlamaDecoderLayer))
