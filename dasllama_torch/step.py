"""Step: what one forward may know about its batch.

Tokens of all sequences form one ragged batch of T rows. Prefill, decode, several sessions, several prompts' chunks in
one window, a padded HF-style batch: one code path, told apart only by the tensors below. A row with `row_seq` -1 is
inert: it writes nothing, is attended by nothing and yields zeros; it stands for padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.ops.rope_tables import rope_tables

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool
    from dasllama_torch.config import RopeSpec


@dataclass(frozen=True)
class PageTable:
    """Where the layers of one group of `KVPool.groups` keep keys and values: pages of R rows, at most B a sequence.

    slots: int64 [T], page * R + row where those of each row are written, -1 for an inert row.
    block_table: int32 [S, B], pages of each sequence in order, -1 where a window has left them behind.
    """

    slots: Tensor
    block_table: Tensor


@dataclass
class Step:
    """T rows of S sequences; rows of one sequence stand in the order of their positions.

    positions: int64 [T], what rotary tables are computed from.
    row_seq: int32 [T], sequence of each row (a row of each `block_table` if there is a cache), -1 for an inert row.
    row_pos: int32 [T], index of the row's key in its sequence.
    row_end: int32 [T], number of keys that the row may see: row_pos + 1 if causal, the span's end in a non-causal span.
    n_seqs: S.
    cache: the pool that pages and states belong to; None: the rows attend to each other only, from empty states.
    tables: by group of the cache's layers.
    state_slots: int64 [T], slot of the recurrent state of each row's sequence, -1 for an inert row. None without a
    cache of recurrent layers.
    logit_rows: int64 [n], rows whose logits are wanted; None: all.
    """

    positions: Tensor
    row_seq: Tensor
    row_pos: Tensor
    row_end: Tensor
    n_seqs: int
    cache: KVPool | None = None
    tables: tuple[PageTable, ...] = ()
    state_slots: Tensor | None = None
    logit_rows: Tensor | None = None
    _tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def padded(batch: int, length: int, attention_mask: Tensor | None, position_ids: Tensor | None, device) -> Step:
        """The step of an HF-style batch without a cache: input [batch, length], left or right padding.

        attention_mask: [batch, length], 0 marks padding; None: no padding.
        position_ids: [batch, length] or [1, length] rotary positions; None: 0 ... length-1 whatever the padding, as in
        HF.
        """
        index = torch.arange(length, device=device).expand(batch, length)
        sequence = torch.arange(batch, device=device).unsqueeze(1).expand(batch, length)
        if attention_mask is not None:
            sequence = torch.where(attention_mask.bool(), sequence, -1)
        positions = index if position_ids is None else position_ids.expand(batch, length)
        row_pos = index.reshape(-1).to(torch.int32)
        return Step(
            positions=positions.reshape(-1).to(torch.int64),
            row_seq=sequence.reshape(-1).to(torch.int32),
            row_pos=row_pos,
            row_end=row_pos + 1,
            n_seqs=batch,
        )

    def rope_tables(self, key: str, spec: RopeSpec, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, f32 [T, spec.dim / 2], of a table: computed by the first layer that asks, then shared by
        `key`.
        """
        if key not in self._tables:
            self._tables[key] = rope_tables(self.positions, inv_freq, spec.attention_factor)
        return self._tables[key]
