"""Tools as a grammar takes them: a name, and the schema of an object."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dasllama_torch.errors import ConstraintError

from .json_schema import ASSERTIONS, Schema, members_of
from .stream import NAME


@dataclass(frozen=True, slots=True)
class Callee:
    """A tool that may be called. parameters: the schema of its arguments, an object's. Arguments that are not declared
    are left out, unless the schema speaks of them.
    """

    name: str
    parameters: Schema

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> "Callee":
        """ConstraintError for a name that no parser takes for one, and for parameters of another form."""
        name, schema = function.get("name"), function.get("parameters") or {}
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConstraintError(f"tool {name!r}: no call can have that name; wanted no space, quote, <>{{}} in it")
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise ConstraintError(f"tool {name!r}: wanted the JSON schema of an object as parameters")
        schema = {"type": "object", "properties": {}, **schema}
        declared, required = schema["properties"], schema.get("required", [])
        if not isinstance(declared, Mapping) or not isinstance(required, list) or not all(map(_is_text, required)):
            raise ConstraintError(f"tool {name!r}: wanted an object as properties, and a list of names as required")
        if not schema.keys() & (ASSERTIONS - {"type", "properties", "required"}):
            schema["additionalProperties"] = not declared.keys() >= set(required)
        return cls(name, schema)

    def arguments(self, *forbidden: str) -> list[tuple[str, Any, bool]]:
        """(key, schema, whether it is required) of each argument, for formats that write them one by one and cannot
        have any of `forbidden` in a key. ConstraintError for a schema that says more than that.
        """
        schema = self.parameters
        if beyond := schema.keys() & (ASSERTIONS - {"type", "properties", "required", "additionalProperties"}):
            raise ConstraintError(f"tool {self.name!r}: {min(beyond)!r} of all arguments together is not implemented")
        found = members_of(schema)
        for key, _, _ in found:
            if marker := next((marker for marker in forbidden if marker in key), None):
                raise ConstraintError(f"tool {self.name!r}, argument {key!r}: this format cannot have {marker!r} in it")
        return found

    @contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """Errors name the argument that they are about."""
        try:
            yield
        except ConstraintError as e:
            raise ConstraintError(f"tool {self.name!r}, argument {key!r}: {e}") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
