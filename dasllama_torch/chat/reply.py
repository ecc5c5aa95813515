"""A reply as it arrives: text into pieces of reasoning, content and tool calls; and what it is once it has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dasllama_torch.text.detokenizer import StreamingDetokenizer
from dasllama_torch.text.stops import StopStrings
from dasllama_torch.text.tokenizer import Tokenizer

from .thinking import ReasoningFormat
from .tools import CallDelta, CallStream, ToolCall, ToolFormat

Kind = Literal["reasoning", "content", "call"]


class ChatPiece(NamedTuple):
    """What a part of a reply adds to one side of it. kind: "reasoning", "content" or "call". text: of reasoning and
    content what they go on with, of a call its name and what has come of its arguments. call: of a call, else None.
    """

    kind: Kind
    text: str
    call: CallDelta | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """A whole reply: what it says, how it reasons, what it calls. raw: as the model wrote it, with the names of special
    tokens. ids: the tokens that were sampled, without the one that ended it; none of a text that was only parsed.

    finish_reason: "stop", an end of the turn or a stop that was asked for; "tool_calls", an end behind calls; "length",
    max_tokens; "context", the session's end; "caller", who went away or met an error; None for a text that was only
    parsed.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    raw: str
    ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class ReplyReader:
    """Takes a reply apart as it comes: reasoning first, then calls out of what is left. What may be part of a marker is
    held back, so how the text was cut makes no difference to what comes out in total.

    inside: whether it begins within the reasoning. form: of its tool calls; None: what looks like one is content.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat,
        form: ToolFormat | None,
        tools: Sequence[Mapping[str, Any]],
        inside: bool,
    ):
        self._thoughts = reasoning.stream(inside)
        self._calls = CallStream(form.read, tools) if form else None
        self._said: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._raw: list[str] = []

    def feed(self, text: str) -> list[ChatPiece]:
        """What the next part of the text makes certain."""
        self._raw.append(text)
        reasoning, content = self._thoughts.feed(text)
        return self._pieces(reasoning, self._calls.feed(content) if self._calls else [content])

    def finish(self) -> list[ChatPiece]:
        """The rest, once the reply has ended."""
        reasoning, content = self._thoughts.finish()
        return self._pieces(reasoning, self._calls.feed(content) + self._calls.finish() if self._calls else [content])

    def reply(self, ids: Sequence[int] = (), finish_reason: str | None = None) -> ChatReply:
        """What there is of it, once it is finished."""
        calls = self._calls.calls if self._calls else ()
        return ChatReply(
            content="".join(self._said["content"]),
            reasoning="".join(self._said["reasoning"]),
            calls=calls,
            raw="".join(self._raw),
            ids=tuple(ids),
            finish_reason="tool_calls" if calls and finish_reason == "stop" else finish_reason,
        )

    def _pieces(self, reasoning: str, events: Sequence[str | CallDelta]) -> list[ChatPiece]:
        pieces = [ChatPiece("reasoning", reasoning)]
        for event in events:
            if isinstance(event, str):
                pieces.append(ChatPiece("content", event))
            else:
                pieces.append(ChatPiece("call", (event.name or "") + event.arguments, event))
        pieces = [piece for piece in pieces if piece.text or piece.call]
        for piece in pieces:
            if piece.kind != "call":
                self._said[piece.kind].append(piece.text)
        return pieces


class TokenText:
    """The text of a reply's tokens as they come, names of special ones included, up to the first of some strings.

    ids: the tokens. stopped: whether one of the strings has come.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.ids: list[int] = []
        self._stream = StreamingDetokenizer(tokenizer, skip_special=False, prev_id=prompt[-1] if prompt else None)
        self._stops = StopStrings(stop)
        self._parts: list[str] = []  # of each token
        self._passed = 0  # characters

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def feed(self, token: int) -> str:
        """The text that the token makes certain."""
        self.ids.append(token)
        self._parts.append(self._stream.feed(token))
        return self._pass(self._stops.feed(self._parts[-1]))

    def finish(self) -> str:
        """The rest, at the end."""
        if self.stopped:
            return ""
        self._parts.append(self._stream.finish())
        return self._pass(self._stops.feed(self._parts[-1]) + self._stops.finish())

    @property
    def kept(self) -> tuple[tuple[int, ...], str]:
        """The tokens whose text lies before a string that has stopped it, and that text; once it is finished."""
        if not self.stopped:
            return tuple(self.ids), "".join(self._parts)
        n = len(self.ids)
        while n and (len("".join(self._parts[:n])) > self._passed or not self._parts[n - 1]):
            n -= 1
        return tuple(self.ids[:n]), "".join(self._parts[:n])

    def _pass(self, text: str) -> str:
        self._passed += len(text)
        return text
