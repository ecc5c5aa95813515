"""`compare`: two models on one prompt, module by module."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import OVER_TOLERANCE
from .models import load, start_torch
from .options import DeviceOption, JsonOption, Mode, ModelArgument, ThreadsOption
from .output import show_table, status

if TYPE_CHECKING:
    from torch import nn

PROMPT = "The city's old clock tower had stopped at ten past four, and nobody could say in which year."


def command(
    model: ModelArgument,
    other: Annotated[str, typer.Argument(help="The reference: as MODEL, or a folder of transformers.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text that both read.")] = PROMPT,
    mode: Annotated[Mode, typer.Option(help="How MODEL multiplies.")] = Mode.fp32,
    other_mode: Annotated[Mode, typer.Option(help="How OTHER multiplies, if it is a GGUF file.")] = Mode.fp32,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of a module, relative to the spread of its values.")
    ] = 1e-3,
    every: Annotated[bool, typer.Option("--all", help="Show all modules, not just layers.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two models, module by module. Exit code 1: one gives something else, beyond the tolerance.

    Both run in f32 by default, so that only weights and formulas tell them apart; other modes add their rounding. The
    reference runs on the CPU.
    """
    if not tolerance:
        raise typer.BadParameter("--tolerance is 0, wanted a number above it")
    start_torch(threads)
    import dasllama_torch as dl

    tested, _ = load(model, mode, device)
    reference = _reference(other, other_mode)
    with status("comparing"):
        result = dl.compare(tested, reference, prompt, tolerance=tolerance)
    if as_json:
        print(result.to_json())
    else:
        show_table(result.table(every))
    raise typer.Exit(0 if result.within else OVER_TOLERANCE)


def _reference(name: str, mode: Mode) -> "nn.Module":
    """A file as one of ours, a folder as transformers' own model in f32: its code is the reference, not ours."""
    if not Path(name).is_dir():
        return load(name, mode)[0]
    import torch

    from dasllama_torch.hf.common import import_transformers

    transformers = import_transformers("to read a folder of transformers")
    with status(f"loading {name}"):
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, local_files_only=True
            ).eval()
        except ValueError as e:
            raise typer.BadParameter(f"{name}: {e}") from e
