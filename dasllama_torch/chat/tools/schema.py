'''Tools as they are declared: in OpenAI's form, or Python functions, from their type hints and docstrings.

    def get_weather(city: str, unit: Literal["C", "F"] = "C"):
        """The weather of today.

        Args:
            city: A town, with its country.
        """

What becomes of a function is what transformers' `get_json_schema` makes of it.
'''

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .calls import function_of

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_SECTION = re.compile(r"^(\w+):[ \t]*\n", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?:[ \t]*\([^()\n]*\))?:[ \t]*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def declared(tool: Mapping[str, Any] | Callable) -> Mapping[str, Any]:
    """A tool in OpenAI's form, {"type": "function", "function": {"name", "description", "parameters"}}. ValueError for
    what is none, and for a function without type hints or with such as have no JSON."""
    if isinstance(tool, Mapping):
        if not isinstance(function_of(tool).get("name"), str):
            raise ValueError(f"a tool has no name: wanted a function in OpenAI's form, found {dict(tool)!r}")
        return tool if "function" in tool else {"type": "function", "function": tool}
    if not callable(tool):
        raise ValueError(f"a tool is {type(tool).__name__}, wanted a dict in OpenAI's form or a function")
    return {"type": "function", "function": _function(tool)}


def _function(function: Callable) -> dict[str, Any]:
    name = function.__name__
    description, *sections = _SECTION.split(inspect.getdoc(function) or "")
    arguments = dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")
    said = {key: " ".join(text.split()) for key, text in _ARGUMENT.findall(textwrap.dedent(arguments))}
    hints = get_type_hints(function)
    properties, required = {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if key not in hints or parameter.kind not in _NAMED:
            raise ValueError(f"tool {name!r}: argument {key!r} needs a type hint, and a name that a call can give")
        try:
            properties[key] = _schema(hints[key])
        except ValueError as error:
            raise ValueError(f"tool {name!r}: argument {key!r}: {error}") from None
        if said.get(key):
            properties[key]["description"] = said[key]
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"name": name, "description": description.strip(), "parameters": schema}


def _schema(hint: Any) -> dict[str, Any]:
    """JSON Schema of a type; None in a union makes it `nullable`, as templates have it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None and hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is list:
        return {"type": "array", "items": _schema(args[0])}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    if origin is Literal and all(type(value) in _TYPES for value in args):
        names = list(dict.fromkeys(_TYPES[type(value)] for value in args))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}
    if origin in (Union, types.UnionType):
        return _either([_schema(arg) for arg in args if arg is not type(None)], nullable=type(None) in args)
    raise ValueError(f"{hint!r} has no JSON Schema, wanted str, int, float, bool, list, dict, Literal or a union")


def _either(schemas: list[dict[str, Any]], *, nullable: bool) -> dict[str, Any]:
    if len(schemas) == 1:
        (schema,) = schemas
    elif all(schema.keys() == {"type"} for schema in schemas):
        schema = {"type": sorted({schema["type"] for schema in schemas})}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if nullable else schema
