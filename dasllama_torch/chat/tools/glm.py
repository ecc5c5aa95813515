"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`, line breaks in
between in some of them.
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
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_BREAK = f"{LINE}?"


def _read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_until(_OPEN)):
        reader.open(_OPEN)
        name, marker = yield from reader.until(_KEY, _CLOSE, _OPEN)
        name = name.strip()
        if marker in (_KEY, _CLOSE):
            reader.name(name)
        while marker == _KEY:
            marker = yield from _read_argument(reader, name)
        if marker == _CLOSE:
            reader.end_keys()
        else:
            reader.put_back(marker)
        reader.close(marker == _CLOSE)


def _read_argument(reader: Reader, name: str) -> Steps[str]:
    """The rest of a key, and its value. Returns the marker that comes next."""
    key, marker = yield from reader.until(_KEY_END, _VALUE, _CLOSE)
    if marker == _KEY_END:
        _, marker = yield from reader.until(_VALUE, _CLOSE)
    if marker != _VALUE:
        return marker
    reader.key(key)
    yield from read_value(reader, argument_types(reader.tools, name, key), _VALUE_END)
    _, marker = yield from reader.until(_KEY, _CLOSE, _OPEN)
    return marker


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    """With the line breaks of GLM-4.6 or, as GLM-4.7 has it, without."""
    choices = one_of([_function_rule(rules, tool) for tool in tools])
    call = rules.add(sequence(rules.marker(_OPEN), choices, rules.marker(_CLOSE)))
    return sequence(LINES, repeated(call, _BREAK, several))


def _function_rule(rules: Rules, tool: Callee) -> str:
    parts = [literal(tool.name), _BREAK]
    for key, schema, required in tool.arguments(_KEY_END, _VALUE, _CLOSE):
        with tool.naming(key):
            value = rules.argument(schema, tool.parameters, _VALUE_END)
        head = sequence(rules.marker(_KEY), literal(key), rules.marker(_KEY_END), _BREAK, rules.marker(_VALUE))
        argument = head, value, _BREAK
        parts.append(sequence(*argument) if required else optional(*argument))
    return sequence(*parts)


def _definitions(tools: Sequence[Tool]) -> str:
    """As the template of GLM-4.6 has it."""
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n{xml_definitions(tools)}\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
    )


def _calls(calls: Sequence[Function]) -> str:
    return "\n".join(map(_call, calls))


def _call(call: Function) -> str:
    arguments = decoded(call.get("arguments"))
    if isinstance(arguments, Mapping):
        pairs = (
            f"{_KEY}{key}{_KEY_END}\n{_VALUE}{value if isinstance(value, str) else dumps(value)}{_VALUE_END}\n"
            for key, value in arguments.items()
        )
        arguments = "".join(pairs)
    return f"{_OPEN}{call['name']}\n{arguments}{_CLOSE}"


FORMAT = ToolFormat(
    name="glm",
    read=_read,
    grammar=_grammar,
    openings=(_OPEN,),
    inline=Inline(definitions=_definitions, calls=_calls, results=xml_results, result_role="observation"),
)
