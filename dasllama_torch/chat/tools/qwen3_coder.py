"""Qwen3-Coder, Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, with a
line break on each side of a value. Models leave the outer tags out now and then.
"""

from collections.abc import Mapping, Sequence

from .callee import Callee
from .calls import decoded, dumps
from .formats import Function, Inline, Tool, ToolFormat
from .grammar import LINES, Rules
from .hermes import xml_definitions, xml_results
from .lark import LINE, literal, one_of, optional, repeated, sequence
from .stream import Reader, Steps
from .typed import argument_types, read_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# A value goes on over other tags, unless they begin a line: then its own end is missing.
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}", f"\n{_CLOSE}")
_NOT_IN_TEXT = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)  # of a forced call, wherever in it


def _read(reader: Reader) -> Steps[None]:
    while marker := (yield from reader.pass_until(_OPEN, _FUNCTION)):
        reader.open(marker)
        if marker == _OPEN:
            marker = yield from reader.follows(_FUNCTION)
        complete = False
        if marker == _FUNCTION:
            complete = yield from _read_function(reader)
        yield from reader.follows(_CLOSE)
        reader.close(complete)


def _read_function(reader: Reader) -> Steps[bool]:
    """The name and the parameters, up to the end of the function."""
    name, marker = yield from reader.until(">", "<", "\n")
    if marker != ">":
        reader.put_back(marker)
        return False
    reader.name(name)
    while True:
        _, marker = yield from reader.until(_PARAMETER, _FUNCTION_END, _CLOSE, _OPEN)
        if marker == _PARAMETER:
            key, marker = yield from reader.until(">\n", ">")
            reader.key(key)
            marker = yield from read_value(reader, argument_types(reader.tools, name, key), *_VALUE_ENDS)
            if not marker:
                return False
            if marker not in _VALUE_ENDS[:2]:
                reader.put_back(marker)
        else:
            if marker:
                reader.end_keys()
            if marker != _FUNCTION_END:
                reader.put_back(marker)
            return marker != ""


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    choices = one_of([_function_rule(rules, tool) for tool in tools])
    call = rules.add(sequence(rules.marker(_OPEN), choices, rules.marker(_CLOSE)))
    return sequence(LINES, repeated(call, LINE, several))


def _function_rule(rules: Rules, tool: Callee) -> str:
    parts = [literal(f"\n{_FUNCTION}{tool.name}>\n")]
    for key, schema, required in tool.arguments(">"):
        with tool.naming(key):
            value = rules.argument(schema, tool.parameters, f"\n{_PARAMETER_END}", *_NOT_IN_TEXT)
        argument = (literal(f"{_PARAMETER}{key}>\n"), value, LINE)
        parts.append(sequence(*argument) if required else optional(*argument))
    return sequence(*parts, literal(f"{_FUNCTION_END}\n"))


def _definitions(tools: Sequence[Tool]) -> str:
    """As the template of Qwen3.5 has it."""
    return (
        f"# Tools\n\nYou have access to the following functions:\n\n{xml_definitions(tools)}\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n"
        "<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but "
        "NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>"
    )


def _calls(calls: Sequence[Function]) -> str:
    return "\n".join(map(_call, calls))


def _call(call: Function) -> str:
    arguments = decoded(call.get("arguments"))
    if isinstance(arguments, Mapping):
        parameters = (
            f"{_PARAMETER}{key}>\n{dumps(value) if isinstance(value, (Mapping, list)) else value}\n{_PARAMETER_END}\n"
            for key, value in arguments.items()
        )
        arguments = "".join(parameters)
    return f"{_OPEN}\n{_FUNCTION}{call['name']}>\n{arguments}{_FUNCTION_END}\n{_CLOSE}"


FORMAT = ToolFormat(
    name="qwen3-coder",
    read=_read,
    grammar=_grammar,
    openings=(_OPEN, _FUNCTION),
    inline=Inline(definitions=_definitions, calls=_calls, results=xml_results, before_calls="\n\n"),
)
