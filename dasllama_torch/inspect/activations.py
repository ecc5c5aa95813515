"""Keeping what a forward computes, by name. B batch, T rows."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.errors import UnknownName
from dasllama_torch.inspect.prompts import Prompt, Target, evaluate, model_of, settle
from dasllama_torch.inspect.rows import Rows
from dasllama_torch.inspect.sites import Names, Site
from dasllama_torch.inspect.watching import Forward, watching
from dasllama_torch.modules.causal_lm import CausalLM

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session

Value = Tensor | tuple[Tensor | None, ...]


@dataclass
class _Kept:
    """What a module gave in one of its calls, forward after forward. dim: of the rows, which follow each other."""

    dim: int
    values: list[Value]


class ActivationCache(Mapping[str, Value]):
    """What was recorded, by the names that were asked for, or any other name of the same value.

    A tensor, or a tuple where the module gives one or is called more than once in a forward (`rope`: for queries, then
    for keys). Shapes are those of transformers' hooks, [B, T, ...], and [B * T, ...] beside experts; rows of several
    forwards follow each other. Copies: what comes after does not change them. Raises UnknownName, which is a KeyError.
    """

    def __init__(self, known: Names, sites: dict[str, Site]):
        self._known, self._sites = known, sites
        self._kept: dict[Site, list[_Kept]] = {site: [] for site in sites.values()}  # by call

    def __getitem__(self, name: str) -> Value:
        site = self._known.sites.get(name)
        if site not in self._kept:
            raise UnknownName(f"{name!r} was not recorded; recorded: {', '.join(self._sites)}")
        calls = self._kept[site]
        if not calls:
            raise UnknownName(f"{name!r} has no value: no forward has come by")
        for kept in calls:
            kept.values = [_joined(site, kept)]
        values = tuple(_finished(site, kept.values[0]) for kept in calls)
        return values[0] if len(values) == 1 else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        return f"ActivationCache({', '.join(self._sites)})"

    def keep(self, site: Site, rows: Rows, value: Value, forward: Forward) -> None:
        """Add a copy of a forward's value, or of those of its rows that are meant."""
        lead = forward.lead(value[0] if isinstance(value, tuple) else value)
        kept = value
        if rows.sessions is not None:
            mask = rows.mask(forward.step)
            if not mask.any():
                return

            def chosen(tensor: Tensor) -> Tensor:
                flat, places = forward.rows(tensor)
                found = flat[mask[places]]
                return found[None] if lead == 2 else found

            kept = _each(value, chosen)
        # Of a module called more than once, a site that means one call has only that.
        call = 0 if site.call is not None else forward.calls[site] - 1
        calls = self._kept[site]
        if call == len(calls):
            calls.append(_Kept(max(0, lead - 1), []))
        calls[call].values.append(_each(kept, _copy))


@contextlib.contextmanager
def record(
    model: CausalLM, names: str | Iterable[str], *, sessions: "Session | Iterable[Session] | None" = None
) -> Iterator[ActivationCache]:
    """Within this context keep the named values of every forward of the model, in `generate` and batches too.

    names: paths, aliases and patterns, see inspect/sites.py; nothing else is kept. sessions: rows of these only. Raises
    UnknownName.
    """
    known = Names(model)
    sites = known.find(names)
    cache, rows = ActivationCache(known, sites), Rows.of(None, sessions)
    with watching(model, {site: partial(cache.keep, site, rows) for site in sites.values()}):
        yield cache


def run_with_cache(target: Target, prompt: Prompt, names: str | Iterable[str]) -> tuple[Tensor, ActivationCache]:
    """Evaluate a prompt: logits f32 [B, T, V], and the named values on the way.

    target: a model, which evaluates text, ids [T] or [B, T] without a cache; or a session, at whose end the prompt is
    evaluated: by the kernels and in the windows of rows of any session, over what it holds. names: as of `record`.
    Raises UnknownName before anything is evaluated.
    """
    names = list(Names(model_of(target)).find(names))  # a wrong one is told before anything is evaluated
    settle(target)
    with record(model_of(target), names) as cache:
        return evaluate(target, prompt), cache


def _copy(tensor: Tensor) -> Tensor:
    """One of its own: a view would keep all that it is a view of, and an inference tensor refuses to be changed."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def _each(value: Value, f: Callable[[Tensor], Tensor]) -> Value:
    return tuple(None if x is None else f(x) for x in value) if isinstance(value, tuple) else f(value)


def _joined(site: Site, kept: _Kept) -> Value:
    if len(kept.values) == 1:
        return kept.values[0]
    if not isinstance(kept.values[0], tuple):
        return _cat(site, kept.values, kept.dim)
    return tuple(None if parts[0] is None else _cat(site, parts, kept.dim) for parts in zip(*kept.values, strict=True))


def _cat(site: Site, parts: list[Tensor], dim: int) -> Tensor:
    if site.derived == "pattern" and parts[0].dim() == 4:  # later rows have seen more keys
        most = max(part.shape[-1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, most - part.shape[-1])) for part in parts]
    return torch.cat(list(parts), dim)


def _finished(site: Site, value: Value) -> Value:
    """Heads of attention before its rows, as transformers and TransformerLens have them."""
    return _each(value, lambda x: x.transpose(1, 2)) if site.derived == "pattern" else value
