"""KVPool: what all layers keep of evaluated tokens. Keys and values in pages, recurrent states in slots; sessions take
both on demand, and may hold them together."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.config import CacheSpec, StateSpec
from dasllama_torch.device_memory import Reserved
from dasllama_torch.errors import OutOfPages
from dasllama_torch.memory import release, reserve
from dasllama_torch.ops.kv_codecs import KVCodec, codec_pair, pair_name

if TYPE_CHECKING:
    from dasllama_torch.cache.prefix import PrefixTree


@dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values, as their codecs have them. k [P, G, R, row of k_dim], v [P, G, R, row of v_dim]:
    within a page, the rows of a head lie together; between two pages lie those of other layers.

    k_dim, v_dim: elements of a head. group: index in `KVPool.groups` and in `Step.tables` of the layers that it shares
    page numbers with.
    """

    k: Tensor
    v: Tensor
    k_codec: KVCodec
    v_codec: KVCodec
    k_dim: int
    v_dim: int
    group: int


@dataclass(frozen=True)
class RecurrentState:
    """One layer's states, f32, a slot for each sequence: conv [slots, taps - 1, channels], the last inputs of the
    convolution, oldest first; delta [slots, heads, Dk, Dv]."""

    conv: Tensor
    delta: Tensor


@dataclass(frozen=True)
class PageGroup:
    """Layers with one window (0: none). A page number of `pages` stands for a page of each of them, K and V, which is
    `page_bytes` in all. Layers of another window forget at another position, so they have pages of their own."""

    window: int
    page_bytes: int
    pages: PageAllocator


class KVPool:
    """Pages of `page_rows` tokens and slots for recurrent states, `max_bytes` of them at most.

    layers: what each layer keeps, None for a layer that keeps nothing. kv_dtype: how keys and values are kept, a name
    of `ops.kv_codecs.KV_CODECS`, or a pair of names for the two if they differ. codecs: the pair's rows of that table.
    device: where it lies, or a list of where each layer's part does; where that are several, steps are made on the CPU.
    A page costs memory only once it has been written, or on a GPU handed out, and no growth moves one. `pool[i]` is the
    cache of layer i. groups: the kinds of pages. states: slots of recurrent states, `state_bytes` each over all
    layers; None if no layer has one. A page or slot of several holders is only read. A prefix cache may keep pages and
    slots beyond their holders; it gives them back when sessions need the room. Not thread-safe.
    """

    def __init__(
        self,
        layers: list[CacheSpec | StateSpec | None],
        kv_dtype: str | tuple[str, str],
        max_bytes: int,
        device: torch.device | str | Sequence[torch.device | str],
        page_rows: int = 64,
    ):
        self.codecs = codec_pair(kv_dtype)
        if page_rows < 1:
            raise ValueError(f"page_rows is {page_rows}, wanted 1 or more")
        self.layers, self.max_bytes, self.page_rows = layers, max_bytes, page_rows
        self.kv_dtype = pair_name(self.codecs)
        windows = sorted({spec.window for spec in layers if isinstance(spec, CacheSpec)})
        self.groups = [self._group(layers, window) for window in windows]
        self.state_bytes = sum(4 * spec.numel for spec in layers if isinstance(spec, StateSpec))
        self.states = PageAllocator(max_bytes // self.state_bytes) if self.state_bytes else None
        least = sum(group.page_bytes for group in self.groups) + self.state_bytes
        if max_bytes < least:
            raise ValueError(f"max_bytes is {max_bytes}, wanted {least} or more: what a session of one token holds")
        self._tree: weakref.ref[PrefixTree] | None = None
        self._lie_on(device)

    def _group(self, layers, window: int) -> PageGroup:
        specs = [spec for spec in layers if isinstance(spec, CacheSpec) and spec.window == window]
        page_bytes = sum(sum(self._part_bytes(spec)) for spec in specs)
        # Each group alone may fill the pool: what bounds them together is max_bytes.
        return PageGroup(window, page_bytes, PageAllocator(self.max_bytes // page_bytes))

    def _part_bytes(self, spec: CacheSpec) -> tuple[int, int]:
        """Of a layer's keys and of its values in a page: whole elements of either codec's dtype."""
        unit = max(codec.dtype.itemsize for codec in self.codecs)
        rows = self.page_rows * spec.n_kv_heads
        parts = (codec.row_bytes(dim) for codec, dim in zip(self.codecs, (spec.k_dim, spec.v_dim), strict=True))
        return tuple(-(-rows * part // unit) * unit for part in parts)

    def _lie_on(self, device) -> None:
        """Take address space for all layers, on one device or on each one's own."""
        named = [device] * len(self.layers) if isinstance(device, torch.device | str) else list(device)
        devices = [torch.device(name) for name in named]
        windows = [group.window for group in self.groups]
        # What takes bytes [first, end) from a piece of memory, with the bytes of a page or slot there.
        self._releases: list[tuple[Callable[[int, int], None], int, PageAllocator]] = []
        # Caches must not be inference tensors, whatever mode the caller is in: a gradient may read them later.
        with torch.inference_mode(False):
            # A page of a group is one run of memory on a device, all its layers' keys and values one after the other:
            # what belongs to one position lies together, and a new page touches the fewest pages of the system.
            self._memory = [{} for _ in windows]
            for group, memory in zip(self.groups, self._memory, strict=True):
                for there in dict.fromkeys(devices):
                    specs = [
                        spec
                        for spec, own in zip(self.layers, devices, strict=True)
                        if own == there and isinstance(spec, CacheSpec) and spec.window == group.window
                    ]
                    if nbytes := sum(sum(self._part_bytes(spec)) for spec in specs):
                        memory[there] = self._tensor(group.pages, (nbytes,), torch.uint8, there, huge=True)
            self._layers = self._make(windows, devices)
        self.devices, self.device = devices, devices[0] if len(set(devices)) == 1 else torch.device("cpu")

    def _make(self, windows: list[int], devices: list[torch.device]) -> list[PagedKV | RecurrentState | None]:
        taken = Counter()  # bytes of a page, by group and device

        def paged(group: int, there: torch.device, codec: KVCodec, heads: int, dim: int, nbytes: int) -> Tensor:
            shape = heads, self.page_rows, codec.row(dim)
            first = taken[group, there]
            taken[group, there] += nbytes
            part = self._memory[group][there][:, first : first + math.prod(shape) * codec.dtype.itemsize]
            return part.view(codec.dtype).unflatten(1, shape)

        made = []
        for spec, there in zip(self.layers, devices, strict=True):
            if isinstance(spec, CacheSpec):
                group = windows.index(spec.window)
                dims = spec.k_dim, spec.v_dim
                parts = zip(self.codecs, dims, self._part_bytes(spec), strict=True)
                k, v = (paged(group, there, codec, spec.n_kv_heads, dim, nbytes) for codec, dim, nbytes in parts)
                made.append(PagedKV(k, v, *self.codecs, *dims, group))
            elif isinstance(spec, StateSpec):
                conv = self._tensor(self.states, (spec.conv_taps - 1, spec.conv_channels), torch.float32, there)
                delta = self._tensor(self.states, (spec.n_heads, spec.k_dim, spec.v_dim), torch.float32, there)
                made.append(RecurrentState(conv, delta))
            else:
                made.append(None)
        return made

    def _tensor(
        self, pages: PageAllocator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, huge: bool = False
    ) -> Tensor:
        """[pages or slots, *shape]."""
        each = math.prod(shape) * dtype.itemsize
        if device.type == "cpu":
            mapping = reserve(pages.capacity * each, huge)
            take, memory = partial(release, mapping), torch.frombuffer(mapping, dtype=torch.uint8)
        else:
            reserved = Reserved(pages.capacity * each, device)
            for first, end in pages.used_runs():
                reserved.ensure(first * each, end * each)
            pages.backing.append(lambda page: reserved.ensure(page * each, (page + 1) * each))
            take, memory = reserved.release, reserved.tensor()
        self._releases.append((take, each, pages))
        return memory.view(dtype).view(pages.capacity, *shape)

    def move(self, device: torch.device | str | Sequence[torch.device | str]) -> None:
        """Lie elsewhere, see `device`, with all that is held: pages and slots keep their numbers, so whoever holds them
        notices nothing. Raises OutOfPages, changing nothing, where there is no room."""
        allocators = {id(pages): pages for _, _, pages in self._releases}.values()
        before = self._memory, self._layers, self._releases, self.devices, self.device
        backing = [pages.backing for pages in allocators]
        for pages in allocators:
            pages.backing = []
        try:
            self._lie_on(device)
        except BaseException:
            self._memory, self._layers, self._releases, self.devices, self.device = before
            for pages, back in zip(allocators, backing, strict=True):
                pages.backing = back
            raise
        for old, new in zip(before[1], self._layers, strict=True):
            for name, pages in self._parts_of(new):
                for first, end in pages.used_runs():
                    getattr(new, name)[first:end].copy_(getattr(old, name)[first:end])

    def _parts_of(self, layer: PagedKV | RecurrentState | None) -> list[tuple[str, PageAllocator]]:
        """Names of a layer's tensors, and what hands out their first dimension."""
        if isinstance(layer, PagedKV):
            return [(name, self.groups[layer.group].pages) for name in ("k", "v")]
        return [(name, self.states) for name in ("conv", "delta")] if layer else []

    def __getitem__(self, layer: int) -> PagedKV | RecurrentState | None:
        return self._layers[layer]

    def blocks(self, n: int) -> int:
        """How many pages of a group n positions fill or begin."""
        return -(-n // self.page_rows)

    def first_seen(self, group: PageGroup, position: int) -> int:
        """The first block that a row at `position` sees in a group."""
        return max(0, position - group.window + 1) // self.page_rows if group.window else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and slots that are handed out or kept; those of several holders count once."""
        slots = self.states.in_use if self.states else 0
        return sum(group.pages.in_use * group.page_bytes for group in self.groups) + slots * self.state_bytes

    @property
    def spare_bytes(self) -> int:
        """Those of `used_bytes` that a prefix cache alone keeps: sessions may have them."""
        slots = self.states.spare if self.states else 0
        return sum(group.pages.spare * group.page_bytes for group in self.groups) + slots * self.state_bytes

    @property
    def prefix_tree(self) -> "PrefixTree | None":
        """The prefix cache that keeps pages of this pool."""
        return self._tree() if self._tree else None

    @prefix_tree.setter
    def prefix_tree(self, tree: "PrefixTree | None") -> None:
        self._tree = tree and weakref.ref(tree)

    def require(self, nbytes: int) -> None:
        """Raise OutOfPages unless nbytes more may be handed out. For that a prefix cache gives back what was used
        longest ago."""
        left = self.max_bytes - self.used_bytes + self.spare_bytes
        if nbytes > left:
            raise OutOfPages(f"the KV pool has {left} of {self.max_bytes} bytes left, wanted {nbytes}")
        self.make_room(lambda: nbytes)

    def make_room(self, needed: Callable[[], int]) -> None:
        """Let a prefix cache give back until there is room for the bytes that are needed, or it has nothing left. It
        may change what is needed: who alone holds a page that is no longer kept writes to it without a copy."""
        while (tree := self.prefix_tree) and self.used_bytes + needed() > self.max_bytes and tree.evict():
            pass

    def release(self) -> None:
        """Give the memory of free pages and slots back to the operating system, or the device. They cost memory again
        once they are written. What sessions hold and a prefix cache keeps stays, and so does `max_bytes`."""
        for take, each, pages in self._releases:
            for first, end in pages.free_runs():
                take(first * each, end * each)

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Make the page `target` of a group equal to `source`, in all of its layers."""
        for memory in self._memory[group].values():
            memory[target].copy_(memory[source])

    def clear_state(self, slot: int) -> None:
        """Make the slot that of a sequence without tokens."""
        for state in self._recurrent():
            state.conv[slot].zero_()
            state.delta[slot].zero_()

    def copy_state(self, source: int, target: int) -> None:
        """Make the slot `target` equal to `source`."""
        for state in self._recurrent():
            state.conv[target].copy_(state.conv[source])
            state.delta[target].copy_(state.delta[source])

    def _recurrent(self) -> list[RecurrentState]:
        return [layer for layer in self._layers if isinstance(layer, RecurrentState)]
