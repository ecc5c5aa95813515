"""Attention of a ragged batch over a paged KV cache."""

import torch
from torch import Tensor

from dasllama_torch.ops.kv_codecs import CODECS
from dasllama_torch.ops.registry import Cost, define, refuse_gradient


def weigh(
    dots: Tensor, scale: float, softcap: float, sinks: Tensor | None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What rows take from n keys: dots [..., H, n] of their queries with them, f32. seen: bool, which keys a row sees,
    of a shape that expands to that of dots; None: all of them.

    Returns the probabilities [..., H, n], or [..., H, n + 1] with those of the sinks last, and the (capped) scores
    [..., H, n].
    """
    scores = dots * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(logits, -1), scores


def attend_row(
    dots: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`weigh` of one row, dots [H, n], and its result with values v [n, G, Dv].

    Returns out [H, Dv], the keys' probabilities [H, n] and the (capped) scores [H, n].
    """
    p, scores = weigh(dots, scale, softcap, sinks)
    p = p[:, : scores.shape[1]]
    return torch.einsum("hn,nhd->hd", p, v.repeat_interleave(dots.shape[0] // v.shape[1], 1)), p, scores


def _fake(
    q, k_cache, v_cache, block_table, row_seq, row_pos, row_end, scale, window, softcap, sinks, k_codec, v_codec, v_dim
):  # fmt: skip
    return q.new_empty((*q.shape[:-1], v_dim))


def _cost(
    q, k_cache, v_cache, block_table, row_seq, row_pos, row_end, scale, window, softcap, sinks, k_codec, v_codec, v_dim
) -> Cost:  # fmt: skip
    H, D = q.shape[-2:]
    live = row_seq >= 0
    seq, end = row_seq[live], row_end[live]
    begin = (row_pos[live] + 1 - window).clamp(min=0) if window else torch.zeros_like(end)
    pairs = int((end - begin).sum())
    spans = [int(end[seq == s].max() - begin[seq == s].min()) for s in seq.unique()]  # each key is read once
    key_bytes = sum(cache.shape[1] * cache.shape[3] * cache.element_size() for cache in (k_cache, v_cache))
    nbytes = sum(spans) * key_bytes + q.nbytes + q.numel() // D * v_dim * q.element_size()
    return Cost(nbytes, 2 * pairs * H * (D + v_dim), f"{len(seq)} rows of {H} x {D}, {max(spans, default=0)} keys")


@define(fake=_fake, cost=_cost)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_seq: Tensor,
    row_pos: Tensor,
    row_end: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_codec: int,
    v_codec: int,
    v_dim: int,
) -> Tensor:
    """Softmax attention of q [..., H, D] over k_cache [P, G, R, row of D] and v_cache [P, G, R, row of Dv].

    Returns [..., H, Dv]. The leading dims of q are T rows, all int32:
    block_table [S, B]: page of each R rows of a sequence; entries that no row needs may hold anything.
    row_seq [T]: sequence of the row, -1 for an inert row, whose output is zero.
    row_pos [T]: absolute position of the row.
    row_end [T]: keys [0, row_end) are visible: row_pos + 1 if causal, the span's end inside a non-causal span.
    window: W > 0 hides keys at row_pos - W and before, so W keys are seen with the row's own; 0 hides none.
    softcap: c > 0 turns a scaled score s into c * tanh(s / c) before masking; 0 does not.
    sinks: f32 [H], one more logit per head, in the denominator only; None: none.
    k_codec, v_codec: ids of `kv_codecs.KV_CODECS`; v_dim: Dv. Codes of keys are multiplied as integers with the query,
    which is rounded to 8 bits for it; those of values are added up in f32.
    Query head h reads kv head h // (H / G). Sums are f32; the result has q's dtype. What a row does not see, NaN
    included, takes no part in its result; a row's bits do not depend on the rest of the batch.
    Raises for a sequence, an end or a needed page that is out of range.
    """
    R, keys, values = k_cache.shape[2], CODECS[k_codec], CODECS[v_codec]
    rows = q.reshape(-1, *q.shape[-2:]).float()  # [T, H, D]
    out = rows.new_zeros((*rows.shape[:2], v_dim))
    for t, (s, pos, end) in enumerate(zip(row_seq.tolist(), row_pos.tolist(), row_end.tolist(), strict=True)):
        begin = max(0, pos - window + 1) if window else 0
        if s < 0 or begin >= end:
            continue
        at = torch.arange(begin, end, device=q.device)
        page, row = block_table[s, at // R].long(), at % R
        dots = keys.dot(rows[t], k_cache[page, :, row])
        out[t] = attend_row(dots, values.load(v_cache[page, :, row], v_dim), scale, softcap, sinks)[0]
    return out.reshape(*q.shape[:-1], v_dim).to(q.dtype)


refuse_gradient(paged_attention, "dasllama::attention is the form with a gradient")
