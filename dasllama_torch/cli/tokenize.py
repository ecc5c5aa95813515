"""`tokenize`: a text as the model's tokens."""

import json
from typing import Annotated

import typer

from .models import resolve
from .options import JsonOption, ModelArgument
from .output import status
from .texts import read_text


def command(
    model: ModelArgument,
    text: Annotated[str | None, typer.Argument(help="The text; left out: standard input.")] = None,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Put the tokens around it that the model wants.")
    ] = True,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Names of control tokens in the text are those tokens.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the token ids of a text and what each stands for."""
    from dasllama_torch.gguf.reader import GGUFFile
    from dasllama_torch.text.tokenizer import Tokenizer

    content = read_text(text)
    path = resolve(model)
    with status(f"reading the vocabulary of {path.name}"):
        tokenizer = Tokenizer.from_metadata(GGUFFile(path).metadata)
        ids = tokenizer.encode(content, add_special=special, parse_special=parse_special)
    pieces = [tokenizer.piece(i) for i in ids]
    if as_json:
        print(json.dumps({"ids": ids, "pieces": pieces}))
    else:
        for token_id, piece in zip(ids, pieces, strict=True):
            print(f"{token_id:>8}  {piece!r}")
