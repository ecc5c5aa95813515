"""Mistral, in its three spellings: `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]` of the first ones,
`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` of Small 3.2, and `[TOOL_CALLS]name[ARGS]{...}` of the later ones.
"""

from .formats import ToolFormat
from .json_calls import read_arguments, read_call
from .stream import Reader, Steps

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


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


FORMAT = ToolFormat(name="mistral", read=_read)
