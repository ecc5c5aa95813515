"""Qwen3: grouped-query attention with a norm on every head of q and k before the rotation, SwiGLU or experts of it,
pre-norm; and the text decoder of Qwen3-VL, whose positions have three axes.
Source: Qwen3 technical report, arXiv:2505.09388, Qwen3-VL, arXiv:2511.21631; GGUF archs `qwen3`, `qwen3moe`, `qwen3vl`,
`qwen3vlmoe`.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass, replace

from torch import Tensor

from dasllama_torch.config import DecoderConfig, read_axes, read_geometry, read_moe, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM, ConditionalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.moe import SparseMoeBlock
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED = {
    f"{arch}.n_deepstack_layers": "how many layers add features of images; text has none"
    for arch in ("qwen3vl", "qwen3vlmoe")
}


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen3Config":
        g = read_geometry(md, w)
        md.arch.expect("attention.sliding_window", 0)
        rope = read_rope(md, g.head_dim)
        moe = read_moe(md, renormalize=True)
        return cls.build(md, g, (g.layer(i, rope=rope, moe=moe) for i in range(g.n_layers)))


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen3VLConfig":
        g = read_geometry(md, w)
        rope = replace(read_rope(md, g.head_dim), axes=read_axes(md, g.head_dim, interleaved=True))
        moe = read_moe(md, renormalize=True)
        return cls.build(md, g, (g.layer(i, rope=rope, moe=moe) for i in range(g.n_layers)))


class Qwen3Attention(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C)
        self.k_proj = Linear(w, "attn_k", G * D, C)
        self.v_proj = Linear(w, "attn_v", G * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.q_norm = RMSNorm(w, "attn_q_norm", D, cfg.norm_eps)
        self.k_norm = RMSNorm(w, "attn_k_norm", D, cfg.norm_eps)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, H, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Qwen3DecoderLayer(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = Qwen3Attention(cfg, w, layer)
        spec, C = cfg.layers[layer], cfg.n_embd
        self.mlp = SparseMoeBlock(w, C, spec.moe) if spec.moe else GatedMLP(w, C, spec.ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen3Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen3DecoderLayer))


class Qwen3VLForCausalLM(ConditionalLM):
    def __init__(self, cfg: Qwen3VLConfig, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen3DecoderLayer))
