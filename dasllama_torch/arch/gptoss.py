"""gpt-oss: attention with sinks and biases, every other layer over a window, YaRN everywhere; experts with biases and a
clamped SwiGLU in every layer.
Source: gpt-oss model card, arXiv:2508.10925; GGUF arch `gpt-oss`.
T tokens of the ragged batch, C embedding, H query heads, G kv heads, D head dim."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig, MoESpec, read_geometry, read_moe, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.moe import Experts, TopKRouter
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "GptOssConfig":
        g = read_geometry(md, w)
        window = md.arch.int("attention.sliding_window", min=1)
        moe = read_moe(md, renormalize=True)
        rope = read_rope(md, g.head_dim)
        if rope.yarn:  # the published config asks for this, and the files have no key for it
            rope = replace(rope, yarn=replace(rope.yarn, truncate=False))
        layers = (g.layer(i, rope=rope, window=0 if i % 2 else window, moe=moe) for i in range(g.n_layers))
        return cls.build(md, g, layers)


class GptOssAttention(Module):
    def __init__(self, cfg: GptOssConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * D, C, bias="yes")
        self.k_proj = Linear(w, "attn_k", G * D, C, bias="yes")
        self.v_proj = Linear(w, "attn_v", G * D, C, bias="yes")
        self.o_proj = Linear(w, "attn_output", C, H * D, bias="yes")
        self.sinks = nn.Parameter(w.f32("attn_sinks.weight", H), requires_grad=False)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5, window=spec.window)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, H, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(q, step), self.rope(k, step)
        return self.o_proj(self.attn(q, k, v, step, self.sinks).flatten(-2))


class GptOssMLP(Module):
    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec):
        super().__init__()
        self.router = TopKRouter(w, n_embd, spec, bias="yes")
        self.experts = Experts(w, n_embd, spec, "swiglu_oai", bias="yes")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Also gives the weights of the chosen experts, as in transformers."""
        rows = x.flatten(0, -2)
        _, weights, ids = self.router(rows)
        return self.experts(rows, ids, weights).view(x.shape), weights


class GptOssDecoderLayer(Module):
    def __init__(self, cfg: GptOssConfig, w: TensorSource, layer: int):
        super().__init__()
        C = cfg.n_embd
        self.self_attn = GptOssAttention(cfg, w, layer)
        self.mlp = GptOssMLP(w, C, cfg.layers[layer].moe)
        self.input_layernorm = RMSNorm(w, "attn_norm", C, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))[0]


class GptOssForCausalLM(CausalLM):
    def __init__(self, cfg: GptOssConfig, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, GptOssDecoderLayer))
