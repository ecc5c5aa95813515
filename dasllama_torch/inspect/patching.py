"""Replacing what a forward computes: activation patching and steering, in single forwards and inside generation.

B batch, T rows, C embedding.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.errors import UnknownName
from dasllama_torch.inspect.rows import Positions, Rows
from dasllama_torch.inspect.sites import Names
from dasllama_torch.inspect.watching import Forward, watching
from dasllama_torch.modules.causal_lm import CausalLM

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session

Patch = Tensor | float | Callable[[Tensor], Tensor]


@contextlib.contextmanager
def patch(
    model: CausalLM,
    patches: Mapping[str, Patch],
    positions: Positions = None,
    sessions: "Session | Iterable[Session] | None" = None,
) -> Iterator[None]:
    """Within this context the named values of every forward are replaced, at the rows that are meant.

    patches: by a name or pattern of inspect/sites.py, what takes the value's place there:
      a function, from those rows [n, ...] to as many; or a number;
      a tensor of one row's shape, say [C], for each of them;
      a tensor with one more dim, [T, C], or two, [B, T, C], as an `ActivationCache` holds it: row t is for position t
      of its sequence, and rows beyond T stay as they are, unless `positions` names one of them. More sequences than
      one are those of a batch [B, T]; sessions take one each, see below.
    positions: a sequence's own, from 0: one, several, a slice (`slice(5, None)`: 5 and what follows), or None for all.
    Without a cache they count padding, as transformers' do. sessions: rows of these only; None: all.

    Contexts nest: what the inner one is given has been replaced by the outer one. What a session evaluates meanwhile
    stays in its cache. Modules run one by one under a patch; results with functions that change nothing are the same to
    the bit. Raises UnknownName, also for what can be recorded but not replaced, ValueError for a shape that fits
    nowhere, when it gets there.
    """
    names, rows = Names(model), Rows.of(positions, sessions)
    acts = {}
    for pattern, new in patches.items():
        new = torch.tensor(float(new)) if isinstance(new, int | float) else new
        for name, site in names.find(pattern).items():
            if site.derived:
                raise UnknownName(f"{name!r} is computed for who looks at it, and cannot be replaced")
            if site in acts:
                raise ValueError(f"{name!r} is patched twice, wanted one of the two or a context within another")
            acts[site] = partial(_replace, name, new, rows)
    with watching(model, acts):
        yield


@contextlib.contextmanager
def steer(
    model: CausalLM,
    where: int | str,
    vector: Tensor,
    scale: float = 1.0,
    positions: Positions = None,
    sessions: "Session | Iterable[Session] | None" = None,
) -> Iterator[None]:
    """Within this context scale * vector [C] is added to a value of every forward (Turner et al. 2023,
    arXiv:2308.10248).

    where: the number of a layer, behind which it is added to the residual stream, or a name. positions, sessions and
    errors as of `patch`.
    """
    name = f"blocks.{where}.hook_resid_post" if isinstance(where, int) else where

    def add(rows: Tensor) -> Tensor:
        return rows + scale * vector.to(rows)

    with patch(model, {name: add}, positions, sessions):
        yield


def _replace(name: str, new: Patch, rows: Rows, value: Tensor, forward: Forward) -> Tensor | None:
    if not isinstance(value, Tensor):
        raise UnknownName(f"{name!r} gives {len(value)} tensors: wanted an alias of one of them")
    flat, places = forward.rows(value)
    step = forward.step
    chosen = rows.mask(step)[places]
    position, sequence = step.row_pos.long()[places], step.row_seq.long()[places]
    if not callable(new) and new.dim() > flat.dim() - 1:
        length = new.shape[-flat.dim()]
        if rows.positions is None:
            chosen &= position < length
        elif (position[chosen] >= length).any():
            raise ValueError(f"{name}: position {position[chosen].max()} is wanted, and the patch has {length} rows")
    at = chosen.nonzero().flatten()
    if not len(at):
        return None
    if callable(new):
        given = new(flat[at])
        if not isinstance(given, Tensor):
            raise ValueError(f"{name}: wanted rows from the function, found {type(given).__name__}")
    else:
        if new.dim() > flat.dim() and len(new) > 1 and step.sessions:
            raise ValueError(f"{name}: sessions have no order, wanted a patch [T, ...] for each, with sessions=")
        given = _rows_of(name, new.to(flat), position[at], sequence[at], flat.dim())
    if given.shape != flat[at].shape:
        try:
            given = given.expand(flat[at].shape)
        except RuntimeError:
            raise ValueError(f"{name}: wanted {list(flat[at].shape)} in its place, found {list(given.shape)}") from None
    return flat.index_copy(0, at, given.to(flat.dtype)).view(value.shape)


def _rows_of(name: str, new: Tensor, position: Tensor, sequence: Tensor, dim: int) -> Tensor:
    """The rows of a patch for these rows of a forward, whose values have `dim` dims with that of the rows."""
    if new.dim() <= dim:
        return new if new.dim() < dim else new[position]
    if new.dim() > dim + 1:
        raise ValueError(f"{name}: wanted [T, ...] or [B, T, ...] for rows of {dim - 1} dims, found {list(new.shape)}")
    if len(new) == 1:
        return new[0, position]
    if len(new) <= int(sequence.max()):
        raise ValueError(f"{name}: the patch is for {len(new)} sequences, and the forward has more")
    return new[sequence, position]
