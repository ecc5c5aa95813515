"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:1.5,list:[true,{key:...}]}<tool_call|>`. Keys are bare, texts
stand between quote tokens and have no escapes.
"""

from collections.abc import Sequence
from typing import Any

from dasllama_torch.errors import ConstraintError

from .callee import Callee
from .calls import dumps, loads
from .formats import ToolFormat
from .grammar import Rules
from .json_schema import KEYWORDS, Schema, bounds, branches, members_of, with_definitions
from .lark import literal, one_of, optional, repeated, sequence, string_shapes
from .stream import Reader, Steps

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NULL = one_of([literal("null"), literal("None")])
_WORD = "/[A-Za-z_][A-Za-z0-9_]*/"  # a key that the schema does not name


def _read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_until(_OPEN)):
        reader.open(_OPEN)
        head, marker = yield from reader.until("{", _CLOSE, _OPEN)
        complete = False
        if marker == "{" and head.strip().startswith("call:"):
            reader.name(head.strip().removeprefix("call:"))
            complete = yield from _read_arguments(reader)
            if not complete:
                reader.back_to(_CLOSE, _OPEN)
        else:
            reader.put_back(marker)
        yield from reader.skip_past(_CLOSE, before=(_OPEN,))
        reader.close(complete)


def _read_arguments(reader: Reader) -> Steps[bool]:
    """Writes JSON as the text comes: each word and bracket of it has its counterpart there."""
    reader.arguments("{")
    depth = 1
    while depth:
        word, marker = yield from reader.until(_QUOTE, _CLOSE, _OPEN, *"{}[]:,")
        if marker in ("", _CLOSE, _OPEN):
            reader.put_back(marker)
            return False
        if word.strip():
            reader.arguments(_word(word.strip(), is_key=marker == ":"))
        if marker == _QUOTE:
            if not (yield from _read_text(reader)):
                return False
        else:
            reader.arguments(marker)
            depth += (marker in "{[") - (marker in "}]")
    return True


def _read_text(reader: Reader) -> Steps[bool]:
    """Whether the text is closed."""
    reader.arguments('"')
    marker = None
    while marker is None:
        part, marker = yield from reader.take(_QUOTE)
        reader.arguments(dumps(part)[1:-1])
    if marker:
        reader.arguments('"')
    return marker == _QUOTE


def _word(word: str, *, is_key: bool) -> str:
    if is_key:
        return dumps(word)
    if word == "None":
        return "null"  # the template writes Python's word
    try:
        return dumps(loads(word))
    except ValueError:
        return dumps(word)


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    choices = []
    for tool in tools:
        members = []
        values = _Values(rules, tool.parameters)
        for key, schema, required in _in_order(tool.arguments()):
            with tool.naming(key):
                members.append((sequence(_key(key), values.of(schema)), required))
        choices.append(sequence(literal(f"call:{tool.name}{{"), _members(rules, members), literal("}")))
    call = rules.add(sequence(rules.marker(_OPEN), one_of(choices), rules.marker(_CLOSE)))
    return repeated(call, "", several)


class _Values:
    """The rules of values as this format spells them. root: the schema that they are parts of."""

    def __init__(self, rules: Rules, root: Schema):
        self._rules = rules
        self._root = root
        self._known: dict[int, str] = {}  # by the identity of the schema: one may contain itself
        self._any = ""

    def of(self, schema: Any) -> str:
        if id(schema) not in self._known:
            name = self._known[id(schema)] = self._rules.later()
            self._rules.define(name, one_of([self._branch(branch) for branch in branches(schema, self._root)]))
        return self._known[id(schema)]

    def _branch(self, branch: Schema) -> str:
        if "enum" in branch:
            if not branch["enum"]:
                raise ConstraintError("JSON schema: no value of it can be written")
            return one_of([self._spelled(value) for value in branch["enum"]])
        kind = branch.get("type")
        if kind is None:
            return self._anything()
        if kind == "null":
            return _NULL
        if kind == "string":
            return self._text(string_shapes(branch))
        if kind == "array":
            return self._array(branch)
        if kind == "object":
            return self._object(branch)
        return self._rules.json(with_definitions(branch, self._root))

    def _array(self, branch: Schema) -> str:
        _only(branch, "items", "minItems", "maxItems")
        low, high = bounds(branch, "minItems", "maxItems")
        if high == 0 or (branch.get("items") is False and not low):
            return literal("[]")
        item = self.of(branch.get("items", True))
        items = item
        if high != 1:
            items += f" ({literal(',')} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        return sequence(literal("["), items if low else optional(items), literal("]"))

    def _object(self, branch: Schema) -> str:
        _only(branch, "properties", "required", "additionalProperties")
        others = branch.get("additionalProperties", True)
        members = [
            (sequence(_key(key), self.of(value)), required) for key, value, required in _in_order(members_of(branch))
        ]
        if members or others is False:
            inner = _members(self._rules, members)
        else:
            member = self._rules.add(sequence(_WORD, literal(":"), self.of(others)))
            inner = optional(repeated(member, literal(",")))
        return sequence(literal("{"), inner, literal("}"))

    def _anything(self) -> str:
        if not self._any:
            self._any = self._rules.later()
            scalar = self._rules.json({"type": ["number", "boolean", "null"]})
            several = repeated(self._any, literal(","))
            members = repeated(self._rules.add(sequence(_WORD, literal(":"), self._any)), literal(","))
            choices = [
                scalar,
                self._text([]),
                sequence(literal("["), optional(several), literal("]")),
                sequence(literal("{"), optional(members), literal("}")),
            ]
            self._rules.define(self._any, one_of(choices))
        return self._any

    def _text(self, shapes: Sequence[str]) -> str:
        return sequence(self._rules.marker(_QUOTE), self._rules.text(_QUOTE, shapes=shapes))

    def _spelled(self, value: Any) -> str:
        """A value of an enum."""
        if isinstance(value, str):
            if _QUOTE in value:
                raise ConstraintError(f"JSON schema: {_QUOTE!r} cannot be in a string of this format")
            return sequence(self._rules.marker(_QUOTE), literal(value), self._rules.marker(_QUOTE))
        if isinstance(value, (list, dict)):
            raise ConstraintError("JSON schema: arrays and objects in an enum are not implemented for this format")
        return _NULL if value is None else literal(dumps(value))


def _in_order(members: list[tuple[str, Any, bool]]) -> list[tuple[str, Any, bool]]:
    """As the template sorts keys, in what it declares and in calls."""
    return sorted(members, key=lambda member: member[0].lower())


def _members(rules: Rules, members: Sequence[tuple[str, bool]]) -> str:
    """Members in their order, commas between those that are there. members: (expression, whether it is required)."""
    first = behind = ""  # the members from here on, as the first ones and behind others
    for member, required in reversed(members):
        rest = rules.add(behind) if behind else ""
        begun = sequence(member, rest)
        if not required:
            begun = f"({begun} | {first})" if first else optional(begun)
        first = begun
        behind = sequence("(", literal(","), member, ")" if required else ")?", rest)
    return first


def _key(key: str) -> str:
    if not key or key != key.strip() or any(c in key for c in "{}[]:,<"):
        raise ConstraintError(f"JSON schema: {key!r} cannot be a key in this format")
    return literal(f"{key}:")


def _only(branch: Schema, *keywords: str) -> None:
    if beyond := branch.keys() & (KEYWORDS[branch["type"]] - {*keywords}):
        raise ConstraintError(f"JSON schema: {min(beyond)!r} of an {branch['type']} is not implemented for this format")


FORMAT = ToolFormat(name="gemma4", read=_read, grammar=_grammar, openings=(_OPEN,))
