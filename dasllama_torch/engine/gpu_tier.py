"""Models and the GPU: how much of it they may take, what went where, and how one leaves the card to others and comes
back."""

import os
import re
import weakref
from dataclasses import dataclass

import torch

from dasllama_torch import device_memory
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.engine import graphs
from dasllama_torch.engine.placement import Placed, Placement, layer_devices, plan, sizes_of
from dasllama_torch.errors import KernelError
from dasllama_torch.modules.causal_lm import CausalLM

HEADROOM = 2 << 30  # bytes left to others, and to what a forward takes for itself, where no budget is given
HOST = torch.device("cpu")
N_CTX = 4096  # tokens of the session that a budget has room for beside the weights
VRAM_MB = "DASLLAMA_GPU_VRAM_MB"


@dataclass(frozen=True, kw_only=True)
class GpuTierWant:
    """What `load_model(device="auto")` and `gpu_rearm_model` go by.

    auto_tier: whether to use a GPU at all. device: which, "cuda" or with an index. vram_mb: MiB of it that all models
    together may take, weights and what one session of each keeps; None: what is free, less 2 GiB. The environment's
    DASLLAMA_GPU_VRAM_MB, where it is set, stands in the place of vram_mb.
    """

    auto_tier: bool = True
    device: str = "cuda"
    vram_mb: int | None = None


@dataclass(frozen=True)
class GpuModelTier:
    """One model that is on a GPU, or was: its name, the device ("cpu" once it was dropped), and what lies there."""

    name: str
    device: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.name}: {self.placement}, {self.placement.nbytes / 2**20:.0f} MiB of {self.device}"


@dataclass(frozen=True)
class GpuTierStatus:
    """device: the card's name, "" where there is none or none is wanted. vram_bytes: of it that models may take, and
    budget: who says so, "environment", "want" or "free memory". used_bytes: that they take. models: those that were
    placed and are still there."""

    device: str
    vram_bytes: int
    budget: str
    used_bytes: int
    models: tuple[GpuModelTier, ...]

    def __str__(self) -> str:
        head = f"{self.device or 'no GPU'}: {self.used_bytes >> 20} of {self.vram_bytes >> 20} MiB ({self.budget})"
        return "\n".join([head, *map(str, self.models)])


@dataclass
class _Tier:
    """What is known of a model: where it was put, and with what `Placed`, if a part of it stayed behind."""

    device: torch.device
    placement: Placement
    placed: Placed | None = None


_want = GpuTierWant()
_tiers: weakref.WeakKeyDictionary[CausalLM, _Tier] = weakref.WeakKeyDictionary()
_pools: weakref.WeakKeyDictionary[CausalLM, "weakref.WeakSet[KVPool]"] = weakref.WeakKeyDictionary()


def set_gpu_tier_want(want: GpuTierWant) -> None:
    """What models go by that are loaded with device="auto", or re-armed, from now on. Raises ValueError for a budget
    below 0 and a device that is no GPU's name."""
    global _want
    if not re.fullmatch(r"cuda(:\d+)?", want.device):
        raise ValueError(f"device is {want.device!r}, wanted 'cuda' or one with an index, such as 'cuda:1'")
    if want.vram_mb is not None and want.vram_mb < 0:
        raise ValueError(f"vram_mb is {want.vram_mb}, wanted 0 or more")
    _want = want


def gpu_tier_status() -> GpuTierStatus:
    """What models take of the wanted GPU, and may."""
    models = tuple(
        GpuModelTier(model.name_or_path or model.config.arch, str(tier.device), tier.placement)
        for model, tier in _tiers.items()
    )
    device = wanted_device()
    if device is None:
        return GpuTierStatus("", 0, "want", 0, models)
    used = _used(device)
    budget, said_by = _budget(None)
    if budget is None:
        budget = used + max(0, device_memory.free_memory(device) - HEADROOM)
    return GpuTierStatus(torch.cuda.get_device_name(device), budget, said_by, used, models)


def gpu_weight_budget() -> int:
    """Bytes of the wanted GPU that a further model may take; 0 without one."""
    device = wanted_device()
    return 0 if device is None else _left(device, None)


def gpu_drop_model(model: CausalLM) -> None:
    """Move a model from its GPU to the host, with all that its sessions hold there, which go on where they stood; the
    memory goes back to the card. Nothing happens to one that is on the host.

    Raises OutOfPages, changing nothing, where the host has no room for the sessions.
    """
    tier = _tiers.get(model)
    if (tier is None or tier.device == HOST) and {model.device, *layer_devices(model)} == {HOST}:
        return
    _move_pools(model, HOST)
    _leave(model)


def gpu_rearm_model(model: CausalLM, vram_mb: int | None = None) -> Placement:
    """Place a model as `load_model(device="auto")` would, with what its sessions hold; one that is on a GPU leaves it
    first.

    Raises OutOfMemory or OutOfPages, leaving it on the host, where there is less room than there seemed to be.
    """
    gpu_drop_model(model)
    return arm(model, wanted_device(), vram_mb)


def wanted_device() -> torch.device | None:
    """The GPU that is wanted; None where none is, or there is none. Raises KernelError for an index beyond the last."""
    if not (_want.auto_tier and torch.cuda.is_available()):
        return None
    device = torch.device(_want.device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelError(f"device {_want.device!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def arm(model: CausalLM, device: torch.device | None, vram_mb: int | None = None) -> Placement:
    """Put as much of a model on a GPU as the budget has room for, and of its pools what belongs to that."""
    sizes = sizes_of(model, min(model.config.n_ctx, N_CTX))
    placement = plan(sizes, 0 if device is None else _left(device, vram_mb))
    if placement.empty:
        _tiers[model] = _Tier(HOST, placement)
        return placement
    _tiers[model] = tier = _Tier(device, placement)
    try:
        if placement.whole:
            device_memory.upload(model.modules(), device)
        else:
            tier.placed = Placed(model, placement, device)
            model.placement = placement
        _move_pools(model, device if tier.placed is None else tier.placed.devices)
    except BaseException:
        gpu_drop_model(model)
        raise
    return placement


def note_model(model: CausalLM) -> None:
    """A model was put on a GPU as a whole."""
    layers = len(model.config.layers)
    tensors = {device_memory.place_of(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    everything = Placement((True,) * layers, (True,) * layers, True, True, sum(tensors.values()))
    _tiers[model] = _Tier(model.device, everything)


def note_pool(model: CausalLM, pool: KVPool) -> None:
    """A pool was made for a model's sessions."""
    _pools.setdefault(model, weakref.WeakSet()).add(pool)


def _move_pools(model: CausalLM, where) -> None:
    """`KVPool.move` of all of a model's pools, or of none."""
    moved: list[tuple[KVPool, list[torch.device]]] = []
    try:
        for pool in _pools.get(model, ()):
            before = pool.devices
            pool.move(where)
            moved.append((pool, before))
    except BaseException:
        for pool, before in moved:
            pool.move(before)
        raise


def _leave(model: CausalLM) -> None:
    """Move the weights to the host."""
    tier = _tiers.get(model)
    if tier is not None and tier.placed is not None:
        tier.placed.undo()
    graphs.forget(model)  # captured steps hold on to weights
    model.placement = None
    device_memory.download(model.modules())
    if tier is not None:
        layers = (False,) * len(tier.placement.layers)
        _tiers[model] = _Tier(HOST, Placement(layers, layers, False, False, 0))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _budget(vram_mb: int | None) -> tuple[int | None, str]:
    """Bytes that all models together may take, None for as much as is free, and who says so."""
    if given := os.environ.get(VRAM_MB, ""):
        if not given.isdecimal():
            raise ValueError(f"the environment's {VRAM_MB} is {given!r}, wanted a number of MiB")
        return int(given) << 20, "environment"
    vram_mb = _want.vram_mb if vram_mb is None else vram_mb
    return (None, "free memory") if vram_mb is None else (vram_mb << 20, "want")


def _used(device: torch.device) -> int:
    return sum(tier.placement.nbytes for tier in _tiers.values() if tier.device == device)


def _left(device: torch.device, vram_mb: int | None) -> int:
    """Bytes for a further model."""
    budget, _ = _budget(vram_mb)
    free = device_memory.free_memory(device)
    return max(0, free - HEADROOM if budget is None else min(free, budget - _used(device)))
