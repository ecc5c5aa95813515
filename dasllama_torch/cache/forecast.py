"""What a batch will take from a pool, reckoned before anything is evaluated. No torch."""

from collections import Counter

from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.sequence import Sequence


class Forecast:
    """Goes through the forwards of a batch as the engine will, and changes nothing.

    For each forward: `grow` for each of its sequences, then `advance` for each, with the positions [start, stop) that
    it evaluates. most: bytes beyond those in use now that the pool must be able to hand out. A prefix cache is reckoned
    to keep nothing, since it gives back what sessions need.
    """

    def __init__(self, pool: KVPool):
        self.pool, self.most = pool, 0
        self._now = 0
        self._left: Counter[tuple[PageAllocator, int]] = Counter()  # how many holders a page will have lost

    def grow(self, sequence: Sequence, start: int, stop: int) -> None:
        goes_on = start == sequence.length  # later forwards write where this batch itself has written
        for group, table in zip(self.pool.groups, sequence.tables, strict=True):
            pages = self.pool.blocks(stop) - self.pool.blocks(start)
            if goes_on and start % self.pool.page_rows:
                pages += self._copies(group.pages, table[-1])
            self._now += pages * group.page_bytes
        states = self.pool.states
        if states and goes_on and (sequence.state < 0 or self._copies(states, sequence.state)):
            self._now += self.pool.state_bytes
        self.most = max(self.most, self._now)

    def advance(self, sequence: Sequence, start: int, stop: int) -> None:
        written = sequence.length // self.pool.page_rows  # pages of this block and later ones are the sequence's own
        for group, table in zip(self.pool.groups, sequence.tables, strict=True):
            for block in range(sequence.first_block(group, start), sequence.first_block(group, stop)):
                if block >= written:
                    self._now -= group.page_bytes
                elif table[block] >= 0:
                    page = group.pages, table[block]
                    self._left[page] += 1
                    if self._left[page] == group.pages.holders(table[block]):
                        self._now -= group.page_bytes

    def _copies(self, pages: PageAllocator, page: int) -> bool:
        """Whether who writes to the page will have to leave it to others, and take a copy."""
        copies = pages.holders(page) - self._left[pages, page] > 1
        self._left[pages, page] += copies
        return copies
