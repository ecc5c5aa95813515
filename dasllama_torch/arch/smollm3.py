"""SmolLM3: the llama shape, without positions in every fourth layer (NoPE, Yang et al. 2025, arXiv:2501.18795).
Source: SmolLM3 (Hugging Face 2025); GGUF arch `smollm3`, whose Q and K rows hold rotary pairs next to each other in all
layers. T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

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

PERIOD = 4  # every fourth layer has no positions; the files do not say so


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "SmolLM3Config":
        g = read_geometry(md, w)
        md.arch.expect("attention.sliding_window", 0)
        rope = read_rope(md, g.head_dim)
        return cls.build(md, g, (g.layer(i, rope=rope if (i + 1) % PERIOD else None) for i in range(g.n_layers)))


class SmolLM3Attention(Module):
    def __init__(self, cfg: SmolLM3Config, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, row_order=half_split_order(H, D))
        self.k_proj = Linear(w, "attn_k", G * D, C, row_order=half_split_order(G, D))
        self.v_proj = Linear(w, "attn_v", G * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope) if spec.rope else None
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.rope:
            q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class SmolLM3DecoderLayer(Module):
    def __init__(self, cfg: SmolLM3Config, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = SmolLM3Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, cfg.n_embd, cfg.layers[layer].ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class SmolLM3ForCausalLM(CausalLM):
    def __init__(self, cfg: SmolLM3Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, SmolLM3DecoderLayer))
