"""What a model thinks and what it says: a reply's reasoning and its content, whole or as it streams.

    reasoning = find(template.special_types, template.source)      # None: the model does not reason
    stream = reasoning.stream(inside=reasoning.opened_by(prompt))
    for piece in pieces:
        delta = stream.feed(piece)                                 # Reply(reasoning, content), what has become certain
    delta = stream.finish()

Replies are text with the names of special tokens in it (`decode(skip_special=False)`), without the end of the turn.
How a reply is cut into pieces makes no difference: what may be part of a marker is held back until that is decided.
Where a reply reasons, both sides come without white space around them; one that does not passes as it is. Reasoning
that nobody closed is reasoning.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .markers import MarkerBuffer


class Reply(NamedTuple):
    """A reply, or the part of it that a call completes: of reasoning, and of content, in which tool calls are still
    written as the model writes them."""

    reasoning: str
    content: str

    def message(self) -> dict[str, Any]:
        """As a message of a conversation; which past reasoning a prompt keeps is up to the model's template."""
        message = {"role": "assistant", "content": self.content}
        return {**message, "reasoning_content": self.reasoning} if self.reasoning else message


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Reasoning between two tags: `<think>...</think>`, `[THINK]...[/THINK]`, `<|channel>thought...<channel|>`.

    open, close: as text. tokens: the special tokens of the vocabulary without which they are only text. stop_when_off:
    tokens that also end a reply while reasoning is turned off.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    stop_when_off: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a template looks for in an assistant's message, to leave past reasoning out."""
        return self.open, self.close

    def opened_by(self, prompt: str) -> bool:
        """Whether a reply to the prompt begins inside the reasoning."""
        return prompt.rstrip().endswith(self.open)

    def stream(self, inside: bool = False) -> "TaggedStream":
        return TaggedStream(self, inside)

    def split(self, text: str, inside: bool = False) -> Reply:
        """A whole reply. One that closes reasoning which it never opened began inside it, whatever `inside` says; a
        stream cannot know that before it comes.
        """
        before, closed, _ = text.partition(self.close)
        return self.stream(inside or (closed != "" and self.open not in before)).drain(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Harmony:
    """The channels of gpt-oss (OpenAI's harmony response format): a reply is messages, each with a header that names
    its channel and perhaps the tool that it is for. `final` is content, `analysis` and `commentary` are reasoning, and
    a message to a tool stays in the content as it is written. What has no header, or another channel, is content.
    """

    tokens: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    markers: tuple[str, ...] = ()  # the template wants reasoning apart
    stop_when_off: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """False: a reply begins with the header of its first message."""
        return False

    def stream(self, inside: bool = False) -> "HarmonyStream":
        return HarmonyStream()

    def split(self, text: str, inside: bool = False) -> Reply:
        return self.stream().drain(text)


@dataclass(frozen=True, slots=True)
class NoReasoning:
    """Of a model that does not reason: all of a reply is content."""

    tokens: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    stop_when_off: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        return False

    def stream(self, inside: bool = False) -> "ContentStream":
        return ContentStream()

    def split(self, text: str, inside: bool = False) -> Reply:
        return Reply("", text)


ReasoningFormat = Tagged | Harmony | NoReasoning

FORMATS: tuple[Tagged | Harmony, ...] = (
    Harmony(),
    Tagged(
        open="<|channel>thought",
        close="<channel|>",
        tokens=("<|channel>", "<channel|>"),
        stop_when_off=("<|channel>",),
    ),
    Tagged(open="<think>", close="</think>", tokens=("<think>", "</think>")),
    Tagged(open="[THINK]", close="[/THINK]", tokens=("[THINK]", "[/THINK]")),
)


def find(specials: Collection[str], template: str) -> Tagged | Harmony | None:
    """The format whose tokens the vocabulary has and the template names. A vocabulary alone says little: families share
    them between models that reason and models that do not.
    """
    for form in FORMATS:
        if all(token in specials and token in template for token in form.tokens):
            return form
    return None


@dataclass(slots=True)
class _Side:
    """One side of a reply. begun: whether any of it was given out. held: white space, until more follows."""

    begun: bool = False
    held: str = ""

    def add(self, text: str, strip: bool) -> str:
        text = self.held + text
        solid = text.rstrip()
        self.held = text[len(solid) :]
        if not solid:
            return ""
        if strip and not self.begun:
            solid = solid.lstrip()
        self.begun = True
        return solid


class ThinkStream:
    """A reply as it arrives, split. A subclass cuts the text into runs of (text, whether it is reasoning)."""

    def __init__(self, reasons: bool = False):
        self._buffer = MarkerBuffer()
        self._reasoning = _Side()
        self._content = _Side()
        self._reasons = reasons  # whether there was reasoning so far

    def feed(self, piece: str) -> Reply:
        """What the next piece of the reply makes certain; either side may be empty."""
        self._buffer.feed(piece)
        return self._read(last=False)

    def finish(self) -> Reply:
        """The rest, once the reply has ended."""
        self._buffer.finish()
        rest = self._read(last=True)
        held = "" if self._reasons else self._content.held
        return Reply(rest.reasoning, rest.content + held)

    def drain(self, text: str) -> Reply:
        """A whole reply at once."""
        first, rest = self.feed(text), self.finish()
        return Reply(first.reasoning + rest.reasoning, first.content + rest.content)

    def _read(self, last: bool) -> Reply:
        reasoning, content = [], []
        for text, is_reasoning in self._runs(last):
            self._reasons |= is_reasoning
            if is_reasoning:
                reasoning.append(self._reasoning.add(text, strip=True))
            else:
                content.append(self._content.add(text, strip=self._reasons))
        return Reply("".join(reasoning), "".join(content))

    def _runs(self, last: bool) -> Iterator[tuple[str, bool]]:
        """What is certain of the text; all of it once it is the last."""
        raise NotImplementedError


class ContentStream(ThinkStream):
    def _runs(self, last: bool) -> Iterator[tuple[str, bool]]:
        yield self._buffer.take()[0], False


class TaggedStream(ThinkStream):
    def __init__(self, form: Tagged, inside: bool):
        super().__init__(reasons=inside)
        self._form = form
        self._inside = inside

    def _runs(self, last: bool) -> Iterator[tuple[str, bool]]:
        form, marker = self._form, ""
        while marker is not None:
            # Inside, another opening tag is dropped: models repeat the one that their prompt ends with.
            text, marker = self._buffer.take(*((form.open, form.close) if self._inside else (form.open,)))
            yield text, self._inside
            if marker is not None:
                self._inside = marker == form.open


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO_TOOL = re.compile(r"\bto=(?!assistant\b)[^\s<]")
_REASONING = re.compile(r"<\|channel\|>\s*(?:analysis|commentary)\b")
# What may stand before a header's first marker: the prompt ends with `<|start|>assistant`, and a recipient may follow.
_RECIPIENT = re.compile(r"\s*(?:t|to|to=\S*\s*)?")


class HarmonyStream(ThinkStream):
    def __init__(self):
        super().__init__()
        self._header: str | None = ""  # of the message that is read, as far as it has come; None within its body
        self._is_reasoning = False
        self._to_tool = False

    def _runs(self, last: bool) -> Iterator[tuple[str, bool]]:
        marker: str | None = ""
        while marker is not None:
            text, marker = self._buffer.take(_START, _CHANNEL, _MESSAGE, *_ENDS)
            if self._header is None:
                yield text, self._is_reasoning
            else:
                self._header += text
            if self._header and not self._is_header() and not _RECIPIENT.fullmatch(self._header):
                yield from self._body(to_tool=False, is_reasoning=False)
            yield from self._at(marker)
        if last:
            yield from self._leave()

    def _at(self, marker: str | None) -> Iterator[tuple[str, bool]]:
        if marker == _MESSAGE and self._header is not None:
            to_tool = _TO_TOOL.search(self._header) is not None
            is_reasoning = not to_tool and _REASONING.search(self._header) is not None
            self._header = f"{self._header}{_MESSAGE}" if to_tool else ""
            yield from self._body(to_tool, is_reasoning)
        elif marker == _CHANNEL and self._header is not None:
            self._header += marker
        elif marker in (_START, _CHANNEL):
            yield from self._leave()
            self._header = marker
        elif marker in _ENDS:
            if self._to_tool and self._header is None:
                yield marker, False
            yield from self._leave()

    def _body(self, to_tool: bool, is_reasoning: bool) -> Iterator[tuple[str, bool]]:
        """The header ends; what is left of it belongs to the body."""
        side = self._reasoning if is_reasoning else self._content
        if side.begun:
            yield "\n", is_reasoning  # between two messages
        yield self._header, is_reasoning
        self._header, self._to_tool, self._is_reasoning = None, to_tool, is_reasoning

    def _leave(self) -> Iterator[tuple[str, bool]]:
        """The message ends. A header without a body says nothing, but text without a marker is no header."""
        if self._header and not self._is_header():
            yield self._header, False
        self._header = ""

    def _is_header(self) -> bool:
        return _CHANNEL in self._header or self._header.startswith(_START)
