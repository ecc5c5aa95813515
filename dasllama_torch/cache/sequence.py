"""What one stream of tokens holds in a pool: its pages, its recurrent state, its checkpoints."""

from dasllama_torch.cache.pool import KVPool, PageGroup
from dasllama_torch.errors import CannotRewind


class Sequence:
    """tables[g][b]: the page of group g for positions [b * R, (b + 1) * R), -1 once it has gone back.
    state: slot of the recurrent state, -1 before the first token and where a model has none.
    checkpoints: position -> slot that holds the recurrent state as it was there, -1 where a model has none.
    rewind: how many of the last tokens `truncate` may take back on windowed layers without a checkpoint.

    A windowed layer's page goes back as soon as no row can come to see it: neither the next one, nor one after `rewind`
    tokens have been taken back, nor one that follows a checkpoint. So such a layer keeps window + rewind tokens, those
    of one forward, and a page. A recurrent state has forgotten what came before: it goes back to a checkpoint only.
    """

    def __init__(self, pool: KVPool, rewind: int = 0):
        self.pool, self.rewind = pool, rewind
        self.tables: list[list[int]] = [[] for _ in pool.groups]
        self.state = -1
        self.checkpoints: dict[int, int] = {}
        self.torn = False  # a forward has failed after it had changed some of the layers' recurrent states

    @property
    def held_bytes(self) -> int:
        """Bytes of its pages and slots."""
        pages = [sum(page >= 0 for page in table) for table in self.tables]
        slots = sum(slot >= 0 for slot in (self.state, *self.checkpoints.values()))
        held = sum(n * group.page_bytes for n, group in zip(pages, self.pool.groups, strict=True))
        return held + slots * self.pool.state_bytes

    def bytes_for(self, start: int, stop: int) -> int:
        """Bytes that it holds while positions [start, stop) are evaluated, after a `trim` at start."""
        pages = (group.page_bytes * (self._blocks(stop) - self._first(group, start)) for group in self.pool.groups)
        return sum(pages) + (1 + len(self.checkpoints)) * self.pool.state_bytes

    def slot(self, group: int, position: int) -> int:
        """Where a layer of the group keeps the position: page * R + row."""
        rows = self.pool.page_rows
        return self.tables[group][position // rows] * rows + position % rows

    def grow(self, stop: int) -> None:
        """Take what positions below `stop` still lack."""
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            table += group.pages.take(max(0, self._blocks(stop) - len(table)))
        if self.pool.states and self.state < 0:
            (self.state,) = self.pool.states.take(1)
            self.pool.clear_state(self.state)

    def trim(self, length: int) -> None:
        """Give back the pages that no row can come to see, now that positions below `length` have been evaluated."""
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            block = self._first(group, length) - 1
            while block >= 0 and table[block] >= 0:
                group.pages.give_back([table[block]])
                table[block] = -1
                block -= 1

    def checkpoint(self, length: int) -> None:
        """Keep what `truncate(length)` needs until a truncate to before it; `length` positions have been evaluated.

        Raises OutOfPages, CannotRewind if the recurrent state is torn.
        """
        if length == 0 or length in self.checkpoints:
            return
        slot = -1
        if self.pool.states:
            if self.torn:
                raise CannotRewind(f"there is no state to keep at {length}: an evaluation failed half way")
            self.pool.require(self.pool.state_bytes)
            (slot,) = self.pool.states.take(1)
            self.pool.copy_state(self.state, slot)
        self.checkpoints[length] = slot

    def truncate(self, n: int, length: int) -> None:
        """Forget positions n and after, of `length`. Raises CannotRewind, changing nothing, if that is not exact."""
        if self.pool.states and n not in (0, *self.checkpoints) and (n < length or self.torn):
            marks = ", ".join(map(str, sorted({0, *self.checkpoints})))
            raise CannotRewind(
                f"the recurrent state cannot go back from {length} to {n}, only to a checkpoint: {marks}"
            )
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            oldest = max(0, n - group.window + 1) // self.pool.page_rows if group.window else 0
            if any(page < 0 for page in table[oldest : self._blocks(n)]):
                raise CannotRewind(
                    f"keys that position {n} sees through a window of {group.window} are gone: {length} tokens have "
                    f"been evaluated, wanted at most {self.rewind} more than {n}, or a checkpoint"
                )
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            group.pages.give_back([page for page in table[self._blocks(n) :] if page >= 0])
            del table[self._blocks(n) :]
        for mark in [mark for mark in self.checkpoints if mark > n]:
            self._give_back_slot(self.checkpoints.pop(mark))
        if n == 0:
            self._give_back_slot(self.state)
            self.state = -1
        elif self.pool.states and n in self.checkpoints:
            self.pool.copy_state(self.checkpoints[n], self.state)
        self.torn = False

    def free(self) -> None:
        """Give everything back."""
        self.truncate(0, 0)

    def _blocks(self, n: int) -> int:
        return -(-n // self.pool.page_rows)

    def _first(self, group: PageGroup, position: int) -> int:
        """The first block that a row at `position`, or at one that it may go back to, sees in a group."""
        if not group.window:
            return 0
        oldest = min(position - self.rewind, *self.checkpoints, position)
        return max(0, oldest - group.window + 1) // self.pool.page_rows

    def _give_back_slot(self, slot: int) -> None:
        if slot >= 0:
            self.pool.states.give_back([slot])
