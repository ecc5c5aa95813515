"""Gemma 3 (text): local and global layers 5:1, per-head QK norm, GeGLU, norms before and after each part, scaled
embeddings.
Source: Gemma 3 technical report, arXiv:2503.19786; GGUF arch `gemma3`, whose norm weights already contain the +1.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass, replace

from torch import Tensor

from dasllama_torch.config import DecoderConfig, read_geometry, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}

PERIOD = 6  # every sixth layer is global; the files do not say so
LAYERS_27B = 62  # the 27B model scales queries by (C / H)^-1/2 instead of D^-1/2; no key tells


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """query_scale: factor of q k^T."""

    query_scale: float

    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Gemma3Config":
        g = read_geometry(md, w)
        a = md.arch
        a.expect("attention.sliding_window_pattern", PERIOD)
        a.expect("attn_logit_softcapping", 0.0)
        a.expect("final_logit_softcapping", 0.0)
        window = a.int("attention.sliding_window", min=1)
        everywhere = read_rope(md, g.head_dim)
        # Position scaling is for the global layers only.
        local = replace(everywhere, theta=a.float("rope.freq_base_swa", 10000.0, min=1.0), linear_factor=1.0)
        width = g.n_embd // g.n_heads[0] if g.n_layers == LAYERS_27B else g.head_dim

        def layer(i: int):
            is_global = (i + 1) % PERIOD == 0
            return g.layer(i, rope=everywhere if is_global else local, window=0 if is_global else window)

        return cls.build(md, g, map(layer, range(g.n_layers)), query_scale=width**-0.5)


class Gemma3Attention(Module):
    def __init__(self, cfg: Gemma3Config, w: TensorSource, layer: int):
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
        self.attn = PagedAttention(layer, scale=cfg.query_scale, window=spec.window)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, H, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Gemma3DecoderLayer(Module):
    def __init__(self, cfg: Gemma3Config, w: TensorSource, layer: int):
        super().__init__()
        C, eps = cfg.n_embd, cfg.norm_eps
        self.self_attn = Gemma3Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, C, cfg.layers[layer].ffn_width, "gelu_tanh")
        self.input_layernorm = RMSNorm(w, "attn_norm", C, eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, eps)
        self.pre_feedforward_layernorm = RMSNorm(w, "ffn_norm", C, eps)
        self.post_feedforward_layernorm = RMSNorm(w, "post_ffw_norm", C, eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3ForCausalLM(CausalLM):
    def __init__(self, cfg: Gemma3Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Gemma3DecoderLayer, embed_scale=cfg.n_embd**0.5))
