"""transformers in float64, the truth that two f32 implementations of one formula are held against, and what each module
of a model gives.

B sequences, T tokens of each.
"""

import contextlib
import re
from collections.abc import Iterable

import torch
from test_module_paths import HF_ONLY
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dasllama_torch.inspect.compare import in_shape, tokens_first
from dasllama_torch.inspect.taps import Place, tapped


class _Double(TorchFunctionMode):
    """What code asks for in f32 is f64: transformers computes norms, softmax, rotary angles and the delta rule in f32
    whatever a model's type."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [_wide(arg) for arg in args]
        return func(*args, **{name: _wide(arg) for name, arg in (kwargs or {}).items()})


def _wide(arg):
    return torch.float64 if arg is torch.float32 else arg


@contextlib.contextmanager
def in_double(hf):
    """Within this context a model of transformers computes in f64 throughout. Its weights are then f64 and its rotary
    frequencies as they were; afterwards it stays so."""
    hf.double()
    with _Double():
        yield hf


@torch.no_grad()
def outputs(root, paths, **inputs) -> dict[str, Tensor]:
    """What root's modules at `paths` give, in the order in which they do, and its logits. inputs: as of its forward."""
    seen: dict[Place, Tensor] = {}
    with tapped(root, paths, seen.__setitem__):
        logits = root(**inputs).logits
    return {str(place): output for place, output in seen.items()} | {"logits": logits}


def called(places: Iterable[str]) -> set[str]:
    """Those of transformers' modules that ours have as well."""
    return {place for place in places if not place.partition(" ")[0].endswith(HF_ONLY)}


def paths_of(*models) -> set[str]:
    """Of the modules that any of them has: attention of transformers is seen at paths that ours have."""
    return {path for model in models for path, _ in model.named_modules() if path}


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of each place of both, the largest difference, relative to the spread (standard deviation) of the exact values.
    found: of one implementation or another, [1, T, ...].

    The residual stream behind a layer is measured by the largest spread that it has had up to there. Roundings stay in
    it when what is large cancels out, as a published model's last layers do with the first token's values: even if each
    op were exact and only its result rounded to f32, they would be 1.2e-4 of what is left there.
    """
    n, apart, stream = exact["logits"].shape[1], {}, 0.0
    for place, output in exact.items():
        if place not in found:
            continue
        other = tokens_first(found[place], n)
        wanted = in_shape(tokens_first(output, n), other)
        assert wanted is not None, f"{place}: {list(output.shape)} is no {list(other.shape)}"
        spread = wanted.std().item()
        if re.fullmatch(r".*\.layers\.\d+", place):
            spread = stream = max(stream, spread)
        apart[place] = (other.double() - wanted).abs().max().item() / spread
    return apart
