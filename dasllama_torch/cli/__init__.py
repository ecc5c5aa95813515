"""The command line, `dasllama-torch`: one file for each command.

Results go to standard output and everything else to standard error. Wrong input ends with one line `error: ...` and
exit code 2. Anything heavy is imported by the command that needs it: `list`, `pull`, `inspect` and `tokenize` do
without torch.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from dasllama_torch.errors import DasllamaError

from . import bench, catalogue, chat, compare, inspect, pull, requantize, run, tokenize
from . import eval as evaluate
from .exits import BAD_INPUT, INTERRUPTED, PIPE_CLOSED
from .output import one_line

PROGRAM = "dasllama-torch"
COMMANDS = {
    "run": run,
    "chat": chat,
    "bench": bench,
    "pull": pull,
    "list": catalogue,
    "inspect": inspect,
    "tokenize": tokenize,
    "compare": compare,
    "eval": evaluate,
    "requantize": requantize,
}

# click's UsageError, of the click that typer depends on or, in newer versions, carries in itself.
_UsageError = typer.BadParameter.__mro__[1]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run GGUF models as PyTorch modules, and look inside them.",
)
for _name, _module in COMMANDS.items():
    app.command(_name)(_module.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a character that the terminal lacks is no reason to stop
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {one_line(str(message))}", file=sys.stderr)
            code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except _UsageError as e:
        return _fail(e.format_message())
    except BrokenPipeError:
        # The reader has gone. What is left in the buffer must not raise again when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (DasllamaError, OSError) as e:
        return _fail(str(e))
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(args: list[str]) -> int:
    # Not `app()`: it would print usage errors in several lines and end the process.
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, args or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as e:
        return e.exit_code
    return 0


def _fail(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return BAD_INPUT


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version(PROGRAM))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
