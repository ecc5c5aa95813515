"""What the engine's repeated steps of single rows read and write: a Step whose tensors stay where they are, and memory
for logits that is handed out as it is."""

import math
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
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((1, rows), torch.int64),
            "positions": ((rows,), torch.int64),
            "row_context": ((rows,), torch.int64),
            "row_seq": ((rows,), torch.int32),
            "row_pos": ((rows,), torch.int32),
            "row_end": ((rows,), torch.int32),
        }
        if pool.states:
            fields["state_slots"] = (rows,), torch.int32
        for group in range(len(pool.groups)):
            fields[f"slots{group}"] = (rows,), torch.int64
            fields[f"block_table{group}"] = (rows, blocks), torch.int32
        places, end = {}, 0
        for name, (shape, dtype) in fields.items():
            places[name], end = end, end + -(-math.prod(shape) * dtype.itemsize // 16) * 16  # each begins aligned
        on_cpu = pool.device.type == "cpu"
        # NumPy writes a step in microseconds, with nothing of torch in between.
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=not on_cpu)
        self._there = self._host if on_cpu else torch.empty(end, dtype=torch.uint8, device=pool.device)
        self._sent = None if on_cpu else torch.cuda.Event()
        self._is_sending = False

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[places[name] : places[name] + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for name, (shape, dtype) in fields.items()
            }

        self.rows = {name: tensor.numpy() for name, tensor in views(self._host).items()}
        self.rows["row_seq"][:] = -1
        parts = views(self._there)
        tables = [
            PageTable(slots=parts.pop(f"slots{group}"), block_table=parts.pop(f"block_table{group}"))
            for group in range(len(pool.groups))
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
        n, rows, page_rows = len(ids), self.rows, self.step.cache.page_rows
        if self._is_sending:
            self._sent.synchronize()
            self._is_sending = False
        if n < len(rows["row_seq"]):
            for name, values in rows.items():
                if name == "input_ids":
                    values[0, n:] = 0
                elif not name.startswith("block_table"):
                    values[n:] = 0 if name in ("positions", "row_context", "row_pos", "row_end") else -1
        for i, (session, token) in enumerate(zip(sessions, ids, strict=True)):
            at, sequence = len(session.tokens), session.sequence
            rows["input_ids"][0, i], rows["row_seq"][i] = token, i
            rows["positions"][i], rows["row_pos"][i] = at + session.rope_delta, at
            rows["row_end"][i], rows["row_context"][i] = at + 1, session.n_ctx
            if "state_slots" in rows:
                rows["state_slots"][i] = sequence.state
            for group, pages in enumerate(sequence.tables):
                rows[f"block_table{group}"][i, : len(pages)] = pages
                rows[f"slots{group}"][i] = pages[at // page_rows] * page_rows + at % page_rows
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
