"""Replies that arrive in pieces, split into content and tool calls.

A wire format is a generator function over a `Reader`: it takes text, says what it is, and yields where it needs more.
So it reads like a parser of a whole text, and no piece's border can make a difference.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from dasllama_torch.chat.markers import MarkerBuffer

from .calls import CallDelta, ToolCall, dumps, read_object

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more text is needed

NAME = re.compile(r"""[^\s{}<>"']+""")
_AT_ONCE = 1 << 12  # characters; what is put back is copied together with the rest of them


class Reader:
    """What a wire format sees of a reply.

    Input: `take`, `until` and `follows` take text in order, `put_back` gives it back. Markers "" and None: the reply
    has ended there, or there is none yet.
    Output: `content`, and for each call `open`, then `id`, `name` and `arguments`, then `close`. All that is taken from
    `open` to `close` is the call's text; if it has no name it is content.
    tools: those declared, in OpenAI's form.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()):
        self.tools = tools
        self.calls: list[ToolCall] = []
        self.finished = False
        self._buffer = MarkerBuffer()
        self._events: list[tuple[int | None, str | None, str | None, list[str]]] = []  # call, name, id, texts
        self._space = ""  # at the end of the content so far: dropped if nothing but calls follows
        self._after_call = False
        self._raw: list[str] | None = None  # of the call that is open
        self._name: str | None = None
        self._id: str | None = None
        self._fragments: list[str] = []

    def feed(self, text: str) -> None:
        self._buffer.feed(text)

    def finish(self) -> None:
        self._buffer.finish()
        self.finished = True

    def take(self, *markers: str) -> Steps[tuple[str, str | None]]:
        """Some of the text before the next marker: (part, None), ..., (part, marker)."""
        while True:
            text, marker = self._buffer.take(*markers)
            if self._raw is not None:
                self._raw.append(text + (marker or ""))
            if marker is None and self.finished:
                return text, ""
            if text or marker:
                return text, marker
            yield

    def until(self, *markers: str) -> Steps[tuple[str, str]]:
        """All of the text before the next marker, and the marker."""
        parts = []
        while True:
            part, marker = yield from self.take(*markers)
            parts.append(part)
            if marker is not None:
                return "".join(parts), marker

    def follows(self, *markers: str) -> Steps[str]:
        """Takes white space and a marker if that is what comes next; otherwise nothing, and returns ""."""
        space = ""
        while True:
            part, marker = yield from self.take(*markers)
            space += part
            if marker == "" or space.strip():
                self.put_back(space + (marker or ""))
                return ""
            if marker:
                if self._raw is None:
                    self.content(space)
                return marker

    def pass_until(self, *markers: str) -> Steps[str]:
        """Hands on all text before the next marker as content, and returns the marker."""
        while True:
            part, marker = yield from self.take(*markers)
            self.content(part)
            if marker is not None:
                return marker

    def put_back(self, text: str) -> None:
        """Gives back what was taken last."""
        self._buffer.put_back(text)
        if self._raw is not None:
            raw = self.raw
            self._raw = [raw[: len(raw) - len(text)]]

    def content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._emit(None, kept)
            self._after_call = False

    def open(self, marker: str) -> None:
        """A call begins with `marker`, which was taken last."""
        self._raw = [marker]
        self._name = self._id = None
        self._fragments = []

    @property
    def raw(self) -> str:
        """The text of the call that is open, as far as it was taken."""
        return "".join(self._raw or ())

    def id(self, call_id: str) -> None:
        self._id = call_id

    def name(self, name: str) -> None:
        """The first one counts. What cannot be a name is passed over."""
        if self._name is None and NAME.fullmatch(name):
            self._name = name
            self._emit(len(self.calls), "".join(self._fragments), name)

    def arguments(self, fragment: str) -> None:
        """A piece of the arguments' JSON text. It is held until the name has come."""
        self._fragments.append(fragment)
        if self._name is not None:
            self._emit(len(self.calls), fragment)

    def key(self, key: str) -> None:
        """The next argument's name, for formats without JSON; its value comes through `arguments`."""
        self.arguments(f"{', ' if self._fragments else '{'}{dumps(key)}: ")

    def end_keys(self) -> None:
        """No argument follows the last `key`."""
        self.arguments("}" if self._fragments else "{}")

    def skip_past(self, *ends: str, before: Sequence[str] = ()) -> Steps[None]:
        """Takes the rest of the call: up to an end, or to the beginning of something else."""
        _, marker = yield from self.until(*ends, *before)
        if marker in before:
            self.put_back(marker)

    def back_to(self, *markers: str) -> None:
        """Gives back the call's text from its first marker: a string that was not closed may have swallowed it."""
        raw = self.raw
        if found := re.compile("|".join(map(re.escape, markers))).search(raw, 1):
            self.put_back(raw[found.start() :])

    def close(self, complete: bool) -> None:
        """The call has ended. complete: in order, so that no arguments means that it has none."""
        raw, self._raw = self.raw, None
        if self._name is None:
            self.content(raw)
            return
        if complete and not self._fragments:
            self.arguments("{}")
        self.calls.append(ToolCall(self._name, read_object("".join(self._fragments)), raw, self._id))
        self._after_call = True

    def end_content(self) -> None:
        """The reply is over. White space after its last call was the format's."""
        if self._space and not self._after_call:
            self._emit(None, self._space)
        self._space = ""

    def events(self) -> list[str | CallDelta]:
        """What has come out since the last time."""
        events: list[str | CallDelta] = []
        for index, name, call_id, texts in self._events:
            text = "".join(texts)
            events.append(text if index is None else CallDelta(index, name, text, call_id))
        self._events = []
        return events

    def _emit(self, index: int | None, text: str, name: str | None = None) -> None:
        if self._events and self._events[-1][0] == index:
            self._events[-1][-1].append(text)
        else:
            self._events.append((index, name, self._id if name else None, [text]))


class CallStream:
    """Splits a reply as it arrives.

        stream = CallStream(format.read, tools)
        for piece in pieces:
            for event in stream.feed(piece):  # a str is content
                ...
        stream.finish()                       # the last events
        stream.calls                          # the calls that have ended so far

    Held back are what may become a marker, a call until its name is known, and white space until something follows it.
    The content is the text outside of calls as it stands, but for white space after the last call.
    """

    def __init__(self, read: Callable[[Reader], Steps[None]], tools: Sequence[Mapping[str, Any]] = ()):
        self._reader = Reader(tools)
        self._steps = read(self._reader)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._reader.calls)

    def feed(self, text: str) -> list[str | CallDelta]:
        """What the next piece makes certain. ValueError after `finish`."""
        if self._reader.finished:
            raise ValueError("the reply has been finished, wanted a new stream for another")
        for start in range(0, len(text), _AT_ONCE):
            self._reader.feed(text[start : start + _AT_ONCE])
            next(self._steps)
        return self._reader.events()

    def finish(self) -> list[str | CallDelta]:
        """The reply has ended: what was held back comes out."""
        self._reader.finish()
        next(self._steps, None)
        self._reader.end_content()
        return self._reader.events()
