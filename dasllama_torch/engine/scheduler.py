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
    lengths: Sequence[int],
    max_rows: int,
    whole: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    marks: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[list[Chunk]]:
    """Cut sequences of new tokens into windows of at most max_rows rows, in order, filling each window before the
    next.

    whole: index -> tokens [first, end) of that sequence that must stand in one window; one that they alone exceed is as
    large as they are. marks: index -> tokens behind which a window must end for that sequence, ascending; not if that
    is within `whole`.
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
            inside = (mark for mark in marks.get(index, ()) if start < mark <= stop and not first < mark < end)
            mark = next(inside, None)
            if mark is not None and mark < stop:
                stop, room = mark, mark - start  # others could fill the window, but this sequence goes on in another
            windows[-1].append(Chunk(index, start, stop, stop == length, stop == mark))
            room -= stop - start
            start = stop
    return windows
