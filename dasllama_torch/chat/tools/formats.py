"""What a wire format consists of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .callee import Callee
from .grammar import Rules
from .stream import Reader, Steps

Tool = Mapping[str, Any]  # as declared, in OpenAI's form
Function = Mapping[str, Any]  # of a call: {"name", "arguments"}; arguments that are no object are text


@dataclass(frozen=True, kw_only=True, slots=True)
class Inline:
    """A format within plain messages, for templates that know nothing of tools.

    definitions: what the model is told; in_user_message: in the first user's message, not the system's. calls: the text
    of an assistant's calls, after its content and `before_calls`. results: the text of the results that follow each
    other; result_role: of their message.
    """

    definitions: Callable[[Sequence[Tool]], str]
    calls: Callable[[Sequence[Function]], str]
    results: Callable[[Sequence[str]], str]
    before_calls: str = "\n"
    result_role: str = "user"
    in_user_message: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """name: as in `FORMATS`. read: takes a reply apart. grammar: the expression of a reply that calls one of
    the tools, several times if that is True. openings: what begins calls and stands nowhere else, names of special
    tokens where a vocabulary has them, else texts. inline: None where the format has turns and markers of its own,
    which only a template can write.
    """

    name: str
    read: Callable[[Reader], Steps[None]]
    grammar: Callable[[Rules, Sequence[Callee], bool], str]
    openings: tuple[str, ...]
    inline: Inline | None = None
