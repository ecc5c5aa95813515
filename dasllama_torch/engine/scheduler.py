"""Which tokens are evaluated together. No torch: plans over integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of the sequence at `index` in the batch; last: none of that sequence follow."""

    index: int
    start: int
    stop: int
    last: bool


def plan_windows(
    lengths: Sequence[int], max_rows: int, cuts: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> list[list[Chunk]]:
    """Cut sequences of new tokens into windows of at most max_rows rows, in order, filling each window before the
    next.

    cuts: index -> tokens behind which a window must end for that sequence, in order.
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
            cut = next((cut for cut in cuts.get(index, ()) if start < cut < stop), None)
            if cut:  # other sequences could fill the window up, this one begins another
                stop, room = cut, cut - start
            windows[-1].append(Chunk(index, start, stop, stop == length))
            room -= stop - start
            start = stop
    return windows
