"""Harmony (gpt-oss): a message to a tool, `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`
`<|call|>`, or with the recipient after `<|start|>assistant`. Messages to nobody pass as they are, with their headers.
"""

import re
from collections.abc import Sequence

from .callee import Callee
from .formats import ToolFormat
from .grammar import Rules
from .json_calls import read_arguments
from .lark import literal, one_of, optional, sequence
from .stream import Reader, Steps

_START, _CHANNEL, _CONSTRAIN, _BODY = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")
_TO = "to="
_RECIPIENT = re.compile(rf"(?:^|[\s>]){_TO}([^\s<]+)")


def _read(reader: Reader) -> Steps[None]:
    # The prompt ends with `<|start|>assistant`: a reply begins within a header.
    marker = yield from reader.follows(_TO)
    while marker or (marker := (yield from reader.pass_until(_START, _CHANNEL))):
        reader.open(marker)
        _, marker = yield from reader.until(_BODY, _START, *_ENDS)
        recipient = _RECIPIENT.search(reader.raw)
        complete = False
        if marker == _START:
            reader.put_back(marker)
        elif marker == _BODY and recipient:
            reader.name(recipient[1].removeprefix("functions."))
            complete = yield from _read_body(reader)
        reader.close(complete)
        marker = ""


def _read_body(reader: Reader) -> Steps[bool]:
    if (yield from reader.follows(*_ENDS)):
        return True
    complete = yield from read_arguments(reader)
    if not complete:
        reader.back_to(*_ENDS, _START)
    yield from reader.skip_past(*_ENDS, before=(_START,))
    return complete


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    """One call always: its end is that of the turn. A header of its own comes first where reasoning stands before."""
    start = optional(rules.marker(_START), literal("assistant"))
    body = sequence(rules.marker(_CONSTRAIN), literal("json"), rules.marker(_BODY))
    choices = [
        sequence(literal(f"commentary {_TO}functions.{tool.name} "), body, rules.json(tool.parameters))
        for tool in tools
    ]
    return sequence(start, rules.marker(_CHANNEL), one_of(choices))


FORMAT = ToolFormat(name="harmony", read=_read, grammar=_grammar, openings=(f"{_TO}functions.",))
