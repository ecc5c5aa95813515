"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:1.5,list:[true,{key:...}]}<tool_call|>`. Keys are bare, texts
stand between quote tokens and have no escapes.
"""

from .calls import dumps, loads
from .formats import ToolFormat
from .stream import Reader, Steps

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def _read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_until(_OPEN)):
        reader.open(_OPEN)
        head, marker = yield from reader.until("{", _CLOSE, _OPEN)
        complete = False
        if marker == "{" and head.strip().startswith("call:"):
            reader.name(head.strip().removeprefix("call:"))
            complete = yield from _read_arguments(reader)
            if not complete:
                reader.back_to(_CLOSE, _OPEN)
        else:
            reader.put_back(marker)
        yield from reader.skip_past(_CLOSE, before=(_OPEN,))
        reader.close(complete)


def _read_arguments(reader: Reader) -> Steps[bool]:
    """Writes JSON as the text comes: each word and bracket of it has its counterpart there."""
    reader.arguments("{")
    depth = 1
    while depth:
        word, marker = yield from reader.until(_QUOTE, _CLOSE, _OPEN, *"{}[]:,")
        if marker in ("", _CLOSE, _OPEN):
            reader.put_back(marker)
            return False
        if word.strip():
            reader.arguments(_word(word.strip(), is_key=marker == ":"))
        if marker == _QUOTE:
            if not (yield from _read_text(reader)):
                return False
        else:
            reader.arguments(marker)
            depth += (marker in "{[") - (marker in "}]")
    return True


def _read_text(reader: Reader) -> Steps[bool]:
    """Whether the text is closed."""
    reader.arguments('"')
    marker = None
    while marker is None:
        part, marker = yield from reader.take(_QUOTE)
        reader.arguments(dumps(part)[1:-1])
    if marker:
        reader.arguments('"')
    return marker == _QUOTE


def _word(word: str, *, is_key: bool) -> str:
    if is_key:
        return dumps(word)
    if word == "None":
        return "null"  # the template writes Python's word
    try:
        return dumps(loads(word))
    except ValueError:
        return dumps(word)


FORMAT = ToolFormat(name="gemma4", read=_read)
