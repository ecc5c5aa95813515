"""Floats as integers that compare alike."""

import triton
import triton.language as tl

LAST = tl.constexpr(-(2**63))


@triton.jit
def ordered(v):
    """int32 that compare as v f32 do: the two zeros are one, NaN is above all numbers."""
    bits = tl.where(v == 0, 0.0, v).to(tl.int32, bitcast=True)
    return tl.where(v != v, 0x7FFFFFFF, bits ^ (bits >> 31 & 0x7FFFFFFF))


@triton.jit
def rank(v, i):
    """int64 for the element i of v f32, above LAST: the largest one comes first, of equals the lower i."""
    return ordered(v).to(tl.int64) << 32 | (0x7FFFFFFF - i)


@triton.jit
def of_order(key):
    """The f32 that `ordered` makes the int32 of."""
    return (key ^ (key >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
