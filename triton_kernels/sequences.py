"""Rows of one sequence anywhere in a batch: which of them a program goes through.

Rows t of T, each of a slot int32, -1 for an inert row. A sequence's first or last row is found by looking at all rows
before or behind it, CHUNK at a time, so that nobody has to tell the host what a batch is made of.
"""

import torch
import triton
import triton.language as tl

from dasllama_torch.ops.require import require

CHUNK = tl.constexpr(512)


@triton.jit
def is_first(slots, t, slot):
    """Whether no row before t is of the slot."""
    others = tl.zeros([CHUNK], tl.int32)
    for first in range(0, t, CHUNK):
        i = first + tl.arange(0, CHUNK)
        others += (tl.load(slots + i, mask=i < t, other=-1) == slot).to(tl.int32)
    return tl.sum(others, 0) == 0


@triton.jit
def is_last(slots, t, T, slot):
    """Whether no row behind t is of the slot."""
    others = tl.zeros([CHUNK], tl.int32)
    for first in range(t + 1, T, CHUNK):
        i = first + tl.arange(0, CHUNK)
        others += (tl.load(slots + i, mask=i < T, other=-1) == slot).to(tl.int32)
    return tl.sum(others, 0) == 0


def check_slots(op: str, what: str, slots: torch.Tensor, T: int, like: torch.Tensor) -> None:
    """Raise unless slots are int32 [T] on the device of `like`."""
    require(
        slots.dtype == torch.int32 and slots.shape == (T,) and slots.device == like.device,
        lambda: (
            f"dasllama::{op}: {what} must be int32 [{T}] on {like.device}, "
            f"found {slots.dtype} {list(slots.shape)} on {slots.device}"
        ),
    )
