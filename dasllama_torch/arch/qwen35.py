"""Qwen3.5: three of four layers are gated delta nets, every fourth is attention whose output a sigmoid gates; partial
rotary positions, QK norm, SwiGLU.
Source: transformers' `qwen3_5`; Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464); GGUF arch `qwen35`, whose norm
weights contain the +1 (the gated one has none), and whose value heads stand in another order than transformers'.
T tokens of the ragged batch, C embedding, H query heads (value heads in a delta net), G kv heads (key heads), D head
dim."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig, read_axes, read_delta, read_geometry, read_rope, read_rotary_dim
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
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
        dim = read_rotary_dim(md, g.head_dim)
        rope = replace(read_rope(md, dim), axes=read_axes(md, dim, interleaved=True))
        deltas = read_delta(md, g.n_layers)
        return cls.build(md, g, (g.layer(i, rope=rope, delta=deltas[i]) for i in range(g.n_layers)))


class Qwen35Attention(Module):
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


class Qwen35GatedDeltaNet(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer].delta
        C, G, H = cfg.n_embd, spec.n_k_heads, spec.n_v_heads
        keys, values = G * spec.k_dim, H * spec.v_dim
        # The file has the value heads in turns, one of each key head; transformers has those of a key head together.
        heads = torch.arange(H).view(H // G, G).T.reshape(-1)
        of_values = torch.arange(values).view(H, -1)[heads].reshape(-1)
        channels = torch.cat([torch.arange(2 * keys), 2 * keys + of_values])
        self.spec, self.widths = spec, [keys, keys, values]
        self.in_proj_qkv = Linear(w, "attn_qkv", spec.conv_channels, C, row_order=channels)
        self.in_proj_z = Linear(w, "attn_gate", values, C, row_order=of_values)
        self.in_proj_b = Linear(w, "ssm_beta", H, C, row_order=heads)
        self.in_proj_a = Linear(w, "ssm_alpha", H, C, row_order=heads)
        self.conv1d = CausalConv1d(w, spec, layer, channels)
        self.decay = nn.Parameter(w.f32("ssm_a", H)[heads], requires_grad=False)  # -exp(A_log)
        self.dt_bias = nn.Parameter(w.f32("ssm_dt.bias", H)[heads], requires_grad=False)
        self.delta = DeltaRule(layer)
        self.norm = GatedRMSNorm(w, "ssm_norm", spec.v_dim, cfg.norm_eps)
        self.out_proj = Linear(w, "ssm_out", C, values, column_order=of_values)

    @property
    def A_log(self) -> Tensor:
        """The parameter that transformers keeps."""
        return torch.log(-self.decay)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q, k, v = self.conv1d(self.in_proj_qkv(x), step).split(self.widths, -1)
        q, k = q.unflatten(-1, (-1, self.spec.k_dim)), k.unflatten(-1, (-1, self.spec.k_dim))  # [..., T, G, Dk]
        v, z = (y.unflatten(-1, (-1, self.spec.v_dim)) for y in (v, self.in_proj_z(x)))  # [..., T, H, Dv]
        g, beta = delta_gates(self.in_proj_a(x), self.in_proj_b(x), self.decay, self.dt_bias)
        y = self.delta(q, k, v, g, beta, step)
        return self.out_proj(self.norm(y, z).flatten(-2))


class Qwen35DecoderLayer(Module):
    def __init__(self, cfg: Qwen35Config, w: TensorSource, layer: int):
        super().__init__()
        self.is_recurrent = cfg.layers[layer].delta is not None
        if self.is_recurrent:
            self.linear_attn = Qwen35GatedDeltaNet(cfg, w, layer)
        else:
            self.self_attn = Qwen35Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, cfg.n_embd, cfg.layers[layer].ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", cfg.n_embd, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        mixer = self.linear_attn if self.is_recurrent else self.self_attn
        x = x + mixer(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35ForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen35Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen35DecoderLayer))
