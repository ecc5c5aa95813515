"""Parts of a gated delta net (Yang et al. 2024, arXiv:2412.06464): what a recurrent layer has in place of attention.

T tokens of the ragged batch, C embedding, K taps, G key heads, H value heads, Dk and Dv their dims.
"""

import torch
from torch import Tensor, nn

from dasllama_torch.config import DeltaSpec
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.linear import Linear
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from dasllama_torch.ops.delta_gates import delta_gates
from dasllama_torch.ops.gated_act import SILU, gated_act
from dasllama_torch.ops.gated_delta_rule import gated_delta_rule, gated_delta_update
from dasllama_torch.step import Step


class CausalConv1d(Module):
    """Depthwise over the last K inputs of a sequence, SiLU behind it. x [..., T, channels] -> the same shape.

    weight: f32 [channels, 1, K]. channel_order: channels of the file in the order that transformers has them. With a
    cache it goes on from the layer's state and leaves its own there, without it starts from zeros.
    """

    def __init__(self, w: TensorSource, spec: DeltaSpec, layer: int, channel_order: Tensor):
        super().__init__()
        weight = w.f32("ssm_conv1d.weight", spec.conv_channels, spec.conv_taps)[channel_order]
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


class GatedDeltaNet(Module):
    """What follows the projections, which a family adds: convolution, delta rule, gated norm, output projection.

    head_order: value heads of the file in the order that transformers has them, all of one key head together.
    decay: f32 [H], -exp(A_log). dt_bias: f32 [H].
    """

    def __init__(
        self, w: TensorSource, n_embd: int, spec: DeltaSpec, layer: int, eps: float, head_order: Tensor | None = None
    ):
        super().__init__()
        H, keys, values = spec.n_v_heads, spec.n_k_heads * spec.k_dim, spec.n_v_heads * spec.v_dim
        heads = torch.arange(H) if head_order is None else head_order
        self.spec, self.widths = spec, [keys, keys, values]
        self.value_order = torch.arange(values).view(H, -1)[heads].reshape(-1)
        self.channel_order = torch.cat([torch.arange(2 * keys), 2 * keys + self.value_order])
        self.conv1d = CausalConv1d(w, spec, layer, self.channel_order)
        self.decay = nn.Parameter(w.f32("ssm_a", H)[heads], requires_grad=False)
        self.dt_bias = nn.Parameter(w.f32("ssm_dt.bias", H)[heads], requires_grad=False)
        self.delta = DeltaRule(layer)
        self.norm = GatedRMSNorm(w, "ssm_norm", spec.v_dim, eps)
        self.out_proj = Linear(w, "ssm_out", n_embd, values, column_order=self.value_order)

    @property
    def A_log(self) -> Tensor:
        """The parameter that transformers keeps."""
        return torch.log(-self.decay)

    def mix(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, step: Step) -> Tensor:
        """qkv [..., T, channels], z [..., T, H * Dv], b and a [..., T, H] -> [..., T, C]."""
        q, k, v = self.conv1d(qkv, step).split(self.widths, -1)
        q, k = q.unflatten(-1, (-1, self.spec.k_dim)), k.unflatten(-1, (-1, self.spec.k_dim))  # [..., T, G, Dk]
        v, z = v.unflatten(-1, (-1, self.spec.v_dim)), z.unflatten(-1, (-1, self.spec.v_dim))  # [..., T, H, Dv]
        g, beta = delta_gates(a, b, self.decay, self.dt_bias)
        return self.out_proj(self.norm(self.delta(q, k, v, g, beta, step), z).flatten(-2))
