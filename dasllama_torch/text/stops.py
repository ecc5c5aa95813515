"""Strings that end a text, looked for as it arrives."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on until one of some strings is complete in it.

    What is passed does not depend on the pieces that the text comes in: of several strings the one that is complete
    first ends the text, of those complete with the same character the longest. What may turn out to be the beginning of
    one is held back until that is decided.

    found: the string that has ended the text; None so far.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text before a string that `piece` completes, or all that belongs to none; "" if there is none yet."""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[:at]
        kept = len(text) - self._undecided(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of a text that some string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
