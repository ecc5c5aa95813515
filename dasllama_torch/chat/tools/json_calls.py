"""Calls whose arguments are JSON, read while they arrive."""

from collections.abc import Callable

from .calls import ARGUMENT_KEYS, decoded, dumps, loads
from .stream import Reader, Steps

_SPACE = " \t\r\n"
_OUTSIDE_STRINGS = frozenset(_SPACE + ",:+-.0123456789eEtrufalsn")  # besides quotes and brackets


def read_arguments(reader: Reader) -> Steps[bool]:
    """Takes an object of arguments, or a string that holds one. Whether it came to its end; if not, what cannot be part
    of it is still there.
    """
    arguments = _Arguments(reader)
    complete = yield from _read_value(reader, '{"', arguments.add)
    if complete:
        arguments.end()
    return complete


def read_call(reader: Reader, *, needs_arguments: bool = False) -> Steps[bool]:
    """Takes {"name": ..., "arguments": {...}}, the members in any order and others among them. Whether it came to its
    end; if not, what cannot be part of it is still there. needs_arguments: without them it is no call.
    """
    members = _Members(reader)
    complete = yield from _read_value(reader, "{", members.add)
    if complete and not needs_arguments:
        members.begin_call()
    return complete


def _read_value(reader: Reader, first: str, visit: Callable[[str, bool, int], None]) -> Steps[bool]:
    """Takes JSON that begins with one of `first`, and shows each character: (c, whether in a string, depth after it).

    It follows strings and brackets, and stops at what stands in no JSON; `loads` judges the rest. So a marker within a
    string is text, and one that comes too early ends the call.
    """
    depth, in_string, escaped, begun = 0, False, False, False
    while True:
        text, end = yield from reader.take()
        for i, c in enumerate(text):
            was_in_string = in_string
            if in_string:
                in_string = escaped or c != '"'
                escaped = c == "\\" and not escaped
            elif begun or c in first:
                begun = True
                in_string = c == '"'
                depth += (c in "{[") - (c in "}]")
                if c not in '"{}[]' and c not in _OUTSIDE_STRINGS:
                    reader.put_back(text[i:])
                    return False
            elif c not in _SPACE:
                reader.put_back(text[i:])
                return False
            visit(c, was_in_string, depth)
            if begun and not (depth or in_string):
                reader.put_back(text[i + 1 :])
                return True
        if end is not None:
            return False


class _Arguments:
    """Arguments as they come: an object is handed on at once, anything else when it has ended."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self._is_object = False
        self._other: list[str] = []

    def add(self, c: str, in_string: bool, depth: int) -> None:
        if self._is_object:
            # Models write line breaks into strings; what is handed on is to be valid.
            self._reader.arguments(dumps(c)[1:-1] if in_string and c < " " else c)
        elif self._other or c not in _SPACE + "{":
            self._other.append(c)
        elif c == "{":
            self._is_object = True
            self._reader.arguments(c)

    def end(self) -> None:
        if self._is_object:
            return
        text = "".join(self._other)
        try:
            value = decoded(loads(text))
        except ValueError:
            value = text
        self._reader.arguments(value if isinstance(value, str) else dumps(value))


class _Members:
    """The members of an object that is a call. The first arguments count, and the first name."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self._key: str | None = None
        self._text: list[str] = []  # of the key, or of a value that is not the arguments
        self._name: str | None = None
        self._arguments: _Arguments | None = None
        self._in_arguments = False

    def add(self, c: str, in_string: bool, depth: int) -> None:
        if not in_string and depth == 1 and c == "{":
            return  # the object's own
        if not in_string and depth == 1 and c == ":":
            self._begin_value()
        elif not in_string and (depth == 0 or (depth == 1 and c == ",")):
            self._end_value()
        elif self._in_arguments:
            self._arguments.add(c, in_string, depth)
        else:
            self._text.append(c)

    def begin_call(self) -> None:
        if self._name is not None:
            self._reader.name(self._name)

    def _begin_value(self) -> None:
        self._key = self._value() or ""
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            self._in_arguments = True
            self._arguments = _Arguments(self._reader)
            self.begin_call()

    def _end_value(self) -> None:
        if self._in_arguments:
            self._arguments.end()
            self._in_arguments = False
        elif self._key == "name" and self._name is None:
            self._name = self._value()
            if self._arguments:
                self.begin_call()
        elif self._key == "id" and (call_id := self._value()):
            self._reader.id(call_id)
        self._key = None
        self._text = []

    def _value(self) -> str | None:
        """The string that was read; None if it is none."""
        text, self._text = "".join(self._text), []
        try:
            value = loads(text)
        except ValueError:
            return None
        return value if isinstance(value, str) else None
