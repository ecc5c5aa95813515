"""What is computed from a module's input and not handed on by it: the scale of a norm, the probabilities of attention.

B batch, T rows, C embedding, H query heads, G kv heads, D head dim, S keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.ops.kv_codecs import KV_CODECS, KVCodec
from dasllama_torch.ops.paged_attention import weigh_row
from dasllama_torch.step import Step


def scale(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """What an RMS norm divides x [..., C] by: sqrt(mean(x^2) + eps), f32 [..., 1]."""
    return (args[0].float().square().mean(-1, keepdim=True) + norm.eps).sqrt()


def normalized(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """x [..., C] / `scale`, f32 [..., C], to which the norm then puts its weight."""
    return args[0].float() / scale(norm, args, step)


def pattern(attn: PagedAttention, args: tuple, step: Step) -> tuple[Tensor, Tensor | None]:
    """Probabilities f32 [..., H, S] of the S keys in each row's sequence, by position, and what goes to the head's
    sink, f32 [..., H]; None if there are no sinks. They sum to 1, and to 0 for an inert row.

    By the formula of ops/paged_attention.py on the queries that attn is given and, with a cache, on the keys as it
    keeps them, which a row's window still shows: no kernel keeps probabilities.
    """
    q, k, _, _, *rest = args
    sinks = rest[0] if rest else None
    rows, row_seq, row_pos = q.reshape(-1, *q.shape[-2:]).float(), step.row_seq.tolist(), step.row_pos.tolist()
    row_end = attn.row_end(step).tolist()
    extra = sinks is not None
    found = rows.new_zeros(
        *rows.shape[:2], max((e for s, e in zip(row_seq, row_end, strict=True) if s >= 0), default=0)
    )
    to_sinks = rows.new_zeros(rows.shape[:2])
    begins = [max(0, pos + 1 - attn.window) if attn.window else 0 for pos in row_pos]
    for seq in sorted({seq for seq in row_seq if seq >= 0}):
        members = [t for t, other in enumerate(row_seq) if other == seq]
        first, end = min(begins[t] for t in members), max(row_end[t] for t in members)
        at, keys, codec = _keys(attn, k, step, seq, first, end)
        for t in members:
            seen = (at >= begins[t]) & (at < row_end[t])
            shares = weigh_row(codec.dot(rows[t], keys[seen]), attn.scale, attn.softcap, sinks)[0]
            found[t][:, at[seen]] = shares[:, : shares.shape[1] - extra]
            if extra:
                to_sinks[t] = shares[:, -1]
    lead = q.shape[:-2]
    return found.unflatten(0, lead), to_sinks.unflatten(0, lead) if extra else None


def _keys(
    attn: PagedAttention, k: Tensor | None, step: Step, seq: int, first: int, end: int
) -> tuple[Tensor, Tensor, KVCodec]:
    """Positions int64 [n] of a sequence's keys from `first` to `end`, the keys [n, G, row], and how they are kept."""
    if step.cache is None:
        k = step.kv[attn.source][0] if k is None else k
        members = step.row_seq == seq
        return step.row_pos[members].long(), k.reshape(-1, *k.shape[-2:])[members].float(), KV_CODECS["f32"]
    cache = step.cache[attn.source]
    at = torch.arange(first, end, device=cache.k.device)
    pages = step.tables[cache.group].block_table[seq].long()
    R = cache.k.shape[2]
    return at, cache.k[pages[at // R], :, at % R], cache.k_codec


DERIVED: dict[str, Callable[[Any, tuple, Step], Any]] = {"scale": scale, "normalized": normalized, "pattern": pattern}
