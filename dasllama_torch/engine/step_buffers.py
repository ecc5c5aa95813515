"""What the engine's repeated steps of single rows read and write: a Step whose tensors stay where they are, and memory
for logits that is handed out as it is."""

import math
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.step import PageTable, Step

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool
    from dasllama_torch.engine.session import Session


class StepBuffers:
    """The step of a forward of at most `rows` sessions, a row each, that hold at most `blocks` pages of a kind.

    step: its tensors are parts of one piece of memory, which a `write` sends to the pool's device in one copy; on the
    CPU it is written where it lies.
    """

    def __init__(self, pool: "KVPool", rows: int, blocks: int):
        groups = range(len(pool.groups))
        numbers = {"input_ids": torch.int64, "positions": torch.int64, "row_context": torch.int64}  # one of each row
        numbers |= {"row_seq": torch.int32, "row_pos": torch.int32, "row_end": torch.int32}
        if pool.states:
            numbers["state_slots"] = torch.int32
        numbers |= {f"slots{group}": torch.int64 for group in groups}
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((1, rows) if name == "input_ids" else (rows,), dtype) for name, dtype in numbers.items()
        }
        fields |= {f"block_table{group}": ((rows, blocks), torch.int32) for group in groups}
        places, end = {}, 0
        for name, (shape, dtype) in fields.items():
            places[name], end = end, end + -(-math.prod(shape) * dtype.itemsize // 16) * 16  # each begins aligned
        on_cpu = pool.device.type == "cpu"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=not on_cpu)
        self._there = self._host if on_cpu else torch.empty(end, dtype=torch.uint8, device=pool.device)
        self._sent = None if on_cpu else torch.cuda.Event()
        self._is_sending = False

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[places[name] : places[name] + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for name, (shape, dtype) in fields.items()
            }

        # All numbers of a step go into its memory by one call: each more would find its own code swept from the caches.
        self._memory = memoryview(self._host.numpy())
        wide = {torch.int64: "q", torch.int32: "i"}
        layout = "".join(f"{rows}{wide[dtype]}{-rows * dtype.itemsize % 16}x" for dtype in numbers.values())
        self._numbers = struct.Struct("=" + layout)
        host = views(self._host)
        self._tables = [host[f"block_table{group}"].numpy() for group in groups]
        self._held: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in groups]
        parts = views(self._there)
        tables = [
            PageTable(slots=parts.pop(f"slots{group}"), block_table=parts.pop(f"block_table{group}"))
            for group in groups
        ]
        self.step = Step(n_seqs=rows, cache=pool, tables=tuple(tables), logit_rows=None, **parts)  # all rows' logits
        self.blocks, self._devices = blocks, pool.devices

    def fits(self, sessions: Sequence["Session"]) -> bool:
        """Whether there is room for all their pages, and the pool has not moved."""
        if self.step.cache.devices is not self._devices:
            return False
        for session in sessions:
            for table in session.sequence.tables:
                if len(table) > self.blocks:
                    return False
        return True

    def write(self, sessions: Sequence["Session"], ids: Sequence[int], waits: bool = True) -> None:
        """Make the step that of these rows, ids[i] at the end of sessions[i]; the rest become inert. waits: the caller
        waits for the step before it writes the next one; otherwise that does, until this one has been sent."""
        n, page_rows = len(ids), self.step.cache.page_rows
        none = self.step.n_seqs - n
        nowhere, zeros = [-1] * none, [0] * none
        if self._is_sending:
            self._sent.synchronize()
            self._is_sending = False
        at, positions, contexts, ends, states = [], [], [], [], []
        for session in sessions:
            end = len(session.tokens)
            at.append(end)
            ends.append(end + 1)
            positions.append(end + session.rope_delta)
            contexts.append(session.n_ctx)
            states.append(session.sequence.state)
        numbers = [*ids, *zeros, *positions, *zeros, *contexts, *zeros, *range(n), *nowhere, *at, *zeros, *ends, *zeros]
        if self.step.state_slots is not None:
            numbers += *states, *nowhere
        for group, (table, held) in enumerate(zip(self._tables, self._held, strict=True)):
            for i, session in enumerate(sessions):
                pages = session.sequence.tables[group]
                if held[i] != pages:
                    table[i, : len(pages)] = pages
                    held[i] = pages.copy()
                numbers.append(pages[at[i] // page_rows] * page_rows + at[i] % page_rows)
            numbers += nowhere
        self._numbers.pack_into(self._memory, 0, *numbers)
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
            if not waits:
                self._sent.record()
                self._is_sending = True


class HandedOut:
    """Rows f32 [V] of logits [n, V] on the CPU, made once and handed out as they are: a call of torch costs more than a
    copy would, after weights have swept the caches. They are written again once nobody can see them any more."""

    def __init__(self, logits: Tensor):
        with torch.inference_mode(False):  # what is handed out may be changed in place
            self.rows = [torch.from_numpy(row) for row in logits.numpy()]
        self._storages = [row.untyped_storage() for row in self.rows]
        self._alone = self._holders()

    @property
    def is_free(self) -> bool:
        """Whether nobody else has one of the rows, its storage or another tensor of that."""
        return self._holders() == self._alone

    def _holders(self) -> list[tuple[int, int, int]]:
        return [
            (sys.getrefcount(row), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata))
            for row, storage in zip(self.rows, self._storages, strict=True)
        ]
