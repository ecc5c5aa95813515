"""Text from standard input."""

import sys

import typer


def read_text(argument: str | None) -> str:
    """The argument if there is one, else standard input without its final line break. typer.BadParameter for what is
    not UTF-8."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D at the start of a line ends it", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise typer.BadParameter(f"standard input is not UTF-8 text: byte {e.start} is {e.object[e.start]:#04x}") from e
    return text.removesuffix("\n").removesuffix("\r")
