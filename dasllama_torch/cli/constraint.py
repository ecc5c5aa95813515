"""Options that say what a text must be."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .texts import read_file

if TYPE_CHECKING:
    from dasllama_torch.constraints import Constraint

JsonSchemaOption = Annotated[Path | None, typer.Option(help="A JSON schema that the text fits, a file.")]
RegexOption = Annotated[str | None, typer.Option(help="A regular expression that the whole text matches.")]
GrammarOption = Annotated[
    Path | None, typer.Option(help="A grammar that the text follows, a file: Lark if it ends in .lark, else GBNF.")
]


def constraint(json_schema: Path | None, regex: str | None, grammar: Path | None) -> "Constraint | None":
    """Of the one that is given, if one is; typer.BadParameter for several."""
    if sum(given is not None for given in (json_schema, regex, grammar)) > 1:
        raise typer.BadParameter("wanted one of --json-schema, --regex and --grammar")
    from dasllama_torch.constraints import Constraint

    if json_schema is not None:
        return Constraint.json_schema(read_file(json_schema))
    if grammar is not None:
        return (Constraint.lark if grammar.suffix == ".lark" else Constraint.gbnf)(read_file(grammar))
    return None if regex is None else Constraint.regex(regex)
