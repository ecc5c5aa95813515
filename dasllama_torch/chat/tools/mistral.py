"""Mistral, in its three spellings: `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]` of the first ones,
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` of Small 3.2, and `[TOOL_CALLS]name[ARGS]{...}` of the later ones.
"""

from collections.abc import Sequence

from .callee import Callee
from .formats import ToolFormat
from .grammar import Rules
from .json_calls import read_arguments, read_call
from .lark import BRACE, literal, one_of, optional, repeated, sequence
from .stream import Reader, Steps

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NINE = "/[a-zA-Z0-9]{9}/"  # how the ids of these models look


def _read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_until(_CALLS)):
        reader.open(_CALLS)
        if (yield from reader.follows("[")):
            yield from _read_list(reader)
        else:
            yield from _read_named(reader)


def _read_list(reader: Reader) -> Steps[None]:
    marker = ","
    while marker == ",":
        complete = yield from read_call(reader)
        if not complete:
            reader.back_to(_CALLS)
        marker = yield from reader.follows(",", "]")
        if marker == ",":
            reader.put_back(marker)
        reader.close(complete)
        if marker == ",":
            yield from reader.follows(marker)
            reader.open(marker)


def _read_named(reader: Reader) -> Steps[None]:
    name, marker = yield from reader.until(_ID, _ARGUMENTS, _CALLS)
    complete = False
    if marker == _ID:
        call_id, marker = yield from reader.until(_ARGUMENTS, _CALLS)
        reader.id(call_id)
    if marker == _ARGUMENTS:
        reader.name(name.strip())
        complete = yield from read_arguments(reader)
        if not complete:
            reader.back_to(_CALLS)
    else:
        reader.put_back(marker)
    reader.close(complete)


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    """With the name before the arguments where the vocabulary has the marker between them, else the list."""
    if _ARGUMENTS in rules.tokens:
        between = [optional(rules.marker(_ID), _NINE)] if _ID in rules.tokens else []
        between.append(rules.marker(_ARGUMENTS))
        choices = [sequence(literal(tool.name), *between, rules.json(tool.parameters)) for tool in tools]
        return repeated(rules.add(sequence(rules.marker(_CALLS), one_of(choices))), "", several)
    call_id = optional(literal(', "id": "'), _NINE, literal('"'))
    call = rules.add(sequence(one_of([rules.call(tool, "arguments") for tool in tools]), call_id, BRACE))
    space = optional(literal(" "))  # the models of these vocabularies write one
    return sequence(rules.marker(_CALLS), space, literal("["), repeated(call, literal(", "), several), literal("]"))


FORMAT = ToolFormat(name="mistral", read=_read, grammar=_grammar, openings=(_CALLS,))
