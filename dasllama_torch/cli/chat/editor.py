"""Lines that a person types.

The line editor is Python's own `readline`: history, search and the editing keys that shells have, with no further
package. Where Python lacks it, or standard output is no terminal, lines come as the terminal itself edits them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dasllama_torch import hub
from dasllama_torch.errors import DasllamaError

try:
    import readline
except ImportError:  # a Python built without it
    readline = None

HISTORY_LINES = 1000
QUOTES = '"""'


def read_line(prompt: str) -> str:
    """A line without its end. Raises EOFError where there is none, KeyboardInterrupt for Ctrl-C, DasllamaError for
    bytes that are no text."""
    try:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except UnicodeDecodeError as e:
        raise DasllamaError(f"what was typed is no text in {e.encoding}") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def read_message(prompt: str, line: Callable[[str], str] = read_line) -> str:
    """One line, or several: as long as they end with a backslash, or between triple quotes."""
    text = line(prompt)
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + line("... ")
        return text.removesuffix(QUOTES)
    while text.endswith("\\"):
        text = text.removesuffix("\\") + "\n" + line("... ")
    return text


@contextmanager
def history() -> Iterator[None]:
    """Lines can be called back by later chats, too: they are kept beside the models, for their owner alone. Where that
    cannot be read or written they are forgotten.
    """
    path = hub.models_folder().parent / "chat_history"
    if readline is None:
        yield
        return
    readline.clear_history()
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
