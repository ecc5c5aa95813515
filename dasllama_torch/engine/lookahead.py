"""The next step of a stream on a GPU, or of several together, begun with tokens that the host has not seen yet: while
that looks whether a text ends, the GPU goes on. Should one end, or its session do something else, the step has changed
nothing that counts: a row of keys and values behind those of the session, where its next one will stand. Where some of
several have ended, the others go on with a step of more rows than a new one would have: equal to rounding."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.device_memory import HostNumbers
from dasllama_torch.engine import graphs
from dasllama_torch.sampling import SamplingParams

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session


@dataclass
class Ahead:
    """A step that was begun behind all that a session holds. token: which it evaluates, None until the host knows.
    logits: f32 [V], on the GPU once it is done. in_force: whether it still does what the modules would, for some of the
    sessions; one function for all that it was begun for."""

    logits: Tensor
    in_force: Callable[[Sequence["Session"]], bool]
    token: int | None = None


def is_possible(logits: Tensor) -> bool:
    """Whether who has made logits can begin with what follows from them."""
    return logits.device.type == "cuda"


def draw(sessions: Sequence["Session"], params: SamplingParams, ahead: bool) -> list[int]:
    """The next token of each of the sessions, which share a pool, from their logits f32 [V] on a GPU. ahead: the step
    of all of them is begun, where one stands ready."""
    rows = [session.made_logits for session in sessions]
    histories, generators = [session.history for session in sessions], [session.generator for session in sessions]
    if len(sessions) > 1:
        tokens = sampling.draw_together(rows, histories, params, generators)
    else:
        tokens = sampling.draw(rows[0], histories[0], params, generators[0])[None]
    arrival = _sent(sessions, tokens)
    for session in sessions:  # what is begun takes the place of what was, whether or not it comes to be used
        session.ahead = None
    begun = None
    try:
        if ahead:
            begun = _begin(sessions, tokens)
    finally:  # they come whatever happens
        known = arrival()
    found = [
        sampling.checked(token, logits, history, params)
        for token, logits, history in zip(known, rows, histories, strict=True)
    ]
    for session, token, after in zip(sessions, found, begun or (), strict=bool(begun)):
        session.ahead, after.token = after, token
    return found


class Arrival:
    """The way of up to n tokens from a GPU to the host, again and again."""

    def __init__(self, device: torch.device, n: int):
        self.device, self.n = device, n
        self._known, self._arrived = HostNumbers(n), torch.cuda.Event()

    def send(self, tokens: Tensor) -> None:
        self._known.write(tokens)
        self._arrived.record()

    def wait(self, n: int) -> list[int]:
        """The n tokens that were sent last; for nothing that is begun later."""
        self._arrived.synchronize()
        return self._known.memory[:n].tolist()


def _sent(sessions: Sequence["Session"], tokens: Tensor) -> Callable[[], list[int]]:
    """Tokens int64 [n] are on their way to the host: what waits for them."""
    first, n = sessions[0], len(sessions)
    with torch.cuda.device(tokens.device):
        if first.arrival is None or first.arrival.device != tokens.device or first.arrival.n < n:
            first.arrival = Arrival(tokens.device, n)
        first.arrival.send(tokens)
    return functools.partial(first.arrival.wait, n)


def _begin(sessions: Sequence["Session"], tokens: Tensor) -> list[Ahead] | None:
    if sessions[0].pool.states:  # what a step does to a recurrent state cannot be taken back
        return None
    if not all(session.stands_ready for session in sessions):
        return None
    if (begun := graphs.begin(sessions, tokens)) is None:
        return None
    rows, in_force = begun
    return [Ahead(logits, in_force) for logits in rows]


def take(sessions: Sequence["Session"], tokens: Sequence[int]) -> list[Tensor] | None:
    """What was begun for these sessions together, or for these and others, with these tokens behind what each holds, if
    it is still that: their rows of logits."""
    found = [session.ahead for session in sessions]
    for session in sessions:
        session.ahead = None
    in_force = found[0] and found[0].in_force
    for ahead, token in zip(found, tokens, strict=True):
        if not ahead or ahead.token != token or ahead.in_force is not in_force:
            return None
    return [ahead.logits for ahead in found] if in_force(sessions) else None
