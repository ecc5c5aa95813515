"""Which tokens are evaluated together. No torch: plans over integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(slots=True)
class Chunk:
    """Tokens [start, stop) of the sequence at `index` in the batch; last: none of that sequence follow. marked: it ends
    at a mark of the sequence."""

    index: int
    start: int
    stop: int
    last: bool
    marked: bool = False


def plan_windows(
    lengths: Sequence[int], max_rows: int, marks: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> list[list[Chunk]]:
    """Cut sequences of new tokens into windows of at most max_rows rows, in order, filling each window before the
    next.

    marks: index -> tokens behind which a window must end for that sequence, ascending.
    """
    windows: list[list[Chunk]] = []
    room = 0
    for index, length in enumerate(lengths):
        start, wanted = 0, marks.get(index, ())
        while start < length:
            if not room:
                windows.append([])
                room = max_rows
            end = min(length, start + room)
            stop = next((mark for mark in wanted if start < mark <= end), end)
            windows[-1].append(Chunk(index, start, stop, stop == length, stop in wanted))
            room = room - (stop - start) if stop == end else 0
            start = stop
    return windows
