"""What modules give, by path, in ours and in transformers' models alike.

Our modules stand at transformers' paths, so a hook is enough for most. Two things that ours show as modules of their
own (`self_attn.rope`, `self_attn.attn`) are functions in transformers, which all of its attention modules call through
one interface: there they are tapped, and given the paths that ours have.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """A module's path and which of its calls within one forward, from 0: rotary modules turn queries, then keys."""

    path: str
    call: int

    def __str__(self) -> str:
        return f"{self.path} ({self.call + 1})" if self.call else self.path


@contextlib.contextmanager
def tapped(root: nn.Module, paths: Collection[str], seen: Callable[[Place, Tensor], object]) -> Iterator[None]:
    """Within this context every forward of root's modules at `paths` calls `seen` with place and output, in the order
    in which they come to an end. One forward only: calls are counted from its beginning."""
    calls: Counter[str] = Counter()

    def note(place: Place, output: Any) -> None:
        tensor = main_output(output)
        if place.path in paths and tensor is not None:
            seen(place, tensor.detach())

    def hook(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        calls[path] += 1
        note(Place(path, calls[path] - 1), output)

    hooks = [
        module.register_forward_hook(functools.partial(hook, path))
        for path, module in root.named_modules()
        if path in paths
    ]
    try:
        with _attention_of_transformers(root, paths, note):
            yield
    finally:
        for handle in hooks:
            handle.remove()


def main_output(output: Any) -> Tensor | None:
    """The tensor that a module's output is about: of a router (logits, weights, ids) the weights, as what it calls
    logits is not the same thing in all families; of another tuple the first; of transformers' output of a stack the
    last hidden state. None: it is not about a tensor.
    """
    if isinstance(output, tuple):
        is_router = len(output) == 3 and all(isinstance(part, Tensor) for part in output)
        output = output[1] if is_router and not output[2].is_floating_point() else output[0]
    else:
        output = getattr(output, "last_hidden_state", output)
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


@contextlib.contextmanager
def _attention_of_transformers(
    root: nn.Module, paths: Collection[str], note: Callable[[Place, Any], None]
) -> Iterator[None]:
    """Notes q and k as they enter the attention function of a module of root, and its output, [B, T, heads, D]."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then root is none of its models
        yield
        return
    AttentionInterface = modeling.AttentionInterface

    owners = {id(module): path for path, module in root.named_modules()}
    original = AttentionInterface.get_interface

    def attend(attention, module, query, key, *args, **kwargs):
        path = owners.get(id(module))
        if path is not None:
            # What ours scale beyond the original context (`temperature`, after the rotation) comes scaled.
            scaled = f"{path}.temperature" in paths
            note(Place(f"{path}.temperature" if scaled else f"{path}.rope", 0), query.transpose(1, 2))
            note(Place(f"{path}.rope", 1), key.transpose(1, 2))
        result = attention(module, query, key, *args, **kwargs)
        if path is not None:
            note(Place(f"{path}.attn", 0), result)
        return result

    def get_interface(self, *args, **kwargs):
        return functools.partial(attend, original(self, *args, **kwargs))

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original
