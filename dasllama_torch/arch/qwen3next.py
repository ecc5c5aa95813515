"""Qwen3-Next: the layers of Qwen3.5 with positions on one axis, experts beside a shared one, and two fused projections
in a delta net, which go by key head.
Source: transformers' `qwen3_next`; GGUF arch `qwen3next`, whose value heads stand in transformers' order, and which
holds one of the two projections as two matrices, or in older files as one.
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
        n_layers = leave_nextn(md, w, g.n_layers)
        deltas, moe = read_delta(md, n_layers), read_moe(md, renormalize=True, shared=True)
        return cls.build(md, g, (g.layer(i, rope=rope, delta=deltas[i], moe=moe) for i in range(n_layers)))


def order_by_head(spec: DeltaSpec) -> Tensor:
    """Which row of [all queries, all keys, all values, all gates] stands at each place of the fused projection: for
    each key head its query, its key, the values and the gates of its value heads.
    """
    keys, values = spec.n_k_heads * spec.k_dim, spec.n_v_heads * spec.v_dim
    parts = torch.arange(2 * keys + 2 * values).split([keys, keys, values, values])
    return torch.cat([part.view(spec.n_k_heads, -1) for part in parts], 1).reshape(-1)


class ProjectionByHead(Module):
    """The fused projection where the file holds two matrices, which may be of two types. x [..., C] -> [..., N]."""

    def __init__(self, w: TensorSource, n_embd: int, spec: DeltaSpec):
        super().__init__()
        self.qkv = Linear(w, "attn_qkv", spec.conv_channels, n_embd)
        self.z = Linear(w, "attn_gate", spec.n_v_heads * spec.v_dim, n_embd)
        self.register_buffer("order", order_by_head(spec), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The matrix that transformers keeps, dequantized, f32 [N, C]."""
        return torch.cat([self.qkv.weight, self.z.weight])[self.order]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.qkv(x), self.z(x)], -1)[..., self.order]


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    def __init__(self, cfg: DecoderConfig, w: TensorSource, layer: int):
        spec = cfg.layers[layer].delta
        super().__init__(w, cfg.n_embd, spec, layer, cfg.norm_eps)
        places = order_by_head(spec).argsort()
        self.in_proj_qkvz = (
            Linear(w, "ssm_in", len(places), cfg.n_embd)  # as older converters wrote it
            if w.has("ssm_in.weight")
            else ProjectionByHead(w, cfg.n_embd, spec)
        )
        self.in_proj_ba = Linear(w, "ssm_ba", 2 * spec.n_v_heads, cfg.n_embd)
        self.register_buffer("places", places, persistent=False)  # of q, k, v and z, each for all heads

    def forward(self, x: Tensor, step: Step) -> Tensor:
        qkvz = self.in_proj_qkvz(x)[..., self.places]
        qkv, z = qkvz[..., : self.spec.conv_channels], qkvz[..., self.spec.conv_channels :]
        b, a = self.in_proj_ba(x).unflatten(-1, (self.spec.n_k_heads, -1)).chunk(2, -1)  # [..., T, G, H / G]
        return self.mix(qkv, z, b.flatten(-2), a.flatten(-2), step)


class Qwen3NextForCausalLM(CausalLM):
    def __init__(self, cfg: Qwen3NextConfig, w: TensorSource):
        layer = partial(Qwen35DecoderLayer, delta_net=Qwen3NextGatedDeltaNet)
        super().__init__(cfg, w, Decoder(cfg, w, layer))
