"""Rows of embeddings in the place of tokens: pictures, sound, soft prompts. n rows, C embedding, A axes of M-RoPE."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.cache.prefix import EMBEDDING
from dasllama_torch.errors import UnsupportedModel

if TYPE_CHECKING:
    from dasllama_torch.config import DecoderConfig
    from dasllama_torch.engine.scheduler import Chunk
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM
    from dasllama_torch.step import Step

N_AXES = 3  # of M-RoPE: time, height, width
MAX_POSITION = 1 << 24  # angles are products of f32, which holds integers below this


@dataclass(frozen=True)
class Span:
    """Rows of embeddings that a session holds at its indices [start, stop).

    digest: BLAKE2b-256 of the rows as they were given, with what else their keys depend on; the first stop - start of
    them are held, fewer than were given after a truncate. causal, positions: as of `Embeddings`, for the rows held.
    advance: how many rotary positions they take up.
    """

    start: int
    stop: int
    digest: bytes
    causal: bool
    positions: Tensor | None = field(compare=False)

    @property
    def advance(self) -> int:
        return self.stop - self.start if self.positions is None else int(self.positions.max()) + 1

    def until(self, stop: int) -> "Span":
        """The span's rows before index `stop`, which is in or behind it."""
        n = min(stop, self.stop) - self.start
        return replace(self, stop=self.start + n, positions=None if self.positions is None else self.positions[:n])


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Rows f32 [n, C] that enter the decoder where the embeddings of n tokens would.

    They enter where transformers' `inputs_embeds` do, that is behind the scale that a family puts on its table (gemma:
    sqrt(C)). Where layers look tokens up in tables of their own (gemma4 E2B, E4B) a row counts as the padding token, or
    token 0 if the vocabulary has none, as a picture's rows do in transformers and llama.cpp.

    causal: a row sees those before it. False: the rows of the span also see each other, as those of a picture do in
    gemma3 (transformers: `token_type_ids`; llama.cpp: a batch decoded without the causal mask). Windows hide from them
    what they hide from any row. gemma4's global layers stay causal, as in both. positions: int64 [n, A] for M-RoPE,
    time, height and width of each row, counted from the session's next rotary position; text goes on behind the largest
    of them. None: consecutive. Raises ValueError for a wrong shape, dtype or position.
    """

    rows: Tensor
    causal: bool = True
    positions: Tensor | None = None

    def __post_init__(self):
        rows = torch.as_tensor(self.rows)
        if rows.dim() != 2 or not len(rows) or not rows.is_floating_point():
            raise ValueError(
                f"wanted rows of embeddings f32 [n, C], at least one, found {rows.dtype} {list(rows.shape)}"
            )
        # Copies: what becomes of the caller's tensors is no matter of the digest.
        rows = rows.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        object.__setattr__(self, "rows", rows)
        if self.positions is None:
            return
        positions = torch.as_tensor(self.positions).cpu()
        if positions.dim() != 2 or len(positions) != len(rows) or positions.is_floating_point():
            raise ValueError(
                f"wanted positions int64 [{len(rows)}, axes], found {positions.dtype} {list(positions.shape)}"
            )
        if not positions.numel() or positions.min() < 0 or positions.max() >= MAX_POSITION:
            raise ValueError(f"wanted positions from 0 to {MAX_POSITION - 1}, counted from the session's next one")
        positions = positions.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        object.__setattr__(self, "positions", positions)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> bytes:
        """See `Span`."""
        shape = None if self.positions is None else list(self.positions.shape)
        found = hashlib.blake2b(repr((list(self.rows.shape), self.causal, shape)).encode(), digest_size=32)
        found.update(self.rows.cpu().numpy().data)
        if self.positions is not None:
            found.update(self.positions.numpy().data)
        return found.digest()

    def span(self, start: int) -> Span:
        """The span of these rows in a session that holds `start` before them."""
        return Span(start, start + len(self), self.digest, self.causal, self.positions)

    def check(self, config: "DecoderConfig") -> None:
        """Raise unless a model of this config can do it: ValueError for another width, UnsupportedModel."""
        if self.rows.shape[1] != config.n_embd:
            raise ValueError(f"the rows are {self.rows.shape[1]} wide, wanted the model's {config.n_embd}")
        if not self.causal and config.causal_because:
            raise UnsupportedModel(
                f"{config.arch}: rows cannot see those after them, for {config.causal_because}; "
                f"wanted causal embeddings (eval_embd)"
            )
        if self.positions is not None:
            if not has_axes(config):
                raise UnsupportedModel(f"{config.arch}: a row has one position, wanted embeddings without positions")
            if self.positions.shape[1] != N_AXES:
                raise ValueError(f"the rows have {self.positions.shape[1]} positions each, wanted {N_AXES}")


def token_ids(given: Iterable[int]) -> list[int]:
    """Ids as Python's. Raises TypeError for what `int` would take besides: 1.5 for 1, and the text "12" for 1 and 2."""
    try:
        return list(map(index, given))
    except TypeError as error:
        raise TypeError(f"wanted token ids ({error}); model.encode(text) gives those of a text") from None


def has_axes(config: "DecoderConfig") -> bool:
    """Whether the model has M-RoPE."""
    return any(layer.rope and layer.rope.axes for layer in config.layers)


@dataclass(frozen=True)
class Prompt:
    """All that a session shall hold: ids, and embeddings between them.

    ids: of all rows, -1 for those of embeddings, which `spans` tell. parts: runs of ids and embeddings, in order, each
    with the index of its first row.
    """

    ids: list[int]
    spans: list[Span]
    parts: list[tuple[int, list[int] | Embeddings]]

    @staticmethod
    def of(given: Sequence[int | Embeddings] | Embeddings) -> "Prompt":
        ids, spans, parts = [], [], []
        for kind, run in groupby([given] if isinstance(given, Embeddings) else given, type):
            if kind is Embeddings:
                for each in run:
                    parts.append((len(ids), each))
                    spans.append(each.span(len(ids)))
                    ids += [EMBEDDING] * len(each)
            else:
                parts.append((len(ids), token_ids(run)))
                ids += parts[-1][1]
        return Prompt(ids, spans, parts)

    def rest(self, n: int, stop: int | None = None) -> list[list[int] | Embeddings]:
        """The parts behind the first n rows, up to row stop; neither lies within embeddings."""
        stop = len(self.ids) if stop is None else stop
        return [
            part if n <= start and start + len(part) <= stop else part[max(0, n - start) : stop - start]
            for start, part in self.parts
            if start < stop and start + len(part) > n
        ]


@dataclass(frozen=True)
class Placed:
    """`rows` of a session's embeddings `given`, which are those of the window from `at` on."""

    session: "Session"
    given: Embeddings
    rows: range
    at: int


def place(present, spans, media: dict[int, Embeddings], window: list["Chunk"], ids) -> list[Placed]:
    """The embeddings of a window: in each of its chunks they are the last."""
    placed, end = [], 0
    for session, span, chunk in zip(present, spans, window, strict=True):
        end += len(span)
        if chunk.index in media:
            given = media[chunk.index]
            before = len(ids[chunk.index]) - len(given)  # a pending token
            rows = range(max(0, chunk.start - before), max(0, chunk.stop - before))
            placed += [Placed(session, given, rows, end - len(rows))] if rows else []
    return placed


def embed(model: "CausalLM", step: "Step", placed: list[Placed]) -> Tensor:
    """Embeddings f32 [1, T, C] of the step's rows, whose positions and ends become those of embeddings that are
    placed."""
    if not placed:
        return model.get_input_embeddings()(step.input_ids)
    step.input_ids = torch.where(step.input_ids == EMBEDDING, model.padding_id, step.input_ids)
    x = model.get_input_embeddings()(step.input_ids)
    if any(part.given.positions is not None for part in placed):
        step.positions = step.positions[:, None].repeat(1, N_AXES)
    if not all(part.given.causal for part in placed):
        step.causal_end, step.row_end = step.row_end, step.row_end.clone()
    for part in placed:
        n, first = len(part.rows), part.rows.start
        here, those = slice(part.at, part.at + n), slice(first, first + n)
        x[0, here] = part.given.rows[those].to(x.device)
        if part.given.positions is not None:
            # Counted from where the span begins, before what the session holds of it already.
            start = step.positions[part.at] - (part.session.spans[-1].advance if first else 0)
            step.positions[here] = start + part.given.positions[those].to(x.device)
        if not part.given.causal:
            step.row_end[here] = step.row_pos[part.at + n - 1] + 1
    return x
