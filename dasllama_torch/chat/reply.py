"""A reply as it arrives: text into pieces of reasoning, content and tool calls; and what it is once it has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
