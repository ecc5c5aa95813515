"""Expressions in llguidance's Lark syntax (its docs/syntax.md): texts, regular expressions, sequences, choices."""

import json
import re
from collections.abc import Sequence
from typing import Any

from dasllama_torch.errors import ConstraintError

from .json_schema import Schema, bounds

ANY = "/(?s:.*)/"
# Classes of characters that are ASCII in JSON Schema (ECMA 262), and not in Rust.
_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def literal(text: str) -> str:
    return json.dumps(text)


LINE, BRACE = literal("\n"), literal("}")


def regex(pattern: str) -> str:
    """A regular expression, of Rust's syntax, between slashes."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t") + "/"


def without(texts: Sequence[str]) -> str:
    """A terminal of what has none of the texts in it."""
    marks = "|".join(re.escape(text).replace("\\\n", r"\n") for text in texts)
    return f"~{regex(f'(?s:.*)(?:{marks})(?s:.*)')}"


def sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def optional(*parts: str) -> str:
    return f"({sequence(*parts)})?"


def one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def repeated(item: str, between: str, several: bool = True) -> str:
    """An item, and further ones behind it where there may be several."""
    return sequence(item, f"({sequence(between, item)})*") if several else item


def string_shapes(schema: Schema) -> list[str]:
    """Terminals that a string fits, all of them, if it is valid."""
    shapes = []
    low, high = bounds(schema, "minLength", "maxLength")
    if low or high is not None:
        shapes.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    if "pattern" in schema:
        shapes.append(regex(_searched(schema["pattern"])))
    return shapes


def _searched(pattern: Any) -> str:
    """A regular expression for all of a string in which the pattern is found."""
    if not isinstance(pattern, str):
        raise ConstraintError(f"JSON schema: pattern is {pattern!r}, wanted a regular expression")
    outside = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]", "..", pattern, flags=re.DOTALL)  # escapes and classes blotted out
    depths = [outside[:i].count("(") - outside[:i].count(")") for i, c in enumerate(outside) if c == "|"]
    if 0 in depths and set("^$") & set(outside):
        raise ConstraintError(f"JSON schema: pattern {pattern!r} has ^ or $ within, wanted them around all of it")
    begins, ends = outside.startswith("^"), outside.endswith("$")
    inner = re.sub(r"\\(.)", lambda found: _ASCII.get(found[1], found[0]), pattern[begins : len(pattern) - ends])
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
