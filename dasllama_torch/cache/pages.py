"""Which page belongs to whom. No torch: an allocator of integers."""

from dasllama_torch.errors import OutOfPages


class PageAllocator:
    """Hands out page numbers below `capacity`; the most recently freed first, so that touched memory is used again."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._free: list[int] = []
        self._next = 0  # pages from here on were never handed out

    @property
    def in_use(self) -> int:
        return self._next - len(self._free)

    def take(self, n: int) -> list[int]:
        """n pages, or OutOfPages and none."""
        available = self.capacity - self.in_use
        if n > available:
            raise OutOfPages(f"the KV pool has {available} of {self.capacity} pages left, wanted {n}")
        reused = [self._free.pop() for _ in range(min(n, len(self._free)))]
        fresh = n - len(reused)
        self._next += fresh
        return reused + list(range(self._next - fresh, self._next))

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)
