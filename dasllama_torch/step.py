"""Step: what one forward may know about its batch.

Tokens of all sequences form one ragged batch of T rows. Prefill, decode, several sessions, several prompts' chunks in
one window, a padded HF-style batch: one code path, told apart only by the tensors below. A row with `row_seq` -1 is
inert: it writes nothing, is attended by nothing and yields zeros; it stands for padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool


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

    positions: int64 [T], what rotary tables are computed from; or [T, A] for M-RoPE: time, height, width. Text has the
    same position on all axes, so [T] serves it.
    row_seq: int32 [T], sequence of each row (a row of each `block_table` if there is a cache), -1 for an inert row.
    row_pos: int32 [T], index of the row's key in its sequence.
    row_end: int32 [T], number of keys that the row may see: row_pos + 1 if causal, the span's end in a non-causal span.
    causal_end: int32 [T], row_pos + 1 for layers that stay causal in such a span; None: the step has none.
    n_seqs: S.
    cache: the pool that pages and states belong to; None: the rows attend to each other only, from empty states.
    tables: by group of the cache's layers.
    state_slots: int32 [T], slot of the recurrent state of each row's sequence, -1 for an inert row. None without a
    cache of recurrent layers.
    logit_rows: int64 [n], rows whose logits are wanted; None: all.
    row_context: int64 [T], tokens that the row's sequence may come to hold: a session's n_ctx, or without a cache the
    tokens in hand. LongRoPE chooses its frequencies by it, so that they are the same for all tokens of a session.
    input_ids: int64, ids of the rows in the shape [B, T] of the forward. Where embeddings came in their place, the id
    that stands for them in a layer's own tables; None: there is none.
    sessions: whose the sequences are, for those who watch a forward; () where they are nobody's.
    """

    positions: Tensor
    row_seq: Tensor
    row_pos: Tensor
    row_end: Tensor
    n_seqs: int
    causal_end: Tensor | None = None
    cache: KVPool | None = None
    tables: tuple[PageTable, ...] = ()
    state_slots: Tensor | None = None
    logit_rows: Tensor | None = None
    row_context: Tensor | None = None
    input_ids: Tensor | None = None
    sessions: tuple[Any, ...] = ()
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # without a cache: of layers that others read
    _once: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def padded(batch: int, length: int, attention_mask: Tensor | None, position_ids: Tensor | None, device) -> Step:
        """The step of an HF-style batch without a cache: input [batch, length], left or right padding.

        attention_mask: [batch, length], 0 marks padding; None: no padding.
        position_ids: [batch, length] or [1, length] rotary positions, or [A, batch, length] for M-RoPE; None:
        0 ... length-1 whatever the padding, as in HF.
        """
        index = torch.arange(length, device=device).expand(batch, length)
        sequence = torch.arange(batch, device=device).unsqueeze(1).expand(batch, length)
        if attention_mask is not None:
            if attention_mask.shape not in ((batch, length), (1, length)):
                raise ValueError(f"attention_mask is {list(attention_mask.shape)}, wanted {[batch, length]}")
            sequence = torch.where(attention_mask.bool(), sequence, -1)
        positions = index if position_ids is None else position_ids
        positions = positions.to(torch.int64).expand(*positions.shape[:-2], batch, length)
        in_hand = positions.reshape(-1, batch, length).amax((0, 2)) + 1  # [batch]
        row_pos = index.reshape(-1).to(torch.int32)
        return Step(
            positions=positions.flatten(-2).movedim(-1, 0),
            row_seq=sequence.reshape(-1).to(torch.int32),
            row_pos=row_pos,
            row_end=row_pos + 1,
            n_seqs=batch,
            row_context=in_hand.repeat_interleave(length),
        )

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` computes, for the first layer that asks; the others of this forward share it by `key`."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def on(self, device: torch.device) -> Step:
        """This step with its tensors on a device, for layers that lie there: made for the first of a forward."""
        if device == self.positions.device:
            return self

        def moved(value):
            if isinstance(value, Tensor):
                return value.to(device)
            return PageTable(moved(value.slots), moved(value.block_table)) if isinstance(value, PageTable) else value

        def make() -> Step:
            facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "_once"}
            tables = tuple(map(moved, self.tables))
            return Step(**{name: moved(value) for name, value in facts.items()} | {"tables": tables})

        return self.once(f"on {device}", make)

    def inert(self) -> Step:
        """A step of as many rows and sequences with pages as wide, all of whose rows are inert."""
        nowhere = {"row_seq": torch.full_like(self.row_seq, -1), "sessions": (), "kv": {}, "_once": {}}
        if self.state_slots is not None:
            nowhere["state_slots"] = torch.full_like(self.state_slots, -1)
        tables = tuple(PageTable(torch.full_like(each.slots, -1), each.block_table) for each in self.tables)
        return replace(self, tables=tables, **nowhere)

    def forget(self) -> None:
        """The tensors are about to change, for another forward: what layers have shared does not hold for it."""
        self._once.clear()
