"""Which page belongs to whom. No torch: an allocator of integers."""

from collections.abc import Iterable

from dasllama_torch.errors import OutOfPages


class PageAllocator:
    """Hands out page numbers below `capacity` and counts the holders of each. A page without a holder is free; the most
    recently freed go out first, so that touched memory is used again."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._free: list[int] = []
        self._holders: list[int] = []  # of each page that was ever handed out

    @property
    def in_use(self) -> int:
        """How many pages have a holder."""
        return len(self._holders) - len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, n: int) -> list[int]:
        """n pages with one holder each, or OutOfPages and none."""
        available = self.capacity - self.in_use
        if n > available:
            raise OutOfPages(f"the KV pool has {available} of {self.capacity} pages left, wanted {n}")
        reused = [self._free.pop() for _ in range(min(n, len(self._free)))]
        for page in reused:
            self._holders[page] = 1
        fresh = range(len(self._holders), len(self._holders) + n - len(reused))
        self._holders += [1] * len(fresh)
        return [*reused, *fresh]

    def share(self, pages: Iterable[int]) -> None:
        """Each page, which is not free, gets one more holder."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Each page loses a holder."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
