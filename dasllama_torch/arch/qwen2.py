"""Qwen2 and Qwen2.5: the llama shape with biases on q, k and v and half-split rotary pairs in the file, or with experts
in the FFN's place, one of them shared; and the text decoder of Qwen2-VL and Qwen2.5-VL, whose positions have three
axes.
Source: Qwen2 technical report, arXiv:2407.10671, Qwen2-VL, arXiv:2409.12191; GGUF archs `qwen2`, `qwen2moe`, `qwen2vl`.
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
from dasllama_torch.modules.moe import SharedExpertMoeBlock
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen2Config":
        g = read_geometry(md, w)
        md.arch.expect("attention.sliding_window", 0)
        rope = read_rope(md, g.head_dim)
        moe = read_moe(md, renormalize=False, shared=True)
        return cls.build(md, g, (g.layer(i, rope=rope, moe=moe) for i in range(g.n_layers)))


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen2VLConfig":
        g = read_geometry(md, w)
        md.arch.expect("attention.sliding_window", 0)
        rope = replace(read_rope(md, g.head_dim), axes=read_axes(md, g.head_dim, interleaved=False))
        return cls.build(md, g, (g.layer(i, rope=rope) for i in range(g.n_layers)))


class Qwen2Attention(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, bias="yes")
        self.k_proj = Linear(w, "attn_k", G * D, C, bias="yes")
        self.v_proj = Linear(w, "attn_v", G * D, C, bias="yes")
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Qwen2DecoderLayer(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        self.self_attn = Qwen2Attention(cfg, w, layer)
        spec, C = cfg.layers[layer], cfg.n_embd
        self.mlp = SharedExpertMoeBlock(w, C, spec.moe) if spec.moe else GatedMLP(w, C, spec.ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "ffn_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen2Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen2DecoderLayer))


class Qwen2VLForCausalLM(ConditionalLM):
    def __init__(self, cfg: Qwen2VLConfig, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen2DecoderLayer))
