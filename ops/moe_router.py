"""The choice of experts for a token, and their weights, in f32.

softmax: the k experts of the largest logits; weights are their probabilities among all experts (Shazeer et al. 2017,
arXiv:1701.06538) or, renormalized, among the chosen k: exp(l_i) over the sum of exp(l) over all or over the chosen.
sigmoid: the k largest of s + bias, s = 1 / (1 + exp(-l)); weights are s without the bias, renormalized: over their sum
(DeepSeek-V3, arXiv:2412.19437). All are multiplied by `scale` in the end.
"""

import torch
from torch import Tensor

from dasllama_torch.ops.lattices import FLOATS
from dasllama_torch.ops.registry import define, register_backward
from dasllama_torch.ops.require import require

SOFTMAX, SIGMOID = 0, 1
_TINY = 1e-20  # added to a sum of sigmoids before it divides


def _check(logits: Tensor, bias: Tensor | None, top_k: int, gate: int) -> None:
    require(
        logits.dtype in FLOATS and logits.dim() >= 1 and 1 <= top_k <= logits.shape[-1],
        lambda: (
            f"dasllama::moe_router: logits must be f32, f16 or bf16 [..., E] with E >= top_k = {top_k} >= 1, "
            f"found {logits.dtype} {list(logits.shape)}"
        ),
    )
    require(
        gate in (SOFTMAX, SIGMOID),
        lambda: f"dasllama::moe_router: gate must be 0 (softmax) or 1 (sigmoid), found {gate}",
    )
    require(
        bias is None
        or (
            gate == SIGMOID
            and bias.dtype == torch.float32
            and bias.shape == logits.shape[-1:]
            and bias.device == logits.device
        ),
        lambda: (
            f"dasllama::moe_router: bias must be f32 [{logits.shape[-1]}] on {logits.device} and the gate sigmoid, "
            f"found {bias.dtype} {list(bias.shape)} on {bias.device} and gate {gate}"
        ),
    )


def _fake(logits, bias, top_k, gate, renormalize, scale):
    _check(logits, bias, top_k, gate)
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@define(fake=_fake)
def moe_router(
    logits: Tensor, bias: Tensor | None, top_k: int, gate: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """logits [..., E] -> weights f32 [..., k] and ids int64 [..., k], best first.

    gate: 0 softmax, 1 sigmoid. bias: f32 [E], added to sigmoid scores for the choice only. Of equal scores the lower id
    comes first; NaN ranks above all numbers, as in torch.topk, so that the ids are valid whatever the logits.
    The gradient is that of the weights; the choice has none.
    """
    _check(logits, bias, top_k, gate)
    values = logits.float()
    score = values.sigmoid() if gate == SIGMOID else values
    choice = score if bias is None else score + bias
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    chosen = score.gather(-1, ids)
    if gate == SIGMOID:
        weights = chosen / (chosen.sum(-1, keepdim=True) + _TINY) if renormalize else chosen
    else:
        weights = (chosen if renormalize else values).softmax(-1)
        weights = weights if renormalize else weights.gather(-1, ids)
    return weights * scale, ids.contiguous()


def _fake_backward(grad, logits, ids, gate, renormalize, scale):
    return logits.new_empty(logits.shape)


@define(fake=_fake_backward)
def moe_router_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, gate: int, renormalize: bool, scale: float
) -> Tensor:
    """Gradient of `moe_router`'s weights with respect to logits [..., E]; grad [..., k], ids int64 [..., k]."""
    values, g = logits.float(), grad.float() * scale
    if gate == SOFTMAX and not renormalize:
        p = values.softmax(-1)
        u = p.gather(-1, ids)
        return (-p * (g * u).sum(-1, keepdim=True)).scatter_add(-1, ids, g * u).to(logits.dtype)
    chosen = values.gather(-1, ids)
    if gate == SOFTMAX:
        u = chosen.softmax(-1)
        d = u * (g - (g * u).sum(-1, keepdim=True))
    else:
        s = chosen.sigmoid()
        if renormalize:
            total = s.sum(-1, keepdim=True) + _TINY
            g = (g - (g * s / total).sum(-1, keepdim=True)) / total
        d = g * s * (1 - s)
    return torch.zeros_like(values).scatter(-1, ids, d).to(logits.dtype)


def _setup(ctx, inputs, output):
    logits, _, _, ctx.gate, ctx.renormalize, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, grad, _):
    logits, ids = ctx.saved_tensors
    return moe_router_backward(grad, logits, ids, ctx.gate, ctx.renormalize, ctx.scale), None, None, None, None, None


register_backward(moe_router, _backward, _setup)
