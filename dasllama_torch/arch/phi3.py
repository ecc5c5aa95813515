"""Phi-3, Phi-3.5 and Phi-4: the llama shape with q, k and v in one matrix, gate and up in another, LongRoPE, and heads
that may be rotated in part.
Source: Phi-3 technical report, arXiv:2404.14219; GGUF arch `phi3`.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass, replace

from torch import Tensor

from dasllama_torch.config import DecoderConfig, LongRope, read_geometry, read_rope, read_rotary_dim
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import FusedGatedMLP
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Phi3Config":
        g = read_geometry(md, w)
        dim = read_rotary_dim(md, g.head_dim)
        rope = read_rope(md, dim)
        if w.has("rope_factors_short.weight"):
            short, long = (tuple(w.f32(f"rope_factors_{kind}.weight", dim // 2).tolist()) for kind in ("short", "long"))
            original = md.arch.int("rope.scaling.original_context_length", min=1)
            rope = replace(rope, freq_factors=short, long=LongRope(factors=long, original_context=original))
        window = md.arch.int("attention.sliding_window", 0, min=0)
        return cls.build(md, g, (g.layer(i, rope=rope, window=window) for i in range(g.n_layers)))


class Phi3Attention(Module):
    def __init__(self, cfg: Phi3Config, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.heads, self.head_dim = [H, G, G], D
        self.qkv_proj = Linear(w, "attn_qkv", (H + 2 * G) * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5, window=spec.window)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H + 2 G, D]
        q, k, v = heads.split(self.heads, -2)
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Phi3DecoderLayer(Module):
    def __init__(self, cfg: Phi3Config, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = Phi3Attention(cfg, w, layer)
        self.mlp = FusedGatedMLP(w, cfg.n_embd, cfg.layers[layer].ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Phi3ForCausalLM(CausalLM):
    def __init__(self, cfg: Phi3Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Phi3DecoderLayer))
