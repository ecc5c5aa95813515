"""Attention over what the Step says: a paged cache, or the rows of this forward alone."""

import torch
from torch import Tensor

from dasllama_torch.modules.base import Module
from dasllama_torch.ops.attention import attention
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.paged_attention import paged_attention, weigh
from dasllama_torch.step import Step


class PagedAttention(Module):
    """Writes k and v to the cache of `layer` and attends over it; without a cache it is a function of q, k and v.

    q [..., H, D], k and v [..., G, D] of this forward's rows -> [..., H, D]. Query head h reads kv head h // (H / G).
    window: keys seen, self included; 0: all. softcap: bound of the scores, see ops/paged_attention.py; 0: none.
    source: a layer before this one whose keys and values are read; k and v are then None, and nothing is written.
    is_source: later layers read those of this one. causal: also in a non-causal span, rows see none after them.
    sinks: f32 [H], see there too; None: none.
    """

    def __init__(
        self,
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        source: int | None = None,
        is_source: bool = False,
        causal: bool = False,
    ):
        super().__init__()
        self.layer, self.scale, self.window, self.softcap = layer, scale, window, softcap
        self.source, self.is_source, self.causal = layer if source is None else source, is_source, causal

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step, sinks: Tensor | None = None) -> Tensor:
        row_end = self.row_end(step)
        if step.cache is None:
            # The rows are their own keys. This form has a gradient; a cache does not.
            if k is None:
                k, v = step.kv[self.source]
            elif self.is_source:
                step.kv[self.layer] = k, v
            return attention(
                q, k, v, step.row_seq, step.row_pos, row_end, step.row_seq, step.row_pos,
                self.scale, self.window, self.softcap, sinks,
            )  # fmt: skip
        cache = step.cache[self.source]
        table = step.tables[cache.group]
        if k is not None:
            kv_write(k, v, cache.k, cache.v, table.slots, cache.k_codec.id, cache.v_codec.id)
        return paged_attention(
            q, cache.k, cache.v, table.block_table, step.row_seq, step.row_pos, row_end,
            self.scale, self.window, self.softcap, sinks, cache.k_codec.id, cache.v_codec.id, cache.v_dim,
        )  # fmt: skip

    def row_end(self, step: Step) -> Tensor:
        """How many keys each row may see here, int32 [T]."""
        return step.causal_end if self.causal and step.causal_end is not None else step.row_end

    def probabilities(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The weights f32 [B, T, H, S] of the values, and what goes to the head's sink, f32 [B, T, H], None without
        sinks: q [B, T, H, D], k [B, T, G, D]. Those of a row sum to 1, those of padding to 0.

        By the formula, in f32, for no kernel keeps them. Without a cache S is T. With one it counts the positions of
        each row's sequence from its first on; the keys are the cache's, and a query that meets codes is rounded as
        their codec says.
        """
        if step.cache is not None:
            return self._cached_probabilities(q, step, sinks)
        keys = step.kv[self.source][0] if k is None else k
        B, T, _, _ = q.shape
        sequence, at, end = (each.view(B, 1, T) for each in (step.row_seq, step.row_pos, self.row_end(step)))
        seen = (sequence >= 0) & (sequence.mT == sequence) & (at < end.mT)  # [B, T, T]: row t sees key s
        if self.window:
            seen &= at > at.mT - self.window
        by_kv_head = q.float().unflatten(2, (keys.shape[2], -1))  # [B, T, G, H / G, D]
        dots = torch.einsum("btgrd,bsgd->btgrs", by_kv_head, keys.float()).flatten(2, 3)
        weights, _ = weigh(dots, self.scale, self.softcap, sinks, seen[:, :, None])
        weights = weights.masked_fill(~seen.any(-1)[:, :, None, None], 0.0)
        return weights[..., :T], None if sinks is None else weights[..., T]

    def _cached_probabilities(self, q: Tensor, step: Step, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All rows of a sequence at once."""
        cache = step.cache[self.source]
        table, R = step.tables[cache.group].block_table.long(), cache.k.shape[2]
        rows = q.reshape(-1, *q.shape[-2:]).float()
        end = self.row_end(step).long()
        begin = (step.row_pos.long() + 1 - self.window).clamp(min=0) if self.window else torch.zeros_like(end)
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
            shares, _ = weigh(cache.k_codec.dot(rows[mine], keys), self.scale, self.softcap, sinks, seen[:, None])
            weights[mine, :, first:last] = shares[..., : len(at)]
            if sinks is not None:
                to_sinks[mine] = shares[..., -1]
        lead = q.shape[:-2]
        return weights.unflatten(0, lead), None if sinks is None else to_sinks.unflatten(0, lead)

    def extra_repr(self) -> str:
        parts = [f"layer={self.layer}", f"scale={self.scale:g}"]
        parts += [f"window={self.window}"] * bool(self.window) + [f"softcap={self.softcap:g}"] * bool(self.softcap)
        return ", ".join(parts + [f"source={self.source}"] * (self.source != self.layer))
