"""One reply, shown while it comes."""

import itertools
import signal
from types import FrameType
from typing import TYPE_CHECKING

from ..output import speeds, status
from .screen import Screen

if TYPE_CHECKING:
    from dasllama_torch.chat.chat import Chat
    from dasllama_torch.sampling import SamplingParams


def report(chat: "Chat") -> str:
    """What the last reply took, and why it ended; of a chat without one, what its prompt took."""
    reason = chat.reply.finish_reason if chat.reply else "caller"
    return speeds(chat.stats, "interrupt" if reason == "caller" else reason)


def respond(chat: "Chat", params: "SamplingParams", max_tokens: int | None, screen: Screen) -> bool:
    """Whether Ctrl-C has ended the reply; what had come of it stays in the chat."""
    pieces = chat.respond(params, max_tokens)
    try:
        with _Interrupt() as interrupt:
            with status("reading"):
                first = list(itertools.islice(pieces, 1))
            interrupt.waits = True
            for piece in itertools.chain(first, pieces):
                screen.write(piece)
                if interrupt.seen:
                    return True
    except KeyboardInterrupt:
        return True
    finally:
        pieces.close()
        screen.finish()
    return False


class _Interrupt:
    """Ctrl-C while a reply comes. waits: it is noted (`seen`), and no forward is cut in two. Until
    then, as while a long prompt is read, and the second time it raises KeyboardInterrupt.
    """

    def __init__(self):
        self.waits = self.seen = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> "_Interrupt":
        if self._before is signal.default_int_handler:  # else it is ignored, or somebody else's
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen or not self.waits:
            raise KeyboardInterrupt
        self.seen = True
