"""Values that a model writes as bare text, as JSON of the type that the tool's schema asks for."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .calls import dumps, function_of, loads
from .json_schema import FITS, types_of
from .stream import Reader, Steps

_IN_JSON = re.compile(r'\\.|"', re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}  # templates write Python's words, and so do models


def argument_types(tools: Iterable[Mapping[str, Any]], name: str, key: str) -> frozenset[str]:
    """JSON Schema's types that an argument may have; empty if its schema does not say all of them."""
    for tool in map(function_of, tools):
        if tool.get("name") == name:
            parameters = tool.get("parameters") or {}
            properties = parameters.get("properties") or {}
            return types_of(properties.get(key, True), parameters)
    return frozenset()


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. Where several types fit it is a string last; what fits none is a string."""
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else loads(text)
    except ValueError:
        return dumps(text)
    if not types:  # not known: text in quotes may be just that
        return dumps(text if isinstance(value, str) else value)
    if any(FITS[name](value) for name in types if name != "string"):
        whole = "number" not in types and isinstance(value, float)
        return dumps(int(value) if whole else value)
    return dumps(text)


def read_value(reader: Reader, types: frozenset[str], *ends: str) -> Steps[str]:
    """Takes a value and the marker that ends it, which it returns. A string is handed on as it comes."""
    if types != {"string"}:
        may_nest = not types or types & {"array", "object"}
        text, marker = yield from _until_outside_strings(reader, *ends) if may_nest else reader.until(*ends)
        reader.arguments(to_json(text, types))
        return marker
    reader.arguments('"')
    while True:
        part, marker = yield from reader.take(*ends)
        reader.arguments(dumps(part)[1:-1])
        if marker is not None:
            if marker:
                reader.arguments('"')
            return marker


def _until_outside_strings(reader: Reader, *ends: str) -> Steps[tuple[str, str]]:
    """As `Reader.until`, but markers in the strings of an array or object are text. Of one with a string that is never
    closed it takes what is before the first marker.
    """
    text, marker = yield from reader.until(*ends)
    if text.lstrip()[:1] not in ("[", "{"):
        return text, marker
    first, behind = (text, marker), []
    parts, is_open = [text], _is_open(text, False)
    while is_open and marker:
        part, further = yield from reader.until(*ends)
        behind += [part, further]
        parts += [marker, part]
        is_open = _is_open(marker + part, True)
        marker = further
    if is_open:
        reader.put_back("".join(behind))
        return first
    return "".join(parts), marker


def _is_open(text: str, is_open: bool) -> bool:
    """Whether a string of JSON is open behind the text, if it was before."""
    for found in _IN_JSON.finditer(text):
        is_open ^= found[0] == '"'
    return is_open
