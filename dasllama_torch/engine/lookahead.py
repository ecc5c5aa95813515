"""The next step of a stream on a GPU, begun with a token that the host has not seen yet: while that looks whether the
text ends, the GPU goes on. Should it end, or the session do something else, the step has changed nothing that counts: a
row of keys and values behind those of the session, where its next one will stand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.device_memory import HostNumber
from dasllama_torch.engine import graphs
from dasllama_torch.sampling import SamplingParams

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session


@dataclass
class Ahead:
    """A step that was begun behind all that a session holds. token: which it evaluates, None until the host knows.
    logits: f32 [V], on the GPU once it is done. in_force: whether it still does what the modules would."""

    logits: Tensor
    in_force: Callable[[], bool]
    token: int | None = None


def is_possible(logits: Tensor) -> bool:
    """Whether who has made logits can begin with what follows from them."""
    return logits.device.type == "cuda"


def draw(session: "Session", logits: Tensor, params: SamplingParams) -> int:
    """The next token, from logits f32 [V] on a GPU, whose step is begun where one stands ready."""
    token = sampling.draw(logits, session.history, params, session.generator)
    arrival = _sent(session, token)
    try:
        session.ahead = _begin(session, token)
    finally:  # it comes whatever happens
        known = arrival()
    found = sampling.checked(known, logits, session.history, params)
    if session.ahead:
        session.ahead.token = found
    return found


class Arrival:
    """A token's way from a GPU to a session, again and again."""

    def __init__(self, device: torch.device):
        self.device = device
        self._known, self._arrived = HostNumber(), torch.cuda.Event()

    def send(self, token: Tensor) -> None:
        self._known.write(token)
        self._arrived.record()

    def wait(self) -> int:
        """The token that was sent last; for nothing that is begun later."""
        self._arrived.synchronize()
        return int(self._known.memory)


def _sent(session: "Session", token: Tensor) -> Callable[[], int]:
    """A token int64 [] is on its way to the host: what waits for it."""
    with torch.cuda.device(token.device):
        if session.arrival is None or session.arrival.device != token.device:
            session.arrival = Arrival(token.device)
        session.arrival.send(token)
    return session.arrival.wait


def _begin(session: "Session", token: Tensor) -> Ahead | None:
    if session.pool.states or not session.stands_ready:  # what a step does to a recurrent state cannot be taken back
        return None
    begun = graphs.begin(session, token)
    return begun and Ahead(*begun)


def take(session: "Session", token: int) -> list[Tensor] | None:
    """What was begun with this token behind what the session holds, if it is still that: its row of logits."""
    ahead, session.ahead = session.ahead, None
    return [ahead.logits] if ahead and ahead.token == token and ahead.in_force() else None
