"""Which rows of a forward are meant: by position, and by session."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dasllama_torch.step import Step

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session

Positions = int | slice | Iterable[int] | None


@dataclass(frozen=True)
class Rows:
    """positions: a slice of them, these, or None for all. sessions: these only; None: all."""

    positions: slice | tuple[int, ...] | None
    sessions: tuple[Any, ...] | None

    @staticmethod
    def of(positions: Positions, sessions: "Session | Iterable[Session] | None") -> "Rows":
        """positions: a sequence's own, from 0: one, several, or a slice, which may be open (5: and all that follow).
        Raises ValueError for a negative one: a stream has no end to count from."""
        if isinstance(positions, slice):
            wanted: slice | tuple[int, ...] | None = positions
            numbers = [n for n in (positions.start, positions.stop, positions.step) if n is not None]
        else:
            one = isinstance(positions, int) and not isinstance(positions, bool)
            wanted = None if positions is None else (positions,) if one else tuple(map(int, positions))
            numbers = wanted or ()
        if any(n < 0 for n in numbers):
            raise ValueError(f"positions are {positions!r}, wanted 0 or more: a stream has no end to count from")
        if sessions is not None:
            sessions = tuple(sessions) if isinstance(sessions, Iterable) else (sessions,)
        return Rows(wanted, sessions)

    def mask(self, step: Step) -> Tensor:
        """bool [R]: which rows of the step are meant; inert ones never are."""
        position = step.row_pos.long()
        chosen = step.row_seq >= 0
        if isinstance(self.positions, slice):
            start, stop, stride = self.positions.start or 0, self.positions.stop, self.positions.step or 1
            chosen &= (position >= start) & ((position - start) % stride == 0)
            if stop is not None:
                chosen &= position < stop
        elif self.positions is not None:
            chosen &= torch.isin(position, torch.tensor(self.positions, dtype=torch.int64, device=position.device))
        if self.sessions is not None:
            present = [i for i, session in enumerate(step.sessions) if any(session is one for one in self.sessions)]
            chosen &= torch.isin(step.row_seq.long(), torch.tensor(present, dtype=torch.int64, device=position.device))
        return chosen
