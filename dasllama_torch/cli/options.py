"""Arguments and options that commands share. What they can be stands here once more, so that `--help` and a wrong
command line need no torch."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dasllama_torch.sampling import SamplingParams


class Mode(str, Enum):
    native = "native"
    fp32 = "fp32"
    q8 = "q8"
    q4_0 = "q4_0"


class KVType(str, Enum):
    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"
    tq4 = "tq4"


ModelArgument = Annotated[
    str, typer.Argument(help="A GGUF file, a name of the catalogue (see `list`), or owner/repo:file.gguf of the hub.")
]
ModeOption = Annotated[
    Mode, typer.Option(help="Multiply on the file's own types, in f32 (the reference), or requantized at load.")
]
KVOption = Annotated[KVType, typer.Option(help="How keys and values are kept; q8_0 takes half of f16, tq4 a quarter.")]
CtxOption = Annotated[int | None, typer.Option(min=1, help="Context in tokens; else the model's, 4096 at most.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one for each physical core.")]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 for the second GPU, or auto.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

TempOption = Annotated[float, typer.Option(help="Temperature; 0 takes the most likely token each time.")]
TopKOption = Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: from all.")]
TopPOption = Annotated[float, typer.Option(help="Draw from the fewest tokens that have this probability.")]
MinPOption = Annotated[float, typer.Option(help="Leave out tokens below this fraction of the likeliest.")]
RepeatPenaltyOption = Annotated[float, typer.Option(help="Divide the logits of recent tokens by it; 1: none.")]
SeedOption = Annotated[int | None, typer.Option(help="Of the random draws.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="A string before which the text ends; may be given several times.")
]


def sampling_params(**values: Any) -> "SamplingParams":
    """SamplingParams of these; typer.BadParameter for a value outside its range."""
    from dasllama_torch.sampling import SamplingParams

    try:
        return SamplingParams(**values)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
