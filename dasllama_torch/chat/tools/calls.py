"""Tool calls as data, and the JSON that models write."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

ARGUMENT_KEYS = ("arguments", "parameters")  # models use either, whatever their template shows them


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: None where they cannot be read. raw: the call as the model wrote it, markers included. id: the model's
    own, None in formats that have none.
    """

    name: str
    arguments: dict[str, Any] | None
    raw: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a piece of a reply adds to its call number `index`. name (and id, where it comes before the arguments): in a
    call's first delta only. arguments: a piece of JSON text; all pieces of a call make its arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolReply:
    """content: the text outside of calls, and calls without a name as they stand."""

    content: str
    calls: tuple[ToolCall, ...]


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def loads(text: str) -> Any:
    """The JSON value of a text. It may have line breaks in strings; lone surrogates become U+FFFD. ValueError for what
    is no JSON: other text, NaN, numbers out of range, too many levels.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            value = json.loads(dumps(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError("too many levels") from None
    return value


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object of a text; None if it is none."""
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def decoded(arguments: Any) -> Any:
    """What a template is to be given: a string of JSON (as OpenAI's API has it) is decoded, once, because templates
    encode it again. Nothing becomes {}; text that is no JSON object stays text.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    value = read_object(arguments)
    return arguments if value is None else value


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """{"name", "description", "parameters"} of a tool or a call, with OpenAI's wrapper around it or without."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def arguments_text(function: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON; text that is no JSON object as it is."""
    arguments = decoded(function.get("arguments"))
    return arguments if isinstance(arguments, str) else dumps(arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is out of range")
    return value
