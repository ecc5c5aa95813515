"""Which page belongs to whom. No torch: an allocator of integers."""

from collections.abc import Callable, Iterable

from dasllama_torch.errors import OutOfPages


class PageAllocator:
    """Hands out page numbers below `capacity` and counts the holders of each. A cache may keep a page for whoever comes
    to want it. A page that is neither held nor kept is free; the most recently freed go out first, so that touched
    memory is used again.

    spare: how many pages are kept and have no holder. backing: called with each page before it goes out, where memory
    has to be put behind it; what one of these raises keeps all pages in.
    """

    def __init__(self, capacity: int):
        self.capacity, self.spare = capacity, 0
        self._free: list[int] = []
        self._holders: list[int] = []  # of each page that was ever handed out
        self._kept: set[int] = set()
        self.backing: list[Callable[[int], None]] = []

    @property
    def in_use(self) -> int:
        """How many pages are not free."""
        return len(self._holders) - len(self._free)

    def free_runs(self) -> list[tuple[int, int]]:
        """The free pages that were handed out before, as runs [first, end)."""
        runs: list[tuple[int, int]] = []
        for page in sorted(self._free):
            first = runs.pop()[0] if runs and runs[-1][1] == page else page
            runs.append((first, page + 1))
        return runs

    def used_runs(self) -> list[tuple[int, int]]:
        """The pages that are not free, likewise."""
        ends = [0, *(at for run in self.free_runs() for at in run), len(self._holders)]
        return [(first, end) for first, end in zip(ends[::2], ends[1::2], strict=True) if first < end]

    def holders(self, page: int) -> int:
        return self._holders[page]

    def is_alone(self, page: int) -> bool:
        """Whether the page's holder may write to it: there is no other, and no cache keeps it."""
        return self._holders[page] == 1 and page not in self._kept

    def take(self, n: int) -> list[int]:
        """n pages with one holder each, or OutOfPages and none."""
        available = self.capacity - self.in_use
        if n > available:
            raise OutOfPages(f"the KV pool has {available} of {self.capacity} pages left, wanted {n}")
        kept = max(0, len(self._free) - n)
        reused = self._free[kept:][::-1]
        fresh = range(len(self._holders), len(self._holders) + n - len(reused))
        for back in self.backing:
            for page in (*reused, *fresh):
                back(page)
        del self._free[kept:]
        for page in reused:
            self._holders[page] = 1
        self._holders += [1] * len(fresh)
        return [*reused, *fresh]

    def share(self, pages: Iterable[int]) -> None:
        """Each page, which is not free, gets one more holder."""
        for page in pages:
            assert self._holders[page] > 0 or page in self._kept, f"page {page} is free"
            self.spare -= not self._holders[page]
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Each page loses a holder."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._kept:
                    self.spare += 1
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The page, which has a holder and is not kept, outlives its holders until `drop`."""
        assert self._holders[page] > 0, f"page {page} is free"
        assert page not in self._kept, f"page {page} is kept already"
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """The page is kept no longer."""
        self._kept.remove(page)
        if not self._holders[page]:
            self.spare -= 1
            self._free.append(page)
