"""What a sequence holds, as tensors by name, and a sequence made of them: bytes as they are, by position, so that the
pages of another pool of the same layers and codec may be of another size.

`layers.{i}.k` and `.v`: keys and values [n, G, row] of the last n positions, as the codec keeps them; fewer than all
where a window has left the first ones behind. `layers.{i}.conv` and `.delta`: recurrent states [s, ...], that of now
and then those of the checkpoints, by position.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.cache.pool import KVPool, PagedKV
from dasllama_torch.cache.sequence import Sequence
from dasllama_torch.config import CacheSpec, StateSpec


@dataclass(frozen=True)
class Extent:
    """How far a sequence reaches. first: by group of the pool, the first position whose keys it has."""

    length: int
    first: tuple[int, ...]
    checkpoints: tuple[int, ...]

    @classmethod
    def of(cls, sequence: Sequence) -> "Extent":
        return cls(
            sequence.length,
            tuple(map(sequence.first_held, range(len(sequence.tables)))),
            tuple(sorted(sequence.checkpoints)),
        )

    def fault(self, pool: KVPool) -> str:
        """Why no sequence of the pool can reach like this, or ""."""
        marks = (0, *self.checkpoints, self.length + 1)
        if self.length < 0 or any(a >= b for a, b in zip(marks, marks[1:], strict=False)):
            return f"checkpoints {list(self.checkpoints)} of {self.length} positions"
        if len(self.first) != len(pool.groups):
            return f"keys of {len(self.first)} kinds of layers, wanted {len(pool.groups)}"
        for group, first in zip(pool.groups, self.first, strict=True):
            if not 0 <= first <= (max(0, self.length - group.window + 1) if group.window else 0):
                return f"keys from position {first} on of {self.length}, behind a window of {group.window}"
        return ""

    def shapes(self, pool: KVPool) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Dtype and shape of each tensor."""
        found = {}
        for i, spec in enumerate(pool.layers):
            for name, memory in _parts(pool, i):
                if isinstance(spec, CacheSpec):
                    n = self.length - self.first[pool[i].group]
                    found[name] = memory.dtype, [n, memory.shape[1], memory.shape[3]]
                elif self.length:
                    found[name] = memory.dtype, [1 + len(self.checkpoints), *memory.shape[1:]]
        return found


def read(sequence: Sequence) -> dict[str, Tensor]:
    """Copies of what the sequence holds. Raises CannotRewind if its recurrent state is torn."""
    sequence.check_whole("save")
    pool, extent = sequence.pool, Extent.of(sequence)
    states = [sequence.state, *(sequence.checkpoints[mark] for mark in extent.checkpoints)]
    found = {}
    for i, spec in enumerate(pool.layers):
        for name, memory in _parts(pool, i):
            if isinstance(spec, CacheSpec):
                found[name] = memory[_places(sequence, pool[i], extent)].cpu()
            elif extent.length:
                found[name] = memory[states].cpu()
    return found


def restore(sequence: Sequence, extent: Extent, tensors: Mapping[str, Tensor]) -> None:
    """Make an empty sequence hold what another one held; tensors of `extent.shapes`. Raises OutOfPages."""
    pool = sequence.pool
    sequence.extend(extent.length, extent.first, extent.checkpoints)
    states = [sequence.state, *sequence.checkpoints.values()]
    for i, spec in enumerate(pool.layers):
        for name, memory in _parts(pool, i):
            if isinstance(spec, CacheSpec):
                memory[_places(sequence, pool[i], extent)] = tensors[name].to(memory.device)
            elif extent.length:
                memory[states] = tensors[name].to(memory.device)


def _parts(pool: KVPool, layer: int) -> Iterator[tuple[str, Tensor]]:
    spec, cache = pool.layers[layer], pool[layer]
    parts = ("k", "v") if isinstance(spec, CacheSpec) else ("conv", "delta") if isinstance(spec, StateSpec) else ()
    for part in parts:
        yield f"layers.{layer}.{part}", getattr(cache, part)


def _places(sequence: Sequence, cache: PagedKV, extent: Extent) -> tuple[Tensor, slice, Tensor]:
    """Index of the positions held in [P, G, R, row], which gives [n, G, row]."""
    at = torch.arange(extent.first[cache.group], extent.length, device=cache.k.device)
    pages = torch.tensor(sequence.tables[cache.group], dtype=torch.int64, device=cache.k.device)
    rows = sequence.pool.page_rows
    return pages[at // rows], slice(None), at % rows
