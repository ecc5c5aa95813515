"""Address space that becomes memory when it is first written."""

import mmap
import os
import sys

import torch
from torch import Tensor

from dasllama_torch.errors import OutOfPages


def reserve(nbytes: int) -> Tensor:
    """uint8 [nbytes] on the CPU, all zeros, that costs memory only page by page as it is written.

    Because nothing is committed up front, a pool is one tensor that never moves, however far it grows.
    Raises OutOfPages if the operating system refuses so much address space.
    """
    if sys.platform == "win32":  # committed lazily too, but counted against the commit limit
        mapping = mmap.mmap(-1, nbytes)
    else:
        flags = (
            mmap.MAP_PRIVATE
            | mmap.MAP_ANONYMOUS
            | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
        )
        try:
            mapping = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise OutOfPages(f"no address space for a cache of {nbytes} bytes: {error}") from None
    return torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive


def physical_memory() -> int:
    """Bytes of main memory of this machine."""
    if sys.platform == "win32":
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong)]
            _fields_ += [(f"rest{i}", ctypes.c_ulonglong) for i in range(6)]

        status = Status(ctypes.sizeof(Status))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
