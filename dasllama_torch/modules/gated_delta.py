"""Parts of a gated delta net (Yang et al. 2024, arXiv:2412.06464): what a recurrent layer has in place of attention.

T tokens of the ragged batch, S sequences, K taps, G key heads, H value heads, Dk and Dv their dims.
"""

import torch
from torch import Tensor, nn

from dasllama_torch.config import DeltaSpec
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from dasllama_torch.ops.gated_act import SILU, gated_act
from dasllama_torch.ops.gated_delta_rule import gated_delta_rule, gated_delta_update
from dasllama_torch.step import Step


class CausalConv1d(Module):
    """Depthwise over the last K inputs of a sequence, SiLU behind it. x [..., T, C] -> the same shape.

    weight: f32 [C, 1, K]. channel_order: channels of the file in the order that transformers has them; None: they are.
    With a cache it goes on from the layer's state and leaves its own there, without it starts from zeros.
    """

    def __init__(self, w: TensorSource, spec: DeltaSpec, layer: int, channel_order: Tensor | None = None):
        super().__init__()
        weight = w.f32("ssm_conv1d.weight", spec.conv_channels, spec.conv_taps)
        weight = weight if channel_order is None else weight[channel_order]
        self.weight = nn.Parameter(weight.unsqueeze(1), requires_grad=False)
        self.spec, self.layer = spec, layer

    def forward(self, x: Tensor, step: Step) -> Tensor:
        weight = self.weight.squeeze(1)
        if step.cache is None:
            shape = (step.n_seqs, self.spec.conv_taps - 1, self.spec.conv_channels)
            start = torch.zeros(shape, dtype=torch.float32, device=x.device)
            return causal_conv1d(x, weight, step.row_seq, start)[0]
        return causal_conv1d_update(x, weight, step.cache[self.layer].conv, step.state_slots)

    def extra_repr(self) -> str:
        return f"{self.spec.conv_channels}, taps={self.spec.conv_taps}, layer={self.layer}"


class DeltaRule(Module):
    """q, k [..., T, G, Dk], v [..., T, H, Dv], g and beta [..., T, H] -> [..., T, H, Dv], see ops/gated_delta_rule.py.

    With a cache it goes on from the layer's states and leaves its own there, without it starts from zeros.
    """

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, step: Step) -> Tensor:
        if step.cache is None:
            shape = (step.n_seqs, v.shape[-2], k.shape[-1], v.shape[-1])
            start = torch.zeros(shape, dtype=torch.float32, device=v.device)
            return gated_delta_rule(q, k, v, g, beta, step.row_seq, start)[0]
        return gated_delta_update(q, k, v, g, beta, step.cache[self.layer].delta, step.state_slots)

    def extra_repr(self) -> str:
        return f"layer={self.layer}"


class GatedRMSNorm(RMSNorm):
    """x / rms(x) * weight * SiLU(gate). x and gate [..., D] -> [..., D]."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_act(gate, super().forward(x), SILU)
