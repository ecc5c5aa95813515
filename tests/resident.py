"""How much memory a call takes, as the system sees it."""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc to give memory back")


def peak(call: Callable[[], object]) -> int:
    """Bytes in memory at the worst moment of a call, above those before it. What is free goes back to the system first:
    a call would take it from there, and not show."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    call()
    return _status("VmHWM") - before


def _status(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
