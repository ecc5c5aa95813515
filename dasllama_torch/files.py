"""Files that are complete or not there."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(path: str | os.PathLike) -> Iterator[Path]:
    """Context: a path to write to, beside `path` so that one step puts it there: at the end, in place of a file of that
    name. Where something is raised, nothing is left. Raises OSError where the step cannot be taken."""
    part = Path(f"{os.fspath(path)}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
