"""Which parts of a model go to a GPU that has no room for all of it, and how a forward gets from one part to the next.

Whole layers go there, from the last one back, each with its keys and values; the experts of their mixtures come after
all else, as a token needs few of them; the embedding table comes last, of which a token needs a row. So the hidden
states cross over once, and once more for each layer whose experts stayed behind.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dasllama_torch import device_memory
from dasllama_torch.config import CacheSpec, StateSpec
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.moe import Experts
from dasllama_torch.ops.kv_codecs import codec_pair
from dasllama_torch.step import Step


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts, tensors of one memory counted once.

    head: final norm and head. layers: of each layer without its experts, with what a session keeps there. experts: of
    each layer's, 0 where it has none. rest: all else, the embedding table above all. together: layers that read each
    other's keys and values, which lie on one device; each set in order.
    """

    head: int
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    rest: int
    together: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Placement:
    """What lies on the GPU: layers without their experts, experts, the head, the rest. nbytes: of that."""

    layers: tuple[bool, ...]
    experts: tuple[bool, ...]
    head: bool
    rest: bool
    nbytes: int

    @property
    def whole(self) -> bool:
        return self.rest

    @property
    def empty(self) -> bool:
        return not self.head

    def __str__(self) -> str:
        if self.whole or self.empty:
            return f"all on the {'GPU' if self.whole else 'CPU'}"
        there = f"head and {sum(self.layers)} of {len(self.layers)} layers on the GPU"
        left = sum(here and not experts for here, experts in zip(self.layers, self.experts, strict=True))
        return there + (f", the experts of {left} of them on the CPU" if left else "")


def plan(sizes: Sizes, budget: int) -> Placement:
    """The most that `budget` bytes hold, in the order that stands above: each kind of part is taken up to the first
    that does not fit, and the next kind only after all of one."""
    layers, experts = [False] * len(sizes.layers), [False] * len(sizes.layers)
    taken, full = 0, False

    def take(nbytes: int) -> bool:
        nonlocal taken, full
        full = full or taken + nbytes > budget
        taken += 0 if full else nbytes
        return not full

    head = take(sizes.head)
    for unit in _units(sizes):
        if take(sum(sizes.layers[i] for i in unit)):
            for i in unit:
                layers[i] = True
    for i in reversed(range(len(layers))):
        experts[i] = take(sizes.experts[i]) or (layers[i] and not sizes.experts[i])
    return Placement(tuple(layers), tuple(experts), head, take(sizes.rest), taken)


def _units(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Layers that are placed as one, the last ones first."""
    seen: set[int] = set()
    for i in reversed(range(len(sizes.layers))):
        if i not in seen:
            unit = next((unit for unit in sizes.together if i in unit), (i,))
            seen.update(unit)
            yield unit


def sizes_of(model: CausalLM, n_ctx: int) -> Sizes:
    """Of a model, and of a session of n_ctx tokens with keys and values in f16."""
    decoder = model.get_decoder()
    counted: set[tuple] = set()

    def nbytes(modules: Iterable[nn.Module]) -> int:
        found = 0
        for module in modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                place = device_memory.place_of(tensor)
                found += 0 if place in counted else tensor.nbytes
                counted.add(place)
        return found

    head = nbytes([decoder.norm, *model.lm_head.modules()])
    experts = [nbytes(each for part in experts_of(layer) for each in part.modules()) for layer in decoder.layers]
    specs = [spec.cache for spec in model.config.layers]
    layers = [
        nbytes(layer.modules()) + _kept_bytes(spec, n_ctx) for layer, spec in zip(decoder.layers, specs, strict=True)
    ]
    return Sizes(head, tuple(layers), tuple(experts), nbytes(model.modules()), _together(model))


def _kept_bytes(spec: CacheSpec | StateSpec | None, n_ctx: int) -> int:
    if isinstance(spec, CacheSpec):
        rows = min(n_ctx, spec.window or n_ctx)
        dims = zip(codec_pair("f16"), (spec.k_dim, spec.v_dim), strict=True)
        return rows * spec.n_kv_heads * sum(codec.row_bytes(dim) for codec, dim in dims)
    return 4 * spec.numel if spec else 0


def _together(model: CausalLM) -> tuple[tuple[int, ...], ...]:
    """Layers that read the keys and values of others, with these; layers between them too."""
    readers = {i: spec.kv_source for i, spec in enumerate(model.config.layers) if spec.kv_source is not None}
    if not readers:
        return ()
    return (tuple(range(min(readers.values()), max(readers) + 1)),)


def experts_of(layer: nn.Module) -> list[Experts]:
    return [module for module in layer.modules() if isinstance(module, Experts)]


def layer_devices(model: CausalLM) -> list[torch.device]:
    """Where each layer of the config lies: its experts aside, which may be elsewhere. Layers may have been taken out of
    the decoder or put into another order; each keeps the place in a cache that it was made with."""
    found = {}
    for layer in model.get_decoder().layers:
        device = next((parameter.device for parameter in layer.parameters()), model.device)
        found |= {module.layer: device for module in layer.modules() if isinstance(getattr(module, "layer", None), int)}
    return [found.get(i, model.device) for i in range(len(model.config.layers))]


def check_layers(model: CausalLM) -> None:
    """Raise UnsupportedModel where the decoder has a layer twice: both would write their keys to one place."""
    layers = list(model.get_decoder().layers)
    if len(set(map(id, layers))) < len(layers):
        twice = next(i for i, layer in enumerate(layers) if layer in layers[:i])
        raise UnsupportedModel(
            f"layer {twice} of the decoder is also layer {layers.index(layers[twice])}, and sessions keep keys for one "
            "of them: wanted forwards without a cache"
        )


class Placed:
    """A model of which a part lies on a GPU. Where hidden states cross over, hooks carry them; so its steps are not
    recorded, and its modules run one by one, "eager" in the report. devices: where each layer lies. `undo` takes the
    hooks away again. Raises OutOfMemory, with some of the weights moved."""

    def __init__(self, model: CausalLM, placement: Placement, device: torch.device):
        self._hooks: list = []
        try:
            self._carry(model, placement, device)
        except BaseException:
            self.undo()
            raise

    def _carry(self, model: CausalLM, placement: Placement, device: torch.device) -> None:
        cpu, decoder = torch.device("cpu"), model.get_decoder()
        device_memory.upload([decoder.norm, *model.lm_head.modules()], device)
        self._enter([decoder.norm, model.lm_head], device)
        inputs = [child for child in decoder.children() if child not in (decoder.layers, decoder.norm)]
        self._enter(inputs, cpu)
        self.devices = [device if there else cpu for there in placement.layers]
        for layer, there, experts in zip(decoder.layers, self.devices, placement.experts, strict=True):
            self._enter([layer], there)
            if there == device:
                left = [] if experts else experts_of(layer)
                stay = {each for part in left for each in part.modules()}
                device_memory.upload([each for each in layer.modules() if each not in stay], device)
                self._enter(left, cpu)
                for part in left:
                    self._hooks.append(part.register_forward_hook(lambda module, args, y: y.to(device)))

    def _enter(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        def carry(module, args, kwargs):
            return tuple(_there(arg, device) for arg in args), {key: _there(arg, device) for key, arg in kwargs.items()}

        self._hooks += [module.register_forward_pre_hook(carry, with_kwargs=True) for module in modules]

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _there(value, device: torch.device):
    if isinstance(value, Tensor):
        return value.to(device)
    return value.on(device) if isinstance(value, Step) else value
