"""`eval`: perplexity of a text, and the divergence of a quantized file from its parent."""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .models import load, start_torch
from .options import DeviceOption, JsonOption, Mode, ModelArgument, ModeOption, ThreadsOption
from .output import show_table


class Convention(str, Enum):
    llama_cpp = "llama.cpp"
    hf = "hf"


def command(
    model: ModelArgument,
    text: Annotated[Path, typer.Option("--text", "-t", help="A file of UTF-8 text.")],
    against: Annotated[str | None, typer.Option(help="The parent, as MODEL: adds KL divergence and agreement.")] = None,
    ctx: Annotated[int, typer.Option(min=4, help="Tokens of a window.")] = 512,
    convention: Annotated[
        Convention, typer.Option(help="llama.cpp: the second half of each window counts; hf: overlapping windows.")
    ] = Convention.llama_cpp,
    stride: Annotated[int | None, typer.Option(min=1, help="From window to window, with hf; else half of one.")] = None,
    windows: Annotated[int | None, typer.Option("--windows", "-n", min=1, help="Only the first so many.")] = None,
    mode: ModeOption = Mode.native,
    against_mode: Annotated[Mode, typer.Option(help="How the parent multiplies.")] = Mode.native,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how well a model predicts a text. The result is a perplexity with its confidence interval."""
    start_torch(threads)
    import dasllama_torch as dl

    tested, _ = load(model, mode, device)
    parent = None if against is None else load(against, against_mode, device)[0]
    try:
        result = dl.evaluate(
            tested, text, parent, n_ctx=ctx, convention=convention.value, stride=stride, max_windows=windows,
            progress=sys.stderr.isatty(),
        )  # fmt: skip
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    if as_json:
        print(result.to_json())
    else:
        show_table(result.table())
