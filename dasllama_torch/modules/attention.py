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
    ) -> Tensor:
        """The weights f32 [B, H, T, T] of the values, for a forward without a cache: q [B, T, H, D], k [B, T, G, D].

        By the formula, in f32, as transformers' eager attention has them: what a sink takes is missing from a row's
        sum. Rows of padding are zeros.
        """
        keys = step.kv[self.source][0] if k is None else k
        B, T, _, _ = q.shape
        sequence, at, end = (each.view(B, 1, T) for each in (step.row_seq, step.row_pos, self.row_end(step)))
        seen = (sequence >= 0) & (sequence.mT == sequence) & (at < end.mT)  # [B, T, T]: row t sees key s
        if self.window:
            seen &= at > at.mT - self.window
        by_kv_head = q.float().unflatten(2, (keys.shape[2], -1))  # [B, T, G, H / G, D]
        dots = torch.einsum("btgrd,bsgd->btgrs", by_kv_head, keys.float()).flatten(2, 3)
        weights, _ = weigh(dots, self.scale, self.softcap, sinks, seen[:, :, None])
        return weights[..., :T].transpose(1, 2).masked_fill(~seen.any(-1)[:, None, :, None], 0.0)

    def extra_repr(self) -> str:
        parts = [f"layer={self.layer}", f"scale={self.scale:g}"]
        parts += [f"window={self.window}"] * bool(self.window) + [f"softcap={self.softcap:g}"] * bool(self.softcap)
        return ", ".join(parts + [f"source={self.source}"] * (self.source != self.layer))
