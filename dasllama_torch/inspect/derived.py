"""What is computed from a module's input and not handed on by it: the scale of a norm, the probabilities of attention.

B batch, T rows, C embedding, H query heads, G kv heads, D head dim, S keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.ops.paged_attention import weigh
from dasllama_torch.step import Step


def scale(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """What an RMS norm divides x [..., C] by: sqrt(mean(x^2) + eps), f32 [..., 1]."""
    return (args[0].float().square().mean(-1, keepdim=True) + norm.eps).sqrt()


def normalized(norm: nn.Module, args: tuple, step: Step) -> Tensor:
    """x [..., C] / `scale`, f32 [..., C], to which the norm then puts its weight."""
    return args[0].float() / scale(norm, args, step)


def pattern(attn: PagedAttention, args: tuple, step: Step) -> tuple[Tensor, Tensor | None]:
    """Probabilities f32 [B, T, H, S] of the S keys in each row's sequence, by position, and what goes to the head's
    sink, f32 [B, T, H]; None if there are no sinks. They sum to 1, and to 0 for an inert row.

    No kernel keeps them, so they are computed from the queries that attn is given and, with a cache, from the keys as
    it keeps them: those that a row's window still shows.
    """
    q, _, _, _, *rest = args
    sinks = rest[0] if rest else None
    if step.cache is not None:
        return _from_cache(attn, q, step, sinks)
    weights = attn.probabilities(*args).transpose(1, 2)
    live = (step.row_seq >= 0).view(*q.shape[:2], 1)
    return weights, None if sinks is None else torch.where(live, 1 - weights.sum(-1), 0.0)


def _from_cache(attn: PagedAttention, q: Tensor, step: Step, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`pattern` by the formula of ops/paged_attention.py, all rows of a sequence at once: a query is rounded as its
    codec says."""
    cache = step.cache[attn.source]
    table, R = step.tables[cache.group].block_table.long(), cache.k.shape[2]
    rows = q.reshape(-1, *q.shape[-2:]).float()
    end = attn.row_end(step).long()
    begin = (step.row_pos.long() + 1 - attn.window).clamp(min=0) if attn.window else torch.zeros_like(end)
    weights = rows.new_zeros(*rows.shape[:2], int(end.max()))
    to_sinks = rows.new_zeros(rows.shape[:2])
    for seq in range(step.n_seqs):
        mine = (step.row_seq == seq).nonzero().flatten()
        if not len(mine):
            continue
        first, last = int(begin[mine].min()), int(end[mine].max())
        at = torch.arange(first, last, device=q.device)  # before a window pages may be gone
        keys = cache.k[table[seq, at // R], :, at % R]  # [n, G, row]
        seen = (at >= begin[mine, None]) & (at < end[mine, None])
        shares, _ = weigh(cache.k_codec.dot(rows[mine], keys), attn.scale, attn.softcap, sinks, seen[:, None])
        weights[mine, :, first:last] = shares[..., : len(at)]
        if sinks is not None:
            to_sinks[mine] = shares[..., -1]
    lead = q.shape[:-2]
    return weights.unflatten(0, lead), None if sinks is None else to_sinks.unflatten(0, lead)


DERIVED: dict[str, Callable[[Any, tuple, Step], Any]] = {"scale": scale, "normalized": normalized, "pattern": pattern}
