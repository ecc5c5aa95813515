"""Grammars that leave a model nothing to write but tool calls, or no way to begin one.

    grammar = choice_grammar(form, tools, "required", tokenizer.special_ids())

How a call is spelled, each format says in its own file; here is what they share. What a grammar allows is a reply's
content, so where a model reasons it begins to hold behind the reasoning; line breaks that come in between are allowed.
The end of the turn is not part of it. `parse_calls` reads back whatever it allows, and the arguments are valid for
the tool's schema, but for numbers that JSON can write and Python cannot read (1e999).
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import ConstraintError

from .callee import Callee
from .calls import dumps, function_of, loads
from .json_schema import Schema, branches, types_of, with_definitions
from .lark import ANY, literal, one_of, regex, sequence, string_shapes, without
from .typed import to_json

if TYPE_CHECKING:
    from .formats import ToolFormat

REQUIRED = "required"
LINES = r"/\n{1,2}/?"  # behind reasoning there may be some
# How JSON is spelled: as `json.dumps` does, or without its spaces. Escapes of the kind \uXXXX are left out: half of a
# surrogate pair is no character.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
# What a value of another type than a string begins with, within a class of a regular expression.
_BEGINS = {"array": r"\[", "object": r"\{", "number": r"\-0-9", "integer": r"\-0-9"}
_WORDS = {"null": [None], "boolean": [True, False]}


def choice_grammar(
    form: "ToolFormat", tools: Sequence[Mapping[str, Any]], choice: str, tokens: Mapping[str, int] | None = None
) -> str:
    """The grammar of replies that call tools, in llguidance's Lark syntax. choice: "required" for any of the tools, as
    often as a reply of the format may call them, or the name of the one that is called, once. tokens: text -> id of the
    vocabulary's special tokens (`Tokenizer.special_ids`); without them all is written as text.

    ValueError for a choice that is none. ConstraintError for a tool that no call could name, a schema that is none, and
    one that the format cannot hold a model to; what is left of a schema llguidance judges when it takes the grammar.
    """
    known: dict[str, Callee] = {}
    for function in map(function_of, tools):
        callee = Callee.of(function)
        known.setdefault(callee.name, callee)
    if not known or choice not in (REQUIRED, *known):
        raise ValueError(f"tool_choice is {choice!r}, wanted {REQUIRED!r} or one of {', '.join(known) or 'none'}")
    rules = Rules(tokens or {})
    several = choice == REQUIRED
    return rules.source(form.grammar(rules, [*known.values()] if several else [known[choice]], several))


def no_call_grammar(openings: Sequence[str]) -> str:
    """The grammar of replies in which none of these texts is, each of which begins a call."""
    return f"start: TEXT\nTEXT: {ANY} & {without(openings)}\n"


class Rules:
    """The rules of a grammar. What the methods return are expressions, to be put one behind the other (lark.py).

    tokens: text -> id of the vocabulary's special tokens. A marker that is none of them is written as text.
    """

    def __init__(self, tokens: Mapping[str, int]):
        self.tokens = tokens
        self._lines: list[str] = []

    def add(self, body: str) -> str:
        name = self.later()
        self.define(name, body)
        return name

    def later(self) -> str:
        """A rule that `define` will say, such as one that contains itself."""
        self._lines.append("")
        return f"rule_{len(self._lines)}"

    def define(self, rule: str, body: str, options: str = "") -> None:
        self._lines[int(rule.removeprefix("rule_")) - 1] = f"{rule}{options}: {body}"

    def source(self, start: str) -> str:
        """The grammar whose start is that expression."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def marker(self, text: str) -> str:
        """The token of that text, or the text."""
        return f"<[{self.tokens[text]}]>" if text in self.tokens else literal(text)

    def json(self, schema: Schema) -> str:
        """JSON that is valid for the schema."""
        options = {"x-guidance": {**_JSON, **schema.get("x-guidance", {})}}
        try:
            return self.add(f"%json {json.dumps({**schema, **options}, allow_nan=False)}")
        except (TypeError, ValueError, RecursionError) as e:
            raise ConstraintError(f"JSON schema: it holds what is no JSON: {e}") from None

    def call(self, tool: Callee, key: str) -> str:
        """{"name": ..., key: {...}, but for the last brace."""
        return sequence(literal(f'{{"name": {dumps(tool.name)}, {dumps(key)}: '), self.json(tool.parameters))

    def text(self, end: str, *forbidden: str, shapes: Sequence[str] = ()) -> str:
        """Text in which no marker is, neither `end` nor one of `forbidden`, and `end` behind it. shapes: terminals that
        it fits, all of them.
        """
        self._lines.append(f"TEXT_{len(self._lines)}: {' & '.join([ANY, *shapes, without([end, *forbidden])])}")
        terminal = f"TEXT_{len(self._lines) - 1}"
        if end in self.tokens:
            return sequence(terminal, self.marker(end))
        # By itself the text would take the beginning of the marker, and then could not go on.
        rule = self.later()
        self.define(rule, sequence(terminal, literal(end)), "[lazy]")
        return rule

    def argument(self, schema: Any, root: Schema, end: str, *forbidden: str) -> str:
        """A value as bare text, as `typed.read_value` takes it, and the marker that ends it; in strings none of
        `forbidden` is. root: the schema of all arguments.
        """
        found, kinds = branches(schema, root), types_of(schema, root)
        if {} in found:
            found, kinds = [{"type": "string"}, {"type": ["array", "object"]}], frozenset({"array", "object"})
        choices: list[str] = []
        for branch in found:
            kind = branch.get("type")
            if "enum" in branch or kind in ("null", "boolean"):
                spelled = _spelled(branch.get("enum", _WORDS.get(kind, [])), kinds)
                choices += [self._ended(text, end) for text in spelled if not any(m in text for m in (end, *forbidden))]
            elif kind == "string":
                shapes = string_shapes(branch) + [f"~{regex(other)}" for other in _read_as_others(kinds)]
                choices.append(self.text(end, *forbidden, shapes=shapes))
            else:
                choices.append(sequence(self.json(with_definitions(branch, root)), self.marker(end)))
        if not choices:
            raise ConstraintError("JSON schema: no value of it can be written")
        return one_of(choices)

    def _ended(self, text: str, end: str) -> str:
        return sequence(literal(text), self.marker(end)) if end in self.tokens else literal(text + end)


def _spelled(values: Sequence[Any], kinds: frozenset[str]) -> list[str]:
    """Values as bare text, in JSON's words and in Python's, those that are read back as what they are."""
    texts = [(text, value) for value in values for text in _texts(value)]
    return [text for text, value in texts if loads(to_json(text, kinds)) == value]


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [dumps(value), str(value)] if value is None or isinstance(value, bool) else [dumps(value)]


def _read_as_others(kinds: frozenset[str]) -> list[str]:
    """Regular expressions of bare texts that are read as a value of another type than a string."""
    found = []
    if begins := "".join(_BEGINS[kind] for kind in sorted(kinds & _BEGINS.keys())):
        found.append(rf"[ \t\n\r]*[{begins}](?s:.*)")
    if kinds & _WORDS.keys():
        found.append(r"[\s\x1c-\x1f]*(?:true|false|null|True|False|None)[\s\x1c-\x1f]*")
    return found
