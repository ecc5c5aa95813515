"""What a Hugging-Face-style forward gives back, and how it sees inside: conventions of transformers 5.24."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.step import Step


class ModelOutput:
    """Base of dataclasses that read as transformers' `ModelOutput`: `out.logits`, `out["logits"]`, or as the tuple of
    what is there, `out[0]`. `past_key_values` is the older name of a field `cache`. Transforms of torch, such as
    `torch.export`, go into what it holds."""

    cache: Any

    def __init_subclass__(cls) -> None:
        _pytree.register_pytree_node(
            cls,
            lambda output: (output.values(), output.keys()),
            lambda values, names: cls(**dict(zip(names, values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            flatten_with_keys_fn=lambda output: (
                [(_pytree.MappingKey(name), value) for name, value in output.items()],
                output.keys(),
            ),
        )

    @property
    def past_key_values(self) -> Any:
        return self.cache

    def keys(self) -> list[str]:
        """Names of what is there, in the order of the tuple."""
        return [each.name for each in fields(self) if getattr(self, each.name) is not None]

    def values(self) -> list[Any]:
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.keys()]

    def to_tuple(self) -> tuple:
        return tuple(self.values())

    def get(self, name: str, default: Any = None) -> Any:
        value = getattr(self, name) if name in self else None
        return default if value is None else value

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, name: object) -> bool:
        return name in self.keys() or (name == "past_key_values" and self.cache is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class CausalLMOutput(ModelOutput):
    """loss: f32 [], the mean over the tokens that `labels` has; None without labels.
    logits: f32 [B, T, V], or [B, n, V] where only some rows were asked for.
    cache: what goes on from here, see `forward`.
    hidden_states: L + 1 of [B, T, C]: the first layer's input, and each layer's output, but in the last place what the
    final norm makes of it. attentions: of each layer with attention, probabilities [B, H, T, S] over S positions, T
    without a cache, see `hf.cache.forward` with one.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class Seen:
    """Of one forward. states: the first layer's input and each layer's output, [B, T, C], the final norm's in place of
    the last. probabilities: of each attention, in order, [B, H, T, S]."""

    step: Step
    states: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)


@contextlib.contextmanager
def watched(decoder: nn.Module, hidden_states: bool, attentions: bool) -> Iterator[list[Seen]]:
    """Context: each forward of the decoder appends what is wanted of it to the list that this yields.

    By hooks, so that what other hooks have put in the place of a tensor is what shows. Forwards of other threads do not
    show.
    """
    seen: list[Seen] = []
    thread = threading.get_ident()

    def begin(module, args):
        if threading.get_ident() == thread:
            _, step = args
            seen.append(Seen(step))

    def keep_state(module, args, output):
        if threading.get_ident() == thread:
            if module is decoder.layers[0]:
                seen[-1].states.append(args[0])
            seen[-1].states.append(output)

    def keep_normed(module, args, output):
        if threading.get_ident() == thread:
            seen[-1].states[-1] = output

    def keep_probabilities(module, args, output):
        if threading.get_ident() == thread:
            weights, _ = module.probabilities(*args)
            seen[-1].probabilities.append(weights.transpose(1, 2))

    hooks = [decoder.register_forward_pre_hook(begin)]
    if hidden_states:
        hooks += [layer.register_forward_hook(keep_state) for layer in decoder.layers]
        hooks.append(decoder.norm.register_forward_hook(keep_normed))
    if attentions:
        hooks += [layer.register_forward_hook(keep_probabilities) for layer in attentions_of(decoder)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attentions_of(decoder: nn.Module) -> list[PagedAttention]:
    """Those of all layers that have attention, in order."""
    return [module for module in decoder.modules() if isinstance(module, PagedAttention)]


def keep_rows(hidden: Tensor, rows: int | Tensor) -> Tensor:
    """The hidden states [B, T, C] whose logits are wanted, as transformers' `logits_to_keep` says: an int n keeps the
    last n positions, 0 all; a tensor [n] these positions, [B, n] these of each sequence, and bool [B, T] those that
    are True, [n, C] of the whole batch."""
    if isinstance(rows, int):
        return hidden[:, -rows:] if rows else hidden
    if rows.dtype == torch.bool and rows.dim() == 2:
        return hidden[rows]
    if rows.dim() == 2:
        return torch.take_along_dim(hidden, rows[..., None], dim=1)
    return hidden[:, rows]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of labels [B, T] after the logits [B, T, V] of the position before, f32; -100 is left out."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels have shape {list(labels.shape)}, wanted that of the logits, {[*logits.shape[:-1]]}")
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def selected(states: tuple[Tensor, ...], which: bool | int | list[int]) -> tuple[Tensor | None, ...]:
    """The hidden states that `output_hidden_states` asks for: True all, indices only these, None in other places."""
    if isinstance(which, bool):
        return states
    n = len(states)
    places = {i % n for i in ([which] if isinstance(which, int) else which) if -n <= i < n}
    return tuple(state if i in places else None for i, state in enumerate(states))
