"""What modules give, by path, in ours and in transformers' models alike.

Our modules stand at transformers' paths, so a hook is enough for most. What ours show as modules of their own and
transformers computes by functions is tapped there, and given the paths that ours have: rotated queries and keys
(`self_attn.rope`), attention (`self_attn.attn`), and of a delta net the convolution with the SiLU behind it
(`linear_attn.conv1d`, a module there that only holds the weight) and the delta rule (`linear_attn.delta`).
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


Note = Callable[[Place, Any], None]

# Function of transformers' modeling files -> our module below a delta net.
_DELTA_NET = {"causal_conv1d_fn": "conv1d", "torch_chunk_gated_delta_rule": "delta"}


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

    with contextlib.ExitStack() as stack:
        for path, module in root.named_modules():
            if path in paths:
                stack.enter_context(module.register_forward_hook(functools.partial(hook, path)))
        _tap_attention_of_transformers(stack, root, paths, note)
        _tap_delta_nets_of_transformers(stack, root, note)
        yield


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


def _tap_attention_of_transformers(
    stack: contextlib.ExitStack, root: nn.Module, paths: Collection[str], note: Note
) -> None:
    """Notes q and k as they enter the attention function of a module of root, and its output, [B, T, heads, D]. All of
    transformers' attention modules get theirs from one interface."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then root is none of its models
        return
    owners = {id(module): path for path, module in root.named_modules()}
    original = modeling.AttentionInterface.get_interface

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

    _replace(stack, modeling.AttentionInterface, "get_interface", get_interface)


def _tap_delta_nets_of_transformers(stack: contextlib.ExitStack, root: nn.Module, note: Note) -> None:
    """Notes what two functions give to each delta net of root: the convolution, [B, channels, T] there and here
    [B, T, channels], and the delta rule, [B, T, H, Dv]. Each modeling file has its own two, and its nets call them by
    name.
    """
    running: list[str] = []  # the net under way

    def begin(path: str, *_) -> None:
        running[:] = [path]

    def tap(call: Callable, name: str) -> Callable:
        @functools.wraps(call)
        def noted(*args, **kwargs):
            result = call(*args, **kwargs)
            if running:
                note(Place(f"{running[0]}.{name}", 0), result.transpose(1, 2) if name == "conv1d" else result)
            return result

        return noted

    files = set()
    for path, module in root.named_modules():
        file = sys.modules.get(type(module).__module__)
        if hasattr(module, "conv1d") and all(hasattr(file, function) for function in _DELTA_NET):
            files.add(file)
            stack.enter_context(module.register_forward_pre_hook(functools.partial(begin, path)))
            stack.enter_context(module.register_forward_hook(lambda *_: running.clear(), always_call=True))
    for file in files:
        for function, name in _DELTA_NET.items():
            _replace(stack, file, function, tap(getattr(file, function), name))


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in an attribute's place until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
