"""Memory of a CUDA device: how much there is, address space that memory is put behind as it is wanted, the way of
weights there from the host, and that of numbers back."""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dasllama_torch.errors import OutOfMemory, OutOfPages

_MANY = 8 << 30  # bytes of address space from which on memory comes in larger granules
_STAGE = 32 << 20  # bytes of each of the two buffers that weights go through


def free_memory(device: torch.device) -> int:
    """Bytes of a device that can be taken, those included that torch has set aside and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# ---- address space --------------------------------------------------------------------------------------------------


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _ON_DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


@functools.cache
def _driver() -> tuple[ctypes.CDLL, str]:
    """The library, and what its functions' names begin with."""
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so"), "hip"
    return ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1"), "cu"


def _call(name: str, *args) -> None:
    library, prefix = _driver()
    if code := library[prefix + name](*args):
        raise OutOfPages(
            "the device has no memory left for more pages"
            if code == _OUT_OF_MEMORY
            else f"the driver refused memory for a cache: {name} gave error {code}"
        )


class Reserved:
    """Address space of a CUDA device, which costs memory only where it was asked for, and never moves.

    `tensor()` is u8 [nbytes], uninitialized; what lies where nothing was `ensure`d must not be touched. It is given
    back once neither this object nor a tensor of it is left. Raises OutOfPages where there is no such memory.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self._device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.init()
        torch.zeros(1, device=self._device)  # makes torch's context for the device, in which all of this is
        self._location = _Location(_ON_DEVICE, self._device.index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        least = ctypes.c_size_t()
        _call("MemGetAllocationGranularity", ctypes.byref(least), ctypes.byref(self._properties), 0)
        self._granule = least.value * (16 if nbytes >= _MANY else 1)
        self._size = -(-nbytes // self._granule) * self._granule
        self.nbytes, self._base = nbytes, ctypes.c_uint64()
        self._backed: set[int] = set()  # granules
        _call("MemAddressReserve", ctypes.byref(self._base), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
              ctypes.c_uint64(0), ctypes.c_uint64(0))  # fmt: skip
        finalizer = weakref.finalize(
            self, _give_back, self._base.value, self._size, self._granule, self._backed, self._device
        )
        finalizer.atexit = False  # the process takes all with it
        self.ensure(0, 1)  # torch asks the driver what lies at the beginning

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._base.value, False), "version": 2}

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)

    def ensure(self, first: int, end: int) -> None:
        """Put memory behind bytes [first, end)."""
        for granule in range(first // self._granule, -(-end // self._granule)):
            if granule not in self._backed:
                self._map(granule)
                self._backed.add(granule)

    def _map(self, granule: int) -> None:
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self._granule)
        at = ctypes.c_uint64(self._base.value + granule * self._granule)
        with torch.cuda.device(self._device):
            try:
                _call("MemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
            except OutOfPages:
                torch.cuda.empty_cache()  # what torch has set aside
                _call("MemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
            _call("MemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            _call("MemRelease", handle)  # the mapping keeps it
            access = _Access(self._location, _READ_WRITE)
            _call("MemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))

    def release(self, first: int, end: int) -> None:
        """Take the memory away from whole granules in bytes [first, end)."""
        whole = range(max(1, -(-first // self._granule)), end // self._granule)
        granules = self._backed.intersection(whole)
        _unmap(self._base.value, self._granule, granules, self._device)
        self._backed -= granules


def _unmap(base: int, granule: int, granules: set[int], device: torch.device) -> None:
    torch.cuda.synchronize(device)  # what was launched may still use them
    for index in granules:
        _call("MemUnmap", ctypes.c_uint64(base + index * granule), ctypes.c_size_t(granule))


def _give_back(base: int, size: int, granule: int, granules: set[int], device: torch.device) -> None:
    _unmap(base, granule, granules, device)
    _call("MemAddressFree", ctypes.c_uint64(base), ctypes.c_size_t(size))


# ---- a result -------------------------------------------------------------------------------------------------------


class HostNumbers:
    """Up to n int64 on the host, where the current CUDA device leaves results. memory: they, int64 [n], which must stay
    until what was written is there."""

    def __init__(self, n: int):
        self.memory = torch.empty(n, dtype=torch.int64, pin_memory=True)
        seen = torch.as_tensor(_Seen(self.memory), device=torch.cuda.current_device())
        # Memory that was pinned for another device is another one's to see: torch has made a copy.
        self._seen = seen if seen.data_ptr() == self.memory.data_ptr() else None

    @torch.inference_mode()
    def write(self, numbers: Tensor) -> None:
        """Have the device bring numbers, int64 [at most n], to the first places, behind what it was given so far. A
        kernel does: a copy is another engine's work, and to hand over to that and back takes longer."""
        n = len(numbers)
        if self._seen is None:
            self.memory[:n].copy_(numbers, non_blocking=True)
        else:
            torch.bitwise_or(numbers, 0, out=self._seen[:n])


class _Seen:
    """What makes torch take a pinned int64 [n] for a tensor of the device that sees it."""

    def __init__(self, memory: Tensor):
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict:
        place = self._memory.data_ptr(), False
        return {"shape": (len(self._memory),), "typestr": "<i8", "data": place, "version": 2}


# ---- weights --------------------------------------------------------------------------------------------------------


def upload(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the modules' own tensors, not those of modules in them, to a CUDA device, one by one, through two pinned
    buffers in turn: one is filled while the other is copied. Tensors of one memory stay so; what they had on the host
    is let go of.

    Raises OutOfMemory, before anything was moved, if the device has too little.
    """
    modules = list(modules)
    tensors = [t for each in modules for t in (*each.parameters(recurse=False), *each.buffers(recurse=False))]
    parts = {place_of(t): t.nbytes for t in tensors}
    needed, free = sum(parts.values()), free_memory(device)
    if needed > free:
        raise OutOfMemory(f"the weights are {needed} bytes, and {device} has {free} left")
    with torch.inference_mode(False):
        _apply(modules, _copier(device))
    torch.cuda.synchronize(device)


def download(modules: Iterable[nn.Module]) -> None:
    """Move the modules' own tensors to the host; those of one memory stay so."""
    with torch.inference_mode(False):
        _apply(modules, lambda tensor: tensor.cpu())


def _apply(modules: Iterable[nn.Module], copy: Callable[[Tensor], Tensor]) -> None:
    moved: dict[tuple, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        place = place_of(tensor)
        if place not in moved:
            moved[place] = copy(tensor)
        return moved[place]

    for module in modules:
        module._apply(once, recurse=False)


def place_of(tensor: Tensor) -> tuple:
    """Equal for tensors of one memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _copier(device: torch.device) -> Callable[[Tensor], Tensor]:
    stages = [(torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]

    def copy(tensor: Tensor) -> Tensor:
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        source, target = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor.contiguous(), moved))
        for at in range(0, source.numel(), _STAGE):
            stage, done = stages[0]
            stages.reverse()
            done.synchronize()
            part = stage[: min(_STAGE, source.numel() - at)]
            part.copy_(source[at : at + len(part)])
            with torch.cuda.device(device):
                target[at : at + len(part)].copy_(part, non_blocking=True)
                done.record()
        return moved

    return copy
