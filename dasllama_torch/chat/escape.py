"""Keeps what people write from becoming control tokens: the names of special tokens in it are text like any other.

A template mixes its own text with theirs, trims, cuts and joins, so afterwards nothing tells them apart. Therefore each
character with which the name of a special token begins is replaced in their text, before the template sees it, by one
that stands for it: a lone surrogate, which is no text and which no vocabulary has. Whatever the template does then, a
name that begins with a true character was written by the template.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_STAND_IN = re.compile("[\udc00-\udfff]")
_BASE = 0xDC00  # ASCII characters stand at _BASE + their code
_BASE_OTHER = 0xDC80  # others follow; in JSON with ensure_ascii they come as they are, which reads the same


class Segment(NamedTuple):
    """Part of a prompt. special: whether the names of special tokens in it become those tokens."""

    text: str
    special: bool


class Escape:
    """names: of the special tokens that text must not become."""

    def __init__(self, names: Iterable[str]):
        names = sorted({name for name in names if name}, key=len, reverse=True)
        firsts = sorted({name[0] for name in names})
        other = iter(range(_BASE_OTHER, 0xE000))
        codes = {ord(first): _BASE + ord(first) if first.isascii() else next(other) for first in firsts}
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._hide = codes
        self._show = {stand_in: code for code, stand_in in codes.items()}

    def hide(self, text: str, keep: Iterable[str] = ()) -> str:
        """The text with stand-ins, but in the strings `keep`, which templates look for."""
        kept = "|".join(map(re.escape, keep))
        if not kept:
            return text.translate(self._hide)
        parts = re.split(f"({kept})", text)
        return "".join(part if i % 2 else part.translate(self._hide) for i, part in enumerate(parts))

    def segments(self, text: str) -> list[Segment]:
        """A rendered text with its stand-ins -> its segments: those that are not special are names of special tokens
        that people wrote."""
        shown = text.translate(self._show)
        segments, start = [], 0
        for stand_in in _STAND_IN.finditer(text):
            if stand_in.start() >= start and (name := self._names.match(shown, stand_in.start())):
                segments += [Segment(shown[start : name.start()], True), Segment(name.group(), False)]
                start = name.end()
        segments.append(Segment(shown[start:], True))
        return [segment for segment in segments if segment.text]


def cut(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """The segments of characters [start, stop) of their text."""
    parts, at = [], 0
    for segment in segments:
        text = segment.text[max(0, start - at) : max(0, stop - at)]
        parts.append(Segment(text, segment.special))
        at += len(segment.text)
    return [part for part in parts if part.text]
