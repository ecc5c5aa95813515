"""What is shown to people: nothing in it commands their terminal."""

import contextlib
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Stats
    from dasllama_torch.tables import Table

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line breaks


def printable(text: str, keep: str = "") -> str:
    """Text with control characters escaped, but for those to keep: files may hold codes that command a terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def without_controls(text: str) -> str:
    """Text of several lines with control characters escaped: what people and models write keeps all its other ones."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def status(text: str) -> contextlib.AbstractContextManager:
    """A spinner on standard error while something takes its time, if a person is there to see it."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(printable(text))


def speeds(stats: "Stats", end: str) -> str:
    """What was read and written, and how fast. end: why it ended."""
    prefill = f"prompt: {stats.n_prompt} tokens, {stats.prefill_tps:.1f} tok/s"
    decode = f"generated: {stats.n_generated} tokens, {stats.decode_tps:.1f} tok/s, ended by {end}"
    return f"{prefill}; {decode}"


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.2f} MB"


def show_table(table: "Table") -> None:
    """Print a table, as wide as the terminal, or as plain text where there is none."""
    if not sys.stdout.isatty():
        print(table.text())
        return
    from rich.console import Console

    Console().print(table.rich())
