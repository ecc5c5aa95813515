"""Attention as a function of q, k and v, and its gradient, for gradients and forwards without a cache: by torch's own
kernels, f32 throughout, BLOCK rows at a time against all keys.

A key that is not finite becomes a zero whose scores are NaN: it shows in the rows that see it alone.
T rows, S keys, H query heads, G kv heads of I query heads each, D and Dv head dims.
"""

import torch
from torch import Tensor

from dasllama_torch.ops.attention import _visible
from dasllama_torch.ops.attention import attention as op
from dasllama_torch.ops.attention import attention_backward as op_backward
from dasllama_torch.ops.registry import count_call, implement

BLOCK = 256


def _finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values f32 [S, G, .] without what is not finite, and [G, 1, 1, S]: zero, or NaN where there was such."""
    keys, values = k.reshape(-1, *k.shape[-2:]).float(), v.reshape(-1, *v.shape[-2:]).float()
    whole = [keys.isfinite(), values.isfinite()]
    fault = torch.where(whole[0].all(-1) & whole[1].all(-1), 0.0, torch.nan).T[:, None, None]
    return keys.where(whole[0], 0.0), values.where(whole[1], 0.0), fault


def _probabilities(
    q: Tensor, k: Tensor, seen: Tensor, fault: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [T, G, I, D], k [S, G, D], seen bool [T, S] -> probabilities and (capped) scores [G, I, T, S]."""
    scores = torch.einsum("tgid,sgd->gits", q, k) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    logits = (scores + fault).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        *heads, T, _ = logits.shape
        logits = torch.cat([logits, sinks.view(*heads, 1, 1).expand(*heads, T, 1)], -1)
    p = torch.softmax(logits, -1)[..., : seen.shape[1]]
    return torch.where(seen.any(1, keepdim=True), p, 0.0), scores


@implement(op, "CUDA")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_seq: Tensor,
    q_pos: Tensor,
    q_end: Tensor,
    k_seq: Tensor,
    k_pos: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    count_call("attention", "torch")
    keys, values, fault = _finite(k, v)
    G = keys.shape[1]
    rows = q.reshape(-1, G, q.shape[-2] // G, q.shape[-1]).float()
    seen = _visible(q_seq, q_pos, q_end, k_seq, k_pos, window)
    out = rows.new_empty((*rows.shape[:3], values.shape[-1]))
    for at in range(0, len(rows), BLOCK):
        part = slice(at, at + BLOCK)
        p, _ = _probabilities(rows[part], keys, seen[part], fault, scale, softcap, sinks)
        out[part] = torch.einsum("gits,sgd->tgid", p, values)
    return out.view(*q.shape[:-1], values.shape[-1]).to(q.dtype)


@implement(op_backward, "CUDA")
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_seq: Tensor,
    q_pos: Tensor,
    q_end: Tensor,
    k_seq: Tensor,
    k_pos: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    count_call("attention_backward", "torch")
    keys, values, fault = _finite(k, v)
    G = keys.shape[1]
    rows = q.reshape(-1, G, q.shape[-2] // G, q.shape[-1]).float()
    grads = grad.reshape(*rows.shape[:3], values.shape[-1]).float()
    seen = _visible(q_seq, q_pos, q_end, k_seq, k_pos, window)
    dq, dk, dv = torch.empty_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
    for at in range(0, len(rows), BLOCK):
        part = slice(at, at + BLOCK)
        p, scores = _probabilities(rows[part], keys, seen[part], fault, scale, softcap, sinks)
        dp = torch.einsum("tgid,sgd->gits", grads[part], values)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        if softcap > 0:
            ds = ds * (1 - (scores / softcap) ** 2)
        dq[part] = torch.einsum("gits,sgd->tgid", ds, keys)
        dk += torch.einsum("gits,tgid->sgd", ds, rows[part])
        dv += torch.einsum("gits,tgid->sgd", p, grads[part])
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)
