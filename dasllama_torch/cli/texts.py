"""Texts that a command is given: on its command line, through a pipe, in a file. All are UTF-8, and typer.BadParameter
says where one is not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


def read_text(argument: str | None) -> str:
    """The argument if there is one, else standard input without its final line break."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D at the start of a line ends it", file=sys.stderr)
    with _naming("standard input"):
        text = sys.stdin.buffer.read().decode("utf-8")
    return text.removesuffix("\n").removesuffix("\r")


def read_file(path: Path) -> str:
    with _naming(str(path)):
        return path.read_text("utf-8")


@contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as e:
        raise typer.BadParameter(f"{source} is not UTF-8 text: byte {e.start} is {e.object[e.start]:#04x}") from e
