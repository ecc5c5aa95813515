"""`run`: continue a text."""

import itertools
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from .constraint import GrammarOption, JsonSchemaOption, RegexOption, constraint
from .exits import INTERRUPTED
from .models import load, start_torch
from .options import (
    CtxOption,
    DeviceOption,
    KVOption,
    KVType,
    MinPOption,
    Mode,
    ModelArgument,
    ModeOption,
    RepeatPenaltyOption,
    SeedOption,
    StopOption,
    TempOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    sampling_params,
)
from .output import speeds, status
from .texts import read_text


def command(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; left out: standard input.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")] = 256,
    temp: TempOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repeat_penalty: RepeatPenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    mode: ModeOption = Mode.native,
    kv: KVOption = KVType.f16,
    ctx: CtxOption = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Go on past the context's end: forget the older half.")
    ] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Continue a text. The continuation is streamed to standard output, the speeds go to standard error."""
    text = read_text(prompt)
    start_torch(threads)
    params = sampling_params(
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repeat_penalty,
        seed=seed,
        stop=stop or (),
        constraint=constraint(json_schema, regex, grammar),
    )
    loaded, _ = load(model, mode, device)
    ids = loaded.encode(text)
    if not ids:
        raise typer.BadParameter("the prompt is empty, and this model starts with no token of its own")
    import dasllama_torch as dl

    on_full = "shift" if shift else "error"
    with dl.create_session(loaded, kv_dtype=kv.value, n_ctx=ctx, on_full=on_full) as session:
        code = _stream(session.generate(ids, params, max_tokens), f"reading {len(ids)} tokens")
        end = "interrupt" if code == INTERRUPTED else session.stats.stop
        print(speeds(session.stats, end), file=sys.stderr)
    raise typer.Exit(code)


def _stream(pieces: Iterator[tuple[int | None, str]], wait: str) -> int:
    """Write text as it comes; Ctrl-C ends it. Returns the exit code."""
    code = 0
    try:
        with status(wait):
            first = list(itertools.islice(pieces, 1))
        for _, piece in itertools.chain(first, pieces):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(flush=True)
    return code
