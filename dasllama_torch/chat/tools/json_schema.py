"""The JSON schemas of tools' arguments, as far as formats without JSON have to understand them themselves.

They spell a string in another way than a number, so they must know the types that a value may have. What a schema says
beyond that is llguidance's to enforce.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dasllama_torch.errors import ConstraintError

Schema = Mapping[str, Any]

FITS = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: FITS["number"](value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}
DEFINITIONS = ("$defs", "definitions")
# The keywords that make values of a type invalid, and those that can do so to any value. All else in a schema is
# annotation, `format` too (JSON Schema 2020-12).
_OF_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
KEYWORDS = {
    "string": frozenset(["minLength", "maxLength", "pattern"]),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "array": frozenset(
        ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"]
        + ["unevaluatedItems"]
    ),
    "object": frozenset(
        ["properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"]
        + ["maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"]
    ),
}
_OF_ALL = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef"])
ASSERTIONS = _OF_ALL.union(*KEYWORDS.values())


def branches(schema: Any, root: Schema) -> list[Schema]:
    """What a value may be: alternatives that have one `type`, or are an `enum` of all their values; [{}] for a schema
    that allows everything. root: where references point to.

    ConstraintError for what is no schema, and for one that cannot be taken apart like that.
    """
    return _branches(schema, root, ())


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """JSON Schema's types that a value may have; empty if that is not known: any, or hard to say."""
    try:
        found = branches(schema, root)
    except ConstraintError:
        return frozenset()
    if {} in found:
        return frozenset()
    return frozenset(kind for branch in found for kind in _types_of_branch(branch))


def _types_of_branch(branch: Schema) -> Iterable[str]:
    if "enum" in branch:
        return [type_of(value) for value in branch["enum"]]
    return [branch["type"]]


def type_of(value: Any) -> str:
    """The narrowest type of a JSON value."""
    return next((name for name, fits in FITS.items() if fits(value)), "string")


def members_of(schema: Schema) -> list[tuple[str, Any, bool]]:
    """(key, schema, whether it is required) of the members that an object is known to have, in their order."""
    declared, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", True)
    found = [(key, value, key in required) for key, value in declared.items()]
    found += [(key, others, True) for key in required if key not in declared]
    return [(key, value, needed) for key, value, needed in found if needed or value is not False]


def bounds(schema: Schema, low: str, high: str) -> tuple[int, int | None]:
    """Two keywords that say how few and how many there may be."""
    least, most = schema.get(low, 0), schema.get(high)
    known = all(isinstance(n, int) and n >= 0 for n in (least, most if most is not None else least))
    if not known or (most is not None and most < least):
        raise ConstraintError(f"JSON schema: nothing has {low} {least!r} and {high} {most!r}")
    return least, most


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """A part of a schema as one that can stand alone."""
    return {**{key: root[key] for key in DEFINITIONS if key in root}, **schema}


def _branches(schema: Any, root: Schema, seen: tuple[str, ...]) -> list[Schema]:
    if schema is True:
        return [{}]
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"{_shown(schema)} is no JSON schema that a value could fit")
    rest = {key: value for key, value in schema.items() if key in ASSERTIONS}
    if "$ref" in rest:
        ref = rest.pop("$ref")
        if ref in seen:
            raise ConstraintError(f"JSON schema: {ref!r} refers to itself")
        return _branches(_both(_find(ref, root), rest), root, (*seen, ref))
    if "enum" in rest or "const" in rest:
        return [{"enum": _values(rest)}]
    for key in ("allOf", "anyOf", "oneOf"):
        if key in rest:
            choices = _list(rest, key)
            del rest[key]
            if key == "allOf" and len(choices) != 1:
                raise ConstraintError(f"JSON schema: allOf of {len(choices)} schemas is not implemented here")
            found = [branch for choice in choices for branch in _branches(_both(choice, rest), root, seen)]
            if key == "oneOf" and not _exclusive(found):
                raise ConstraintError("JSON schema: oneOf of schemas that may fit the same value is not implemented")
            return found
    if not rest:
        return [{}]
    kinds = rest.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, Sequence) or not kinds or any(kind not in FITS for kind in kinds):
        raise ConstraintError(f"JSON schema: type is {_shown(kinds)}, wanted one of {', '.join(FITS)}, or several")
    if left := rest.keys() & {"not", "if", "$dynamicRef"}:
        raise ConstraintError(f"JSON schema: {min(left)!r} is not implemented here")
    return [{**rest, "type": kind} for kind in kinds]


def _find(ref: Any, root: Schema) -> Any:
    """What a reference within the schema points to, a JSON pointer (RFC 6901)."""
    found: Any = root
    parts = ref.removeprefix("#").split("/")[1:] if isinstance(ref, str) and ref.startswith("#") else None
    for part in parts or ():
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    if parts is None or found is None:
        raise ConstraintError(f"JSON schema: nothing is at {_shown(ref)}")
    return found


def _both(schema: Any, rest: Schema) -> Any:
    """The schema of what fits both."""
    if not rest or schema is True:
        return schema or rest
    twice = {key for key in rest if isinstance(schema, Mapping) and key in schema and schema[key] != rest[key]}
    if twice or not isinstance(schema, Mapping):
        raise ConstraintError(f"JSON schema: {min(twice, default='a schema')!r} is said twice, wanted it in one place")
    return {**schema, **rest}


def _values(schema: Schema) -> list[Any]:
    """Those of `enum` or `const` that the types allow."""
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    kinds = schema.get("type", list(FITS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return [value for value in values if any(kind in FITS and FITS[kind](value) for kind in kinds)]


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list) or not value:
        raise ConstraintError(f"JSON schema: {key} is {_shown(value)}, wanted a list that is not empty")
    return value


def _exclusive(found: Sequence[Schema]) -> bool:
    """Whether no value fits two of the branches."""
    if all("enum" in branch for branch in found):
        values = [value for branch in found for value in branch["enum"]]
        return all(value not in values[:i] for i, value in enumerate(values))
    if {} in found:
        return len(found) == 1
    kinds = [kind for branch in found for kind in set(_types_of_branch(branch))]
    return len(set(kinds)) == len(kinds) and not {"integer", "number"} <= set(kinds)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
