"""`pull`: fetch a model."""

from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(help="A name of the catalogue, or owner/repo:file.gguf of the hub.")],
) -> None:
    """Fetch a model and print where it is. One that is there already is not fetched again."""
    from dasllama_torch import hub

    print(hub.pull(name))
