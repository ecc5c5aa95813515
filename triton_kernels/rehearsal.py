"""Compiling many kernels at once.

Triton compiles a kernel when it is first launched, and nothing else goes on meanwhile. Within `rehearsing`, the first
launch that misses its kernel has the whole forward rehearsed: launches do nothing but leave word of kernels that are
missing. Threads then compile and load all of them. Most of a compilation is done without Python's lock: the compiler's
passes in C++, the assembler, and the C compiler where launchers need it.

What the launches of a rehearsal would have written is anything. Only kernels may take addresses from it; torch's own
would stop the GPU.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from dasllama_torch.ops.registry import counting, provide_preparation

SILENT = 1.0  # seconds of compiling after which a bar is shown, as where files are read

_Kernels = dict[tuple[object, str], tuple[object, str]]  # by kernel and specialization: kernel, and what to compile


class _Local(threading.local):
    """Of a thread: what rehearses its forward, if it has not been done yet, and within that what is missing."""

    rehearse: Callable[[], object] | None = None
    missing: _Kernels | None = None


_local = _Local()
_patching, _counting = threading.Lock(), threading.Lock()
_within = 0  # threads in `rehearsing`
_hook_before: Callable | None = None


@contextlib.contextmanager
def rehearsing(rehearse: Callable[[], object]) -> Iterator[None]:
    """See `registry.preparing`."""
    _hook(1)
    before, _local.rehearse = _local.rehearse, rehearse
    try:
        yield
    finally:
        _local.rehearse = before
        _hook(-1)


def rehearsed(f: Callable) -> Callable:
    """Decorator: a call of f, which changes nothing that stays, is its own rehearsal."""

    @functools.wraps(f)
    def call(*args, **kwargs):
        again = functools.partial(f, *args, **kwargs)
        with rehearsing(again):
            return again()

    return call


def _hook(more: int) -> None:
    """Have Triton call `_on_missing` while a thread wants it; kernels of others are none of our business."""
    global _hook_before, _within
    with _counting:
        if more > 0 and _within == 0:
            _hook_before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, _on_missing
        _within += more
        if _within == 0:
            knobs.runtime.jit_cache_hook, _hook_before = _hook_before, None


def _on_missing(*, key, fn, compile, **others) -> bool:
    """Called by Triton for a launch whose kernel is not there. True: it is not to be compiled, and nothing launched."""
    if is_rehearsal():
        _local.missing[fn.jit_function, key] = fn.jit_function, compile["specialization_data"]
        return True
    rehearse = _local.rehearse
    if rehearse is not None and not torch.cuda.is_current_stream_capturing():
        _local.rehearse = None  # what it does not find is compiled one by one
        _compile(_missing(rehearse))
    return bool(_hook_before and _hook_before(key=key, fn=fn, compile=compile, **others))


def _missing(rehearse: Callable[[], object]) -> _Kernels:
    _local.missing = {}
    try:
        with counting(), _launching_nothing():
            rehearse()
        return _local.missing
    except torch.OutOfMemoryError:  # of a second forward within the first
        return {}
    finally:
        _local.missing = None


@contextlib.contextmanager
def _launching_nothing() -> Iterator[None]:
    """Launches of threads that rehearse look for their kernels, and no more."""
    with _patching:
        run = JITFunction.run

        def look(self, *args, warmup, **kwargs):
            return run(self, *args, warmup=warmup or is_rehearsal(), **kwargs)

        JITFunction.run = look
        try:
            yield
        finally:
            JITFunction.run = run


def is_rehearsal() -> bool:
    """Whether launches of this thread do nothing."""
    return _local.missing is not None


def _compile(missing: _Kernels) -> None:
    device = torch.cuda.current_device()

    def one(kernel, specialization: str) -> None:
        with torch.cuda.device(device):
            made = kernel.preload(specialization)
            if made is not None:
                made.run  # noqa: B018 (loads it)

    # Long kernels first. A failure shows again where the kernel is launched.
    longest = sorted(missing.values(), key=lambda each: -len(each[0].src))
    with ThreadPoolExecutor(max(1, min(len(longest), os.cpu_count() or 1))) as pool:
        _wait([pool.submit(one, *each) for each in longest])


def _wait(futures: list[Future]) -> None:
    begin = time.monotonic()
    waiting = as_completed(futures)
    done = 0
    for _ in waiting:
        done += 1
        if time.monotonic() - begin > SILENT and sys.stderr.isatty():
            break
    else:
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = [TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=len(futures), completed=done)
        for _ in waiting:
            bars.advance(task)


provide_preparation("cuda", rehearsing)
