"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Sequence

from .callee import Callee
from .calls import arguments_text, dumps
from .formats import Function, Inline, Tool, ToolFormat
from .grammar import LINES, Rules
from .json_calls import read_call
from .lark import BRACE, LINE, one_of, repeated, sequence
from .stream import Reader, Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_until(_OPEN)):
        reader.open(_OPEN)
        complete = yield from read_call(reader)
        if not complete:
            reader.back_to(_CLOSE, _OPEN)
        yield from reader.skip_past(_CLOSE, before=(_OPEN,))
        reader.close(complete)


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    choices = one_of([rules.call(tool, "arguments") for tool in tools])
    call = rules.add(sequence(rules.marker(_OPEN), LINE, choices, BRACE, LINE, rules.marker(_CLOSE)))
    return sequence(LINES, repeated(call, LINE, several))


def _definitions(tools: Sequence[Tool]) -> str:
    """As the template of Qwen2.5 has it."""
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n{xml_definitions(tools)}\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _calls(calls: Sequence[Function]) -> str:
    return "\n".join(
        f'{_OPEN}\n{{"name": {dumps(call["name"])}, "arguments": {arguments_text(call)}}}\n{_CLOSE}' for call in calls
    )


def xml_definitions(tools: Sequence[Tool]) -> str:
    lines = "".join(f"\n{dumps(tool)}" for tool in tools)
    return f"<tools>{lines}\n</tools>"


def xml_results(results: Sequence[str]) -> str:
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


FORMAT = ToolFormat(
    name="hermes",
    read=_read,
    grammar=_grammar,
    openings=(_OPEN,),
    inline=Inline(definitions=_definitions, calls=_calls, results=xml_results),
)
