"""Gemma 2: every other layer local, capped scores and logits, GeGLU, norms before and after each part, scaled
embeddings.
Source: Gemma 2 technical report, arXiv:2408.00118; GGUF arch `gemma2`, whose norm weights already contain the +1.
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
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}

LAYERS_27B = 46  # the 27B model scales queries by (C / H)^-1/2 instead of D^-1/2; no key tells


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """query_scale: factor of q k^T. attn_softcap, logit_softcap: bounds of scores and logits."""

    query_scale: float
    attn_softcap: float
    logit_softcap: float

    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Gemma2Config":
        g = read_geometry(md, w)
        a = md.arch
        window = a.int("attention.sliding_window", min=1)
        rope = read_rope(md, g.head_dim)
        width = g.n_embd // g.n_heads[0] if g.n_layers == LAYERS_27B else g.head_dim
        return cls.build(
            md,
            g,
            (g.layer(i, rope=rope, window=0 if i % 2 else window) for i in range(g.n_layers)),  # no key tells
            query_scale=width**-0.5,
            attn_softcap=a.float("attn_logit_softcapping", positive=True),
            logit_softcap=a.float("final_logit_softcapping", positive=True),
        )


class Gemma2Attention(Module):
    def __init__(self, cfg: Gemma2Config, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C)
        self.k_proj = Linear(w, "attn_k", G * D, C)
        self.v_proj = Linear(w, "attn_v", G * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=cfg.query_scale, window=spec.window, softcap=cfg.attn_softcap)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Gemma2DecoderLayer(Module):
    def __init__(self, cfg: Gemma2Config, w: TensorSource, layer: int):
        super().__init__()
        C, eps = cfg.n_embd, cfg.norm_eps
        self.self_attn = Gemma2Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, C, cfg.layers[layer].ffn_width, "gelu_tanh")
        self.input_layernorm = RMSNorm(w, "attn_norm", C, eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, eps)
        self.pre_feedforward_layernorm = RMSNorm(w, "ffn_norm", C, eps)
        self.post_feedforward_layernorm = RMSNorm(w, "post_ffw_norm", C, eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2ForCausalLM(CausalLM):
    def __init__(self, cfg: Gemma2Config, w: TensorSource):
        decoder = Decoder(cfg, w, Gemma2DecoderLayer, embed_scale=cfg.n_embd**0.5)
        super().__init__(cfg, w, decoder, logit_softcap=cfg.logit_softcap)
