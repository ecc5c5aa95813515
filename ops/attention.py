"""Attention as a function of q, k and v, with a gradient; the paged form without a cache."""

import torch
from torch import Tensor

from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.paged_attention import attend_row
from dasllama_torch.ops.registry import define, register_backward

_dots = KV_CODECS["f32"].dot


def _visible(q_seq, q_pos, q_end, k_seq, k_pos, window) -> Tensor:
    """bool [T, S]: whether row t sees key j."""
    seen = (k_seq[None] == q_seq[:, None]) & (k_seq[None] >= 0) & (k_pos[None] < q_end[:, None])
    return seen & (k_pos[None] > q_pos[:, None] - window) if window else seen


def _fake(q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, scale, window, softcap, sinks):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@define(fake=_fake)
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
    """Softmax attention of q [..., H, D] over k [..., G, D], v [..., G, Dv] -> [..., H, Dv] in q.dtype; f32 inside.

    The leading dims of q are T rows, those of k and v are S keys, all int32: q_seq, q_pos, q_end [T], k_seq, k_pos [S].
    Row t sees key j if k_seq[j] == q_seq[t] >= 0, k_pos[j] < q_end[t] and, with a window W > 0,
    k_pos[j] > q_pos[t] - W. A row that sees nothing yields zeros. scale, softcap, sinks as in `paged_attention`; for
    keys of consecutive positions the results are those of `kv_write` into an f32 cache and `paged_attention`, bit for
    bit.
    The gradient is with respect to q, k and v.
    """
    rows = q.reshape(-1, *q.shape[-2:]).float()  # [T, H, D]
    keys, values = k.reshape(-1, *k.shape[-2:]).float(), v.reshape(-1, *v.shape[-2:]).float()  # [S, G, D]
    out = rows.new_zeros((*rows.shape[:2], v.shape[-1]))
    for t, seen in enumerate(_visible(q_seq, q_pos, q_end, k_seq, k_pos, window)):
        if seen.any():
            out[t] = attend_row(_dots(rows[t], keys[seen]), values[seen], scale, softcap, sinks)[0]
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


def _backward_fake(grad, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@define(fake=_backward_fake)
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
    """Gradients of `attention` with respect to q, k and v, given grad [..., H, Dv] of its result."""
    rows = q.reshape(-1, *q.shape[-2:]).float()
    keys, values = k.reshape(-1, *k.shape[-2:]).float(), v.reshape(-1, *v.shape[-2:]).float()
    G, group = keys.shape[1], rows.shape[1] // keys.shape[1]
    grads = grad.reshape(*rows.shape[:2], -1).float()
    dq, dk, dv = torch.zeros_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
    for t, seen in enumerate(_visible(q_seq, q_pos, q_end, k_seq, k_pos, window)):
        if not seen.any():
            continue
        key, value = keys[seen].repeat_interleave(group, 1), values[seen].repeat_interleave(group, 1)  # [n, H, D]
        _, p, scores = attend_row(_dots(rows[t], keys[seen]), values[seen], scale, softcap, sinks)
        dp = torch.einsum("hd,nhd->hn", grads[t], value)
        ds = p * (dp - (p * dp).sum(1, keepdim=True)) * scale
        if softcap > 0:
            ds = ds * (1 - (scores / softcap) ** 2)
        dq[t] = torch.einsum("hn,nhd->hd", ds, key)
        dk[seen] += torch.einsum("hn,hd->nhd", ds, rows[t]).unflatten(1, (G, group)).sum(2)
        dv[seen] += torch.einsum("hn,hd->nhd", p, grads[t]).unflatten(1, (G, group)).sum(2)
    return dq.reshape(q.shape).to(q.dtype), dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(*tensors, sinks)


def _backward(ctx, grad):
    *tensors, sinks = ctx.saved_tensors
    dq, dk, dv = attention_backward(grad, *tensors, ctx.scale, ctx.window, ctx.softcap, sinks)
    return dq, dk, dv, *[None] * 9


register_backward(attention, _backward, _setup)
