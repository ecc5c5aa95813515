"""What one stream of tokens holds in a pool: its pages, its recurrent state, its checkpoints."""

from collections.abc import Callable
from functools import partial

from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.cache.pool import KVPool, PageGroup
from dasllama_torch.errors import CannotRewind


class Sequence:
    """length: how many positions have been evaluated.
    tables[g][b]: the page of group g for positions [b * R, (b + 1) * R), -1 once it has gone back.
    state: slot of the recurrent state, -1 before the first token and where a model has none.
    checkpoints: position -> slot that holds the recurrent state as it was there, -1 where a model has none.
    rewind: how many of the last tokens `truncate` may take back on windowed layers without a checkpoint.
    first[g]: positions of group g before it are gone, even if their page is held: it came from pages of another size.

    A windowed layer's page goes back as soon as no row can come to see it: neither the next one, nor one after `rewind`
    tokens have been taken back, nor one that follows a checkpoint. So such a layer keeps window + rewind tokens, those
    of one forward, and a page. A recurrent state has forgotten what came before: it goes back to a checkpoint only.

    Pages and slots may have other holders: a fork, the state's own checkpoint, a prefix cache. Such ones are never
    written: `grow` takes a copy of what the next rows change, which is the page that they begin in and the recurrent
    state.
    """

    def __init__(self, pool: KVPool, rewind: int = 0):
        self.pool, self.rewind, self.length = pool, rewind, 0
        self.tables: list[list[int]] = [[] for _ in pool.groups]
        self.state = -1
        self.checkpoints: dict[int, int] = {}
        self.first = [0] * len(pool.groups)
        self.torn = False  # a forward has failed after it had changed some of the layers' recurrent states

    def bytes_for(self, start: int, stop: int) -> int:
        """Bytes that a sequence like this one holds while it evaluates positions [start, stop)."""
        pages = (
            group.page_bytes * (self.pool.blocks(stop) - self.first_block(group, start)) for group in self.pool.groups
        )
        return sum(pages) + (1 + len(self.checkpoints)) * self.pool.state_bytes

    def slot(self, group: int, position: int) -> int:
        """Where a layer of the group keeps the position: page * R + row."""
        rows = self.pool.page_rows
        return self.tables[group][position // rows] * rows + position % rows

    def has(self, n: int) -> bool:
        """Whether it holds, and alone, what the next n positions need: `grow` would take nothing."""
        # Asked before every step of a stream: it needs no sum, so it is no call of `_bytes_to`.
        pool, stop, begun = self.pool, self.pool.blocks(self.length + n), self.length % self.pool.page_rows
        for group, table in zip(pool.groups, self.tables, strict=True):
            if len(table) < stop or (begun and not group.pages.is_alone(table[-1])):
                return False
        return not pool.states or (self.state >= 0 and pool.states.is_alone(self.state))

    def grow(self, n: int) -> None:
        """Take what the next n positions need. Raises OutOfPages, which a `Forecast` foretells."""
        stop = self.pool.blocks(self.length + n)
        if self.pool.prefix_tree:
            self.pool.make_room(lambda: self._bytes_to(stop))
        for g, (group, table) in enumerate(zip(self.pool.groups, self.tables, strict=True)):
            if self.length % self.pool.page_rows:
                table[-1] = _own(group.pages, table[-1], partial(self.pool.copy_page, g))
            table += group.pages.take(stop - len(table))
        if self.pool.states and self.state < 0:
            (self.state,) = self.pool.states.take(1)
            self.pool.clear_state(self.state)
        elif self.pool.states:
            self.state = _own(self.pool.states, self.state, self.pool.copy_state)

    def _bytes_to(self, stop: int) -> int:
        """Bytes that `grow` takes for blocks before stop, copies included."""
        needed = 0
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            copies = self.length % self.pool.page_rows and not group.pages.is_alone(table[-1])
            needed += (stop - len(table) + bool(copies)) * group.page_bytes
        if self.pool.states and (self.state < 0 or not self.pool.states.is_alone(self.state)):
            needed += self.pool.state_bytes
        return needed

    def advance(self, n: int) -> None:
        """The next n positions have been evaluated: give back the pages that no row can come to see."""
        self.length += n
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            if not group.window:
                continue
            block = self.first_block(group, self.length) - 1
            while block >= 0 and table[block] >= 0:
                group.pages.give_back([table[block]])
                table[block] = -1
                block -= 1

    def abandon(self) -> None:
        """A forward has failed: give back what `grow` took for it. It may have changed some layers' states."""
        self._cut(self.length)
        self.torn = self.state >= 0

    def checkpoint(self, *, alone: bool = False) -> None:
        """Keep what `truncate` to here needs until a truncate to before it. alone: give up all other checkpoints.

        Raises OutOfPages, CannotRewind if the recurrent state is torn.
        """
        if alone:
            for mark in [mark for mark in self.checkpoints if mark != self.length]:
                self._give_back_slot(self.checkpoints.pop(mark))
        if self.length == 0 or self.length in self.checkpoints:
            return
        slot = -1
        if self.pool.states:
            self.check_whole("keep")
            # Taken here and not by the next `grow`: who asks for it is told that there is no room.
            self.pool.require(self.pool.state_bytes)
            (slot,) = self.pool.states.take(1)
            self.pool.copy_state(self.state, slot)
        self.checkpoints[self.length] = slot

    def first_held(self, group: int) -> int:
        """The first position whose keys a group has."""
        return max(self.first[group], self.tables[group].count(-1) * self.pool.page_rows)

    def extend(self, length: int, first: tuple[int, ...], checkpoints: tuple[int, ...]) -> None:
        """Take, empty so far, what a sequence of `length` positions holds whose groups have their keys from `first` on:
        pages and states that are still to be written. Raises OutOfPages."""
        pool, self.length, self.first = self.pool, length, list(first)
        gone = [position // pool.page_rows for position in first]
        nbytes = [(pool.blocks(length) - n) * group.page_bytes for group, n in zip(pool.groups, gone, strict=True)]
        n_states = 1 + len(checkpoints) if pool.states and length else 0
        pool.require(sum(nbytes) + n_states * pool.state_bytes)
        for group, n, table in zip(pool.groups, gone, self.tables, strict=True):
            table += [-1] * n + group.pages.take(pool.blocks(length) - n)
        states = pool.states.take(n_states) if n_states else [-1] * (1 + len(checkpoints))
        self.state, self.checkpoints = states[0], dict(zip(checkpoints, states[1:], strict=True))

    def fork(self) -> "Sequence":
        """A sequence that holds all that this one does, together with it. Raises CannotRewind if the recurrent state is
        torn."""
        self.check_whole("fork")
        fork = Sequence(self.pool, self.rewind)
        fork.length, fork.state, fork.checkpoints = self.length, self.state, self.checkpoints.copy()
        fork.tables, fork.first = [table.copy() for table in self.tables], self.first.copy()
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            group.pages.share(page for page in table if page >= 0)
        if self.pool.states:
            self.pool.states.share(slot for slot in (self.state, *self.checkpoints.values()) if slot >= 0)
        return fork

    def adopt(self, length: int, tables: list[list[int]], state: int) -> None:
        """Hold what others do of the first `length` positions, together with them, and nothing of one's own before."""
        assert not self.length, "wanted an empty sequence"
        self.length, self.tables, self.state = length, tables, state
        for group, table in zip(self.pool.groups, tables, strict=True):
            group.pages.share(page for page in table if page >= 0)
        if state >= 0:
            self.pool.states.share([state])

    def reachable(self, n: int) -> int:
        """The last position up to n that `truncate` can go back to."""
        marks = sorted((mark for mark in self.checkpoints if mark < n), reverse=True)
        return next((at for at in (n, *marks) if not self._obstacle(at)), 0)

    def _obstacle(self, n: int) -> str:
        """Why the sequence cannot go back to n, or ""."""
        marks = ", ".join(map(str, sorted({0, *self.checkpoints})))
        if self.pool.states and (n < self.length or self.torn) and n not in (0, *self.checkpoints):
            return f"the recurrent state cannot go back from {self.length} to {n}, only to a checkpoint: {marks}"
        for group, table, first in zip(self.pool.groups, self.tables, self.first, strict=True):
            pages = table[self.pool.first_seen(group, n) : self.pool.blocks(n)]
            if pages and (max(0, n - group.window + 1) < first or any(page < 0 for page in pages)):
                return (
                    f"keys that position {n} sees through a window of {group.window} are gone: {self.length} tokens "
                    f"have been evaluated, wanted at most {self.rewind} more than {n}, or a checkpoint: {marks}"
                )
        return ""

    def truncate(self, n: int) -> None:
        """Forget positions n and after. Raises CannotRewind, changing nothing, if that is not exact."""
        if obstacle := self._obstacle(n):
            raise CannotRewind(obstacle)
        back = n < self.length or self.torn
        self._cut(n)
        self.first = [min(first, n) for first in self.first]
        for mark in [mark for mark in self.checkpoints if mark > n]:
            self._give_back_slot(self.checkpoints.pop(mark))
        if self.pool.states and back:
            self._give_back_slot(self.state)
            self.state = -1
            if n:
                self.state = self.checkpoints[n]
                self.pool.states.share([self.state])
        self.length, self.torn = n, False

    def free(self) -> None:
        """Give everything back."""
        self.truncate(0)

    def first_block(self, group: PageGroup, position: int) -> int:
        """The first block that a row at `position`, or at one that it may go back to, sees in a group."""
        return self.pool.first_seen(group, min(position - self.rewind, *self.checkpoints, position))

    def _cut(self, n: int) -> None:
        """Give back the pages of no position before n."""
        stop = self.pool.blocks(n)
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            group.pages.give_back(page for page in table[stop:] if page >= 0)
            del table[stop:]

    def check_whole(self, wanted: str) -> None:
        """Raise CannotRewind if the recurrent state is torn. wanted: what for it is wanted."""
        if self.torn:
            raise CannotRewind(f"there is no state to {wanted} at {self.length}: an evaluation failed half way")

    def _give_back_slot(self, slot: int) -> None:
        if slot >= 0:
            self.pool.states.give_back([slot])


def _own(pages: PageAllocator, page: int, copy: Callable[[int, int], None]) -> int:
    """The page, or in its place a copy if others hold or keep it too."""
    if pages.is_alone(page):
        return page
    (own,) = pages.take(1)
    copy(page, own)
    pages.give_back([page])
    return own
