"""What the parts share: transformers, which is an extra and imported when it is used, and files of JSON."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from dasllama_torch.errors import DasllamaError, FolderError


def import_transformers(purpose: str) -> ModuleType:
    """The package. purpose: "to read a folder", for the error that says how to get it."""
    try:
        import transformers
    except ImportError:
        raise DasllamaError(f"transformers is needed {purpose}: pip install 'dasllama-torch[hf]'") from None
    return transformers


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises FolderError for anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise FolderError(f"{path}: holds a {type(value).__name__}, wanted an object")
    return value
