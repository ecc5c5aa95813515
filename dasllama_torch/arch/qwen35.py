"""Qwen3.5: three of four layers are gated delta nets, every fourth is attention whose output a sigmoid gates; partial
rotary positions, QK norm, SwiGLU.
Source: transformers' `qwen3_5`; Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464); GGUF arch `qwen35`, whose norm
weights contain the +1 (the gated one has none), and whose value heads stand in another order than transformers'.
T tokens of the ragged batch, C embedding, H query heads (value heads in a delta net), G kv heads (key heads), D head
dim."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig, DeltaSpec, read_delta, read_geometry, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.gated_delta import CausalConv1d, DeltaRule, GatedRMSNorm
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.ops.delta_gates import delta_gates
from dasllama_torch.ops.gated_act import SIGMOID, gated_act
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen35Config":
        g = read_geometry(md, w)
        dim = md.arch.int("rope.dimension_count", min=2, max=g.head_dim)
        rope = read_rope(md, dim)
        deltas = read_delta(md, g.n_layers)
        return cls.build(md, g, (g.layer(i, rope=rope, delta=deltas[i]) for i in range(g.n_layers)))


class Qwen35Attention(nn.Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim = D
        self.q_proj = Linear(w, "attn_q", H * 2 * D, C)  # of each head: query, then gate
        self.k_proj = Linear(w, "attn_k", G * D, C)
        self.v_proj = Linear(w, "attn_v", G * D, C)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.q_norm = RMSNorm(w, "attn_q_norm", D, cfg.norm_eps)
        self.k_norm = RMSNorm(w, "attn_k_norm", D, cfg.norm_eps)
        self.rope = Rope(spec.rope)
        self.attn = PagedAttention(layer, scale=D**-0.5)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)  # [..., T, H, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rope(self.q_norm(q), step), self.rope(k, step)
        y = self.attn(q, k, v, step)
        return self.o_proj(gated_act(gate, y, SIGMOID).flatten(-2))


class Qwen35GatedDeltaNet(nn.Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer].delta
        C, G, H = cfg.n_embd, spec.n_k_heads, spec.n_v_heads
        keys, values = G * spec.k_dim, H * spec.v_dim
        heads = head_order(spec)
        of_values = spread(heads, spec.v_dim)
        channels = None if heads is None else torch.cat([torch.arange(2 * keys), 2 * keys + of_values])
        self.spec, self.widths = spec, [keys, keys, values]
        self.in_proj_qkv = Linear(w, "attn_qkv", spec.conv_channels, C, row_order=channels)
        self.in_proj_z = Linear(w, "attn_gate", values, C, row_order=of_values)
        self.in_proj_b = Linear(w, "ssm_beta", H, C, row_order=heads)
        self.in_proj_a = Linear(w, "ssm_alpha", H, C, row_order=heads)
        self.conv1d = CausalConv1d(w, spec, layer, channels)
        self.ssm_a = nn.Parameter(w.f32("ssm_a", H)[heads], requires_grad=False)  # -exp(A_log)
