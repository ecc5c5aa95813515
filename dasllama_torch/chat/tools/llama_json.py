"""Llama 3.1 and later: the whole reply is `{"name": ..., "parameters": {...}}`, or several of them with `;` between."""

from collections.abc import Sequence

from .callee import Callee
from .calls import arguments_text, dumps
from .formats import Function, Inline, Tool, ToolFormat
from .grammar import Rules
from .json_calls import read_call
from .lark import BRACE, one_of, sequence
from .stream import Reader, Steps

_TAG = "<|python_tag|>"  # comes before calls of built-in tools, and before others where the model takes them for such


def _read(reader: Reader) -> Steps[None]:
    marker = yield from reader.follows(_TAG, "{")
    while marker:
        reader.open(marker)
        if marker == "{":
            reader.put_back(marker)
        complete = yield from read_call(reader, needs_arguments=True)
        reader.close(complete)
        marker = yield from reader.follows(";", "{")
    yield from reader.pass_until()


def _grammar(rules: Rules, tools: Sequence[Callee], several: bool) -> str:
    """One call always: the templates refuse a turn with several."""
    choices = [rules.call(tool, "parameters") for tool in tools]
    return sequence(one_of(choices), BRACE)


def _definitions(tools: Sequence[Tool]) -> str:
    """As the template of Llama 3.1 has it."""
    shown = "".join(f"{dumps(tool, indent=4)}\n\n" for tool in tools)
    return (
        "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
        'best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of '
        f"argument name and its value}}.Do not use variables.\n\n{shown}"
    )


def _calls(calls: Sequence[Function]) -> str:
    return "; ".join(f'{{"name": {dumps(call["name"])}, "parameters": {arguments_text(call)}}}' for call in calls)


def _results(results: Sequence[str]) -> str:
    return "\n".join(map(dumps, results))


FORMAT = ToolFormat(
    name="llama-json",
    read=_read,
    grammar=_grammar,
    openings=(_TAG,),  # where there is none, a call is JSON like any other
    inline=Inline(
        definitions=_definitions,
        calls=_calls,
        results=_results,
        before_calls="",
        result_role="ipython",
        in_user_message=True,
    ),
)
