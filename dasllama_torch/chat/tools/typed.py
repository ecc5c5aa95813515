"""Values that a model writes as bare text, as JSON of the type that the tool's schema asks for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .calls import dumps, function_of, loads
from .stream import Reader, Steps

_PYTHON = {"True": True, "False": False, "None": None}  # templates write Python's words, and so do models
_UNKNOWN = ""
_TYPES = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def argument_types(tools: Iterable[Mapping[str, Any]], name: str, key: str) -> frozenset[str]:
    """JSON Schema's types that an argument may have; empty if its schema does not say all of them."""
    for tool in map(function_of, tools):
        if tool.get("name") == name:
            properties = (tool.get("parameters") or {}).get("properties") or {}
            types = frozenset(_types(properties.get(key)))
            return frozenset() if _UNKNOWN in types else types
    return frozenset()


def _types(schema: Any) -> Iterable[str]:
    schema = schema if isinstance(schema, Mapping) else {}
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, Sequence):
        yield from declared
    elif choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        yield from (next((name for name, fits in _TYPES.items() if fits(value)), "string") for value in choices)
    elif either := (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        for choice in either:
            yield from _types(choice)
    else:
        yield _UNKNOWN  # such as a reference to another schema


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. Where several types fit it is a string last; what fits none is a string."""
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else loads(text)
    except ValueError:
        return dumps(text)
    if not types:  # not known: text in quotes may be just that
        return dumps(text if isinstance(value, str) else value)
    if any(name in types and fits(value) for name, fits in _TYPES.items()):
        whole = "number" not in types and isinstance(value, float)
        return dumps(int(value) if whole else value)
    return dumps(text)


def read_value(reader: Reader, types: frozenset[str], *ends: str) -> Steps[str]:
    """Takes a value and the marker that ends it, which it returns. A string is handed on as it comes."""
    if types != {"string"}:
        text, marker = yield from reader.until(*ends)
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
