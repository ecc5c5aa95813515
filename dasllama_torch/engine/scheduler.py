"""Which tokens are evaluated together. No torch: plans over integers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Chunk:
    """Tokens [start, stop) of the sequence at `index` in the batch; last: none of that sequence follow."""

    index: int
    start: int
    stop: int
    last: bool


def plan_windows(lengths: Sequence[int], max_rows: int) -> list[list[Chunk]]:
    """Cut sequences of new tokens into windows of at most max_rows rows, in order, filling each window before the
    next.
    """
    windows: list[list[Chunk]] = []
    room = 0
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                windows.append([])
                room = max_rows
            stop = min(length, start + room)
            windows[-1].append(Chunk(index, start, stop, stop == length))
            room -= stop - start
            start = stop
    return windows
