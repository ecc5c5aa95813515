"""`requantize`: a GGUF file of other types."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .models import resolve, start_torch
from .options import JsonOption, ModelArgument, ThreadsOption
from .output import show_table, status


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    kind: Annotated[str | None, typer.Option("--type", help="Of all matrices, such as Q8_0; else as they are.")] = None,
    tensor: Annotated[
        list[str] | None, typer.Option("--tensor", help="PATTERN=TYPE for some, as '*ffn_down*=Q8_0'; first match.")
    ] = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a GGUF file whose tensors have other types. Shows what changed, and how much each lost."""
    types: dict[str, str] = {}
    for given in tensor or ():
        pattern, equals, name = given.rpartition("=")
        if not equals or not pattern:
            raise typer.BadParameter(f"--tensor is {given!r}, wanted PATTERN=TYPE")
        types.setdefault(pattern, name)
    start_torch(threads)
    import dasllama_torch as dl

    with status(f"writing {out.name}"):
        report = dl.requantize(resolve(model), out, kind, types)
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        show_table(report.table())
