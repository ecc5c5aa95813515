"""Qwen3-Next: the layers of Qwen3.5 with positions on one axis, experts beside a shared one, and two fused projections
in a delta net, which go by key head.
Source: transformers' `qwen3_next`; GGUF arch `qwen3next`, whose value heads stand in transformers' order, and which
holds one of the two projections as two matrices.
T tokens of the ragged batch, C embedding, G key heads, H value heads, Dk and Dv their dims."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dasllama_torch.arch.qwen35 import Qwen35DecoderLayer
from dasllama_torch.config import (
    DecoderConfig,
    DeltaSpec,
    leave_nextn,
    read_delta,
    read_geometry,
    read_moe,
    read_rope,
    read_rotary_dim,
)
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.gated_delta import GatedDeltaNet
from dasllama_torch.modules.linear import Linear
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Qwen3NextConfig":
        g = read_geometry(md, w, experts_only=True)
        rope = read_rope(md, read_rotary_dim(md, g.head_dim))
        deltas, moe = read_delta(md, g.n_layers), read_moe(md, renormalize=True, shared=True)
        n_layers = leave_nextn(md, w, g.n_layers)
        return cls.build(md, g, (g.layer(i, rope=rope, delta=deltas[i], moe=moe) for i in range(n_layers)))


class ProjectionByHead(Module):
    """x [..., C] -> for each key head its query, its key, the values and the gates of its value heads, side by side."""

    def __init__(self, w: TensorSource, n_embd: int, spec: DeltaSpec):
        super().__init__()
        keys, values = spec.n_k_heads * spec.k_dim, spec.n_v_heads * spec.v_dim
        self.widths, self.n_heads = [keys, keys, values], spec.n_k_heads
        self.qkv = Linear(w, "attn_qkv", spec.conv_channels, n_embd)
        self.z = Linear(w, "attn_gate", values, n_embd)

    @property
    def weight(self) -> Tensor:
        """The matrix that transformers keeps, dequantized, f32 [N, C]."""
        return self.by_head(self.qkv.weight.T, self.z.weight.T).T

    def by_head(self, qkv: Tensor, z: Tensor) -> Tensor:
        parts = *qkv.split(self.widths, -1), z
        return torch.cat([part.unflatten(-1, (self.n_heads, -1)) for part in parts], -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.by_head(self.qkv(x), self.z(x))


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        spec = cfg.layers[layer].delta
        super().__init__(w, cfg.n_embd, spec, layer, cfg.norm_eps)
        per_head = spec.n_v_heads // spec.n_k_heads * spec.v_dim
        self.head_widths = [spec.k_dim, spec.k_dim, per_head, per_head]
        self.in_proj_qkvz = ProjectionByHead(w, cfg.n_embd, spec)
        self.in_proj_ba = Linear(w, "ssm_ba", 2 * spec.n_v_heads, cfg.n_embd)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        heads = self.in_proj_qkvz(x).unflatten(-1, (self.spec.n_k_heads, -1))  # [..., T, G, 2 Dk + 2 H / G Dv]
        q, k, v, z = (part.flatten(-2) for part in heads.split(self.head_widths, -1))
        b, a = (y.flatten(-2) for y in self.in_proj_ba(x).unflatten(-1, (self.spec.n_k_heads, -1)).chunk(2, -1))
        return self.mix(torch.cat([q, k, v], -1), z, b, a, step)


class Qwen3NextForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen3NextConfig, w: TensorSource):
        layer = partial(Qwen35DecoderLayer, delta_net=Qwen3NextGatedDeltaNet)
        super().__init__(cfg, w, Decoder(cfg, w, layer))
