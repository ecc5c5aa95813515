"""Functions that see values of a forward while it runs, and may replace them: the hooks behind recording and patching.

A forward is known by the `Step` that its decoder is given, so rows are told apart by position and session, whatever
else is in the batch.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dasllama_torch.errors import DasllamaError
from dasllama_torch.inspect.derived import DERIVED
from dasllama_torch.inspect.sites import Site
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.step import Step


class Forward:
    """A forward under way. step: what it knows of its R rows. calls: of each site so far, the present one included."""

    def __init__(self, step: Step):
        self.step = step
        self.calls: Counter[Site] = Counter()

    def lead(self, value: Tensor) -> int:
        """How many leading dims of a value count rows: 2 of [B, T, ...], 1 of [R, ...]; 0 if none do."""
        rows = len(self.step.row_seq)
        if value.dim() > 2 and value.shape[0] * value.shape[1] == rows:
            return 2
        if value.dim() and value.shape[0] == rows:
            return 1
        is_of_rows = value.numel() == rows if value.dim() == 2 else self._logit_rows(value) is not None
        return 2 if is_of_rows else 0

    def rows(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The value [n, ...] with all rows in one dim, and which rows of the step they are, int64 [n]."""
        lead = self.lead(value)
        if not lead:
            raise DasllamaError(
                f"a value of shape {list(value.shape)} has no dim for the {len(self.step.row_seq)} rows of the forward"
            )
        value = value.flatten(0, lead - 1)
        every = torch.arange(len(self.step.row_seq), device=value.device)
        return value, every if len(value) == len(every) else self._logit_rows(value)

    def _logit_rows(self, value: Tensor) -> Tensor | None:
        """The rows that the head is given, if the value has one of each."""
        kept = self.step.logit_rows
        return kept if kept is not None and len(kept) == value.shape[:2].numel() else None


Act = Callable[[Any, Forward], Any]


@contextlib.contextmanager
def watching(model: CausalLM, acts: Mapping[Site, Act]) -> Iterator[None]:
    """Within this context each value of a forward that passes a site goes to its act, which returns what shall go on in
    its place, or None. A module that is called on its own, outside of a forward, is left alone. Afterwards, however the
    block ends, no hook is left."""
    current = threading.local()  # two threads may evaluate sessions of one model

    def begin(module, args, kwargs):
        current.forward = Forward(args[1] if len(args) > 1 else kwargs["step"])

    def end(*_):
        current.forward = None

    modules = dict(model.named_modules())
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True))
        for site, act in acts.items():
            hooks.enter_context(_hook(modules[site.path], site, act, current))
        hooks.enter_context(model.register_forward_hook(end, always_call=True))
        yield


def _hook(module: nn.Module, site: Site, act: Act, current: threading.local):
    def call(value, module, args):
        """What takes the value's place, or None."""
        forward = getattr(current, "forward", None)
        if forward is None:
            return None
        forward.calls[site] += 1
        if site.call not in (None, forward.calls[site] - 1):
            return None
        if site.derived:
            derived = DERIVED[site.derived](module, args, forward.step)
            act(derived if site.item is None else derived[site.item], forward)
            return None
        new = act(_part(value, site), forward)
        return None if new is None else _with_part(value, site, new)

    if site.argument is None or site.derived:
        return module.register_forward_hook(lambda module, args, output: call(output, module, args))

    def before(module, args):
        new = call(args[site.argument], module, args)
        return None if new is None else (*args[: site.argument], new, *args[site.argument + 1 :])

    return module.register_forward_pre_hook(before)


def _part(value, site: Site):
    value = value if site.item is None else value[site.item]
    return value if site.chunk is None else value.chunk(site.chunk[1], -1)[site.chunk[0]]


def _with_part(value, site: Site, new: Tensor):
    if site.item is not None:
        return *value[: site.item], new, *value[site.item + 1 :]
    if site.chunk is None:
        return new
    parts = list(value.chunk(site.chunk[1], -1))
    parts[site.chunk[0]] = new
    return torch.cat(parts, -1)
