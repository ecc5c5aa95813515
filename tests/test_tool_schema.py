"""What becomes of a Python function as a tool: what transformers makes of it."""

from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from dasllama_torch.chat.tools.schema import declared


def get_weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C"):
    """
    The weather of the next days.

    Args:
        city: A town, with its
            country.
        days (int): How many.
        unit: Of the temperatures.
    """


def everything(
    a: list[str],
    b: dict[str, float],
    c: int | None,
    d: Optional[list[int]],  # noqa: UP045
    e: int | str,
    f: list[int] | str,
    g: Literal[1, 2, None],
    h: bool,
    i: Any,
    j: list,
    k: dict,
):
    """Takes what can be said.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
        f: f
        g: g
        h: h
        i: i
        j: j
        k: k
    """


def nothing():
    """Takes nothing.

    Returns:
        Nothing.
    """


@pytest.mark.parametrize("function", [get_weather, everything, nothing])
def test_as_transformers(function):
    assert declared(function) == get_json_schema(function)


def test_descriptions_may_be_missing():
    def f(x: int):
        pass

    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert declared(f)["function"] == {"name": "f", "description": "", "parameters": parameters}


def test_methods_have_no_self():
    class Station:
        def read(self, sensor: str):
            """Reads."""

    assert list(declared(Station().read)["function"]["parameters"]["properties"]) == ["sensor"]


def test_openais_form():
    function = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    assert declared(tool) is tool
    assert declared(function) == tool


def untyped(x):
    pass


def rest(*x: int):
    pass


def of_a_class(x: list[pytest.Item]):
    pass


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (untyped, "tool 'untyped': argument 'x' needs a type hint"),
        (rest, "tool 'rest': argument 'x' needs"),
        (of_a_class, "tool 'of_a_class': argument 'x': .*Item.* has no JSON Schema"),
        ({"type": "function", "function": {}}, "has no name"),
        ({"name": 3}, "has no name"),
        ("f", "a tool is str"),
    ],
)
def test_what_is_no_tool(tool, message):
    with pytest.raises(ValueError, match=message):
        declared(tool)
