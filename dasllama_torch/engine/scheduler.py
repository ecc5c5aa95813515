"""Which tokens are evaluated together. No torch: plans over integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(slots=True)
class Chunk:
    """Tokens [start, stop) of the sequence at `index` in the batch; last: none of that sequence follow."""

    index: int
    start: int
    stop: int
    last: bool


def plan_windows(
    lengths: Sequence[int], max_rows: int, whole: Mapping[int, tuple[int, int]] = MappingProxyType({})
) -> list[list[Chunk]]:
    """Cut sequences of new tokens into windows of at most max_rows rows, in order, filling each window before the
    next.

    whole: index -> tokens [first, end) of that sequence that must stand in one window; one that they alone exceed is as
    large as they are.
    """
    windows: list[list[Chunk]] = []
    room = 0
    for index, length in enumerate(lengths):
        start = 0
        first, end = whole.get(index, (length, length))
        while start < length:
            if not room or (start == first and room < end - first):
                windows.append([])
                room = max(max_rows, end - first if start == first else 0)
            stop = min(length, start + room)
            if start < first < stop < end:
                stop = first
            windows[-1].append(Chunk(index, start, stop, stop == length))
            room -= stop - start
            start = stop
    return windows
