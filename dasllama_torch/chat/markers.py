"""Markers in text that arrives in pieces."""

import re
from functools import lru_cache


class MarkerBuffer:
    """Text that arrives in pieces and is taken out in order, cut at markers.

    What may be the beginning of a marker is held back until it is decided, so how the text was cut into pieces makes
    no difference to what comes out in total. Each call names the markers that matter there.

        buffer.feed("so it is 4</thi")
        buffer.take("</think>")  # ("so it is 4", None)
        buffer.feed("nk>It is 4.")
        buffer.take("</think>")  # ("", "</think>")
        buffer.take()            # ("It is 4.", None)
    """

    def __init__(self):
        self._text = ""
        self._at = 0  # what is before it has been taken
        self._finished = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def put_back(self, text: str) -> None:
        """Gives back what was taken last."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def finish(self) -> None:
        """No more text will come: from now on nothing is held back."""
        self._finished = True

    def take(self, *markers: str) -> tuple[str, str | None]:
        """Takes the text before the first of `markers`, and that marker: (text, marker). Of two that begin at one
        place, the longer. (text, None) if none has come: text is then what can be no part of one, and the rest stays.
        """
        found = _pattern(markers).search(self._text, self._at) if markers else None
        start, end = found.span() if found else (len(self._text), len(self._text))
        held = self._held(markers)
        if held <= start:  # another marker, earlier or longer, may be on its way
            start = end = held
            found = None
        text = self._text[self._at : start]
        self._at = end
        return text, found and found.group()

    def _held(self, markers: tuple[str, ...]) -> int:
        """Where the text ends in the beginning of a marker."""
        end = len(self._text)
        if self._finished or not markers:
            return end
        for start in range(max(self._at, end - max(map(len, markers)) + 1), end):
            tail = self._text[start:]
            if any(marker.startswith(tail) and marker != tail for marker in markers):
                return start
        return end


@lru_cache(256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
