"""What a reply looks like while it comes."""

import os
from typing import TYPE_CHECKING, TextIO

from ..output import without_controls

if TYPE_CHECKING:
    from dasllama_torch.chat.reply import ChatPiece

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes the content of replies to `out`, and reasoning and tool calls to `aside`, dimmed where that is a terminal
    which can do it (https://no-color.org). Both may be the same terminal.

    Nothing that a model writes commands a terminal; where `out` is none it gets the content as it is.
    """

    def __init__(self, out: TextIO, aside: TextIO):
        self._out, self._aside = out, aside
        self._open = {out: False, aside: False}  # whether they stand within a line
        self._kind: str | None = None  # of what the reply had last
        has_styles = aside.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if has_styles else ("", "")

    def write(self, piece: "ChatPiece") -> None:
        call = piece.call
        if self._kind is not None and (piece.kind != self._kind or (call and call.name is not None)):
            self._end_line(self._aside)
            if piece.kind == "content" or self._kind == "reasoning":
                print(file=self._aside)
        self._kind = piece.kind
        if piece.kind == "content":
            self._write(self._out, without_controls(piece.text) if self._out.isatty() else piece.text)
        else:
            text = piece.text if call is None or call.name is None else f"{call.name} {call.arguments}"
            self._write(self._aside, without_controls(text), self._dim, self._plain)

    def finish(self) -> None:
        """The reply is over."""
        self._end_line(self._out)
        self._end_line(self._aside)
        self._kind = None

    def note(self, text: str) -> None:
        """Lines of ours."""
        self._end_line(self._aside)
        print(without_controls(text), file=self._aside, flush=True)

    def _write(self, out: TextIO, text: str, before: str = "", behind: str = "") -> None:
        if text:
            print(f"{before}{text}{behind}", end="", file=out, flush=True)
            self._open[out] = not text.endswith("\n")

    def _end_line(self, out: TextIO) -> None:
        if self._open[out]:
            print(file=out, flush=True)
            self._open[out] = False
