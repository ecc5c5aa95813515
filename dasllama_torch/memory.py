"""Memory from the operating system: reserved address space, huge pages, and how much there is."""

import mmap
import os
import re
import sys
from pathlib import Path

from dasllama_torch.errors import OutOfPages


def reserve(nbytes: int, huge: bool = False) -> mmap.mmap:
    """nbytes of address space, all zeros, that costs memory only page by page as it is written; huge: in huge pages as
    far as the system gives any.

    Because nothing is committed up front, a pool is one tensor that never moves, however far it grows.
    Raises OutOfPages if the operating system refuses so much address space.
    """
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    try:
        return _private(nbytes, no_reserve, huge)
    except (OSError, OverflowError) as error:
        raise OutOfPages(f"no address space for a cache of {nbytes} bytes: {error}") from None


def release(mapping: mmap.mmap, begin: int, end: int) -> None:
    """Give the memory behind bytes [begin, end) of a `reserve` back to the operating system, in whole system pages.
    The address space stays; what is read there next may be anything."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def huge_pages(nbytes: int) -> mmap.mmap:
    """Private zeroed memory, in huge pages as far as the system gives any (`has_huge_pages`).

    For weights that are read from end to end for every token: with pages of 4 KiB the processor spends more time on
    looking up their addresses than on their data, above all in a virtual machine, where it walks two tables.
    """
    return _private(nbytes, 0, huge=True)


def _private(nbytes: int, flags: int, huge: bool) -> mmap.mmap:
    if sys.platform == "win32":  # committed lazily too, but counted against the commit limit
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if huge and has_huge_pages():
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def has_huge_pages() -> bool:
    """Whether the system gives huge pages to who asks (Linux, transparent_hugepage "always" or "madvise")."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
    except OSError:
        return False
    return "[never]" not in setting


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


def available_memory() -> int:
    """Bytes that can be taken without swapping or being killed: on Linux what the kernel says is available, within the
    limit of the process's group (a container's); elsewhere all of the machine's memory."""
    found = [physical_memory()]
    if says := re.search(r"^MemAvailable: +(\d+) kB$", _text(_MEMINFO), re.M):
        found.append(1024 * int(says[1]))
    for limit, used in _GROUPS:
        if _text(limit).strip().isdecimal():  # "max": no limit
            found.append(max(0, int(_text(limit)) - int(_text(used) or 0)))
    return min(found)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


_MEMINFO = Path("/proc/meminfo")
# Limit and use of a control group, version 2 and 1; in a container its own.
_GROUPS = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]
