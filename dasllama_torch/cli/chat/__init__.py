"""`chat`: a conversation, with a person at the terminal or one message through a pipe."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..constraint import GrammarOption, JsonSchemaOption, RegexOption, constraint
from ..exits import INTERRUPTED
from ..models import load, start_torch
from ..options import (
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
from ..output import printable
from ..texts import read_file, read_text
from .dialogue import Dialogue
from .editor import history, read_message
from .respond import report, respond
from .screen import Screen

if TYPE_CHECKING:
    from dasllama_torch.chat.chat import Chat
    from dasllama_torch.sampling import SamplingParams


def command(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="What the model is told beforehand.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer at most."),
    ] = None,
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
    template: Annotated[Path | None, typer.Option(help="A Jinja file in place of the model's chat template.")] = None,
    mode: ModeOption = Mode.native,
    kv: KVOption = KVType.f16,
    ctx: CtxOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Talk with a model. In a pipe, answer what comes on standard input and print the answer alone.

    At a terminal, /help lists the commands, such as /system, /think, /tools, /save and /stats.
    """
    is_person = sys.stdin.isatty()
    message = None if is_person else read_text(None)
    if message is not None and not message.strip():
        raise typer.BadParameter("the message on standard input is empty")
    source = None if template is None else read_file(template)
    start_torch(threads)
    import dasllama_torch as dl

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
    loaded, path = load(model, mode, device)
    with dl.create_chat(loaded, system, chat_template=source, kv_dtype=kv.value, n_ctx=ctx) as chat:
        if message is not None:
            raise typer.Exit(_answer(chat, params, max_tokens, message))
        screen = Screen(sys.stdout, sys.stdout if sys.stdout.isatty() else sys.stderr)
        screen.note(f"{printable(path.name)}: {chat.caps()}")
        with history():
            Dialogue(chat, params, max_tokens, screen, read_message).run()


def _answer(chat: "Chat", params: "SamplingParams", max_tokens: int | None, message: str) -> int:
    """Returns the exit code."""
    chat.add_user(message)
    stopped = respond(chat, params, max_tokens, Screen(sys.stdout, sys.stderr))
    print(report(chat), file=sys.stderr)
    return INTERRUPTED if stopped else 0
