"""Qwen3.5: three of four layers are gated delta nets, every fourth is attention whose output a sigmoid gates; partial
rotary positions on three axes, QK norm; SwiGLU or, in `qwen35moe`, experts beside a shared one.
Source: transformers' `qwen3_5` and `qwen3_5_moe`; Yang et al. 2024, arXiv:2412.06464. GGUF archs `qwen35`, `qwen35moe`:
norm weights contain the +1, but for the gated one, which has none, and value heads stand in another order than
transformers'. T tokens of the ragged batch, C embedding, H query heads (value heads in a delta net), G kv heads (key
heads), D head dim."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dasllama_torch.config import (
    DecoderConfig,
    leave_nextn,
    read_axes,
    read_delta,
    read_geometry,
    read_moe,
    read_rope,
    read_rotary_dim,
)
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import GatedMLP
from dasllama_torch.modules.gated_delta import GatedDeltaNet
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.moe import SharedExpertMoeBlock
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.ops.gated_act import SIGMOID, gated_act
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen35Config":
        g = read_geometry(md, w, experts_only=True)
        dim = read_rotary_dim(md, g.head_dim)
        rope = replace(read_rope(md, dim), axes=read_axes(md, dim, interleaved=True))
        n_layers = leave_nextn(md, w, g.n_layers)
        deltas, moe = read_delta(md, n_layers), read_moe(md, renormalize=True, shared=True)
        return cls.build(md, g, (g.layer(i, rope=rope, delta=deltas[i], moe=moe) for i in range(n_layers)))


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


class Qwen35GatedDeltaNet(GatedDeltaNet):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        spec = cfg.layers[layer].delta
        C, G, H = cfg.n_embd, spec.n_k_heads, spec.n_v_heads
        heads = torch.arange(H).view(H // G, G).T.reshape(-1)  # the file has those of the key heads in turns
        super().__init__(w, C, spec, layer, cfg.norm_eps, heads)
        self.in_proj_qkv = Linear(w, "attn_qkv", spec.conv_channels, C, row_order=self.channel_order)
        self.in_proj_z = Linear(w, "attn_gate", H * spec.v_dim, C, row_order=self.value_order)
        self.in_proj_b = Linear(w, "ssm_beta", H, C, row_order=heads)
        self.in_proj_a = Linear(w, "ssm_alpha", H, C, row_order=heads)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.mix(self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x), step)


class Qwen35DecoderLayer(Module):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int, delta_net=Qwen35GatedDeltaNet):
        super().__init__()
        spec, C = cfg.layers[layer], cfg.n_embd
        self.is_recurrent = spec.delta is not None
        if self.is_recurrent:
            self.linear_attn = delta_net(cfg, w, layer)
        else:
            self.self_attn = Qwen35Attention(cfg, w, layer)
        self.mlp = SharedExpertMoeBlock(w, C, spec.moe) if spec.moe else GatedMLP(w, C, spec.ffn_width, "silu")
        self.input_layernorm = RMSNorm(w, "attn_norm", C, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        mixer = self.linear_attn if self.is_recurrent else self.self_attn
        x = x + mixer(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35ForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen35Config, w: TensorSource):
        super().__init__(cfg, w, Decoder(cfg, w, Qwen35DecoderLayer))
