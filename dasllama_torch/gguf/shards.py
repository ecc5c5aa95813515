"""Models split over several files, `<stem>-00001-of-00003.gguf` and so on (llama.cpp's gguf-split).

The first shard carries the model's metadata; all carry `split.no` (from 0), `split.count` and `split.tensors.count`
(of the whole set). Names of siblings are made from the name that the caller gave and never from anything inside a
file, so a file cannot point elsewhere.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dasllama_torch.errors import GGUFError
from dasllama_torch.gguf.values import quote

if TYPE_CHECKING:
    from dasllama_torch.gguf.reader import Part

MAX_SHARDS = 512  # each one holds a file descriptor and a mapping; the largest published sets have well under 100

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def shard_name(stem: str, number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the set that `path` belongs to by its name, in order; just `path` if its name is not a shard's or
    there is no such file.

    Raises GGUFError if the name is out of range or a sibling is missing."""
    match = _NAME.fullmatch(path.name)
    if match is None or not os.path.isfile(path):
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise GGUFError(
            f"{path}: the name says shard {number} of {count}, wanted 1 to {MAX_SHARDS} shards, numbered from 1"
        )
    paths = tuple(path.with_name(shard_name(match["stem"], i + 1, count)) for i in range(count))
    missing = [p.name for p in paths if not os.path.isfile(p)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GGUFError(f"{path}: one of {count} shards, missing beside it: {', '.join(map(quote, missing[:3]))}{more}")
    return paths


def check_shards(parts: Sequence["Part"]) -> None:
    """Refuse a set whose files do not say that they belong together: a key that two of them state differently, or a
    number, a count or a tensor total that is not the set's. A single file may carry no split keys, or the
    `split.count` 0 that merging leaves behind."""
    count, first = len(parts), parts[0]
    if count == 1 and first.values.get("split.count", 0) == 0:
        return
    for part in parts[1:]:
        for key in part.values:
            if key != "split.no" and key in first.values and not _same(part.values[key], first.values[key]):
                found, wanted = quote(str(part.values[key])), quote(str(first.values[key]))
                raise GGUFError(
                    f"{part.path}: of another model than {first.path}: key {quote(key)} is {found}, wanted {wanted}"
                )
    total = sum(len(part.tensors) for part in parts)
    wanted_keys = [
        ("split.count", [count] * count),
        ("split.no", range(count)),
        ("split.tensors.count", [total] * count),
    ]
    for key, wanted in wanted_keys:
        for i, part in enumerate(parts):
            found = part.values.get(key)
            if not isinstance(found, np.integer) or found != wanted[i]:
                shown = "missing" if found is None else quote(str(found))
                raise GGUFError(
                    f"{part.path}: key '{key}' is {shown}, wanted {wanted[i]}: by its name this is file {i + 1} of"
                    f" {count} (shards are named {shard_name('<stem>', 1, 3)} and so on), and they hold {total} tensors"
                )


def _same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, str | np.generic):
        return a == b or (a != a and b != b)
    return len(a) == len(b) and all(map(_same, a, b))  # strings, or arrays of arrays
