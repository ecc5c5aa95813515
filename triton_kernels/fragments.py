"""Rows of packed weights as the tensor cores take them (`few_rows_mma.py`): `blocks.py` in another order of work, and
read from shared memory (`staging.py`). `at` is a shared address, or a pointer, to SPAN elements of a row.

Of each SHARE elements that have a scale together, 32 or 16, thread t of four holds words 2 t and 2 t + 1, or word t; of
a type with a table words t and t + 4, as `blocks.turns` has them. As in `blocks.py`, element = d * scale * q +
dmin * least, with q int8; of Q6_K they are 4 q, and d is a quarter. What several of these functions read has the same
expressions in each, so that the compiler keeps one of them.
"""

import triton
import triton.language as tl

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks, staging
from dasllama_torch.triton_kernels.blocks import IQ4_NL, IQ4_XS, MXFP4, Q4_K, Q5_K, Q6_K, Q8_0, _as_f16, _e8m0, _nibbles
from dasllama_torch.triton_kernels.integer_dots import byte
from dasllama_torch.triton_kernels.staging import anywhere, short, word, words

SPAN = tl.constexpr(256)
SHARE = {
    **dict.fromkeys((ggml_types.Q4_K, ggml_types.Q5_K, ggml_types.Q8_0, *blocks.TABLES), 32),
    ggml_types.Q6_K: 16,
}


@triton.jit
def pair(QTYPE: tl.constexpr, at, t, i: tl.constexpr, table, PTX: tl.constexpr):
    """A thread's words of the 32 elements from 32 i on. table: what `blocks.held` gives for a type that has one."""
    if QTYPE == IQ4_XS:
        a, b = blocks.turns(words(at + 4 * t, 16 * i + 8, 1, PTX), table, PTX)
    elif QTYPE == IQ4_NL:
        a, b = blocks.turns(word(at + 4 * t, 18 * i + 2, PTX), table, PTX)
    elif QTYPE == MXFP4:
        a, b = blocks.turns(anywhere(at + 4 * t, 17 * i + 1, PTX), table, PTX)
    elif QTYPE == Q4_K or QTYPE == Q5_K:
        a, b = words(at + 8 * t, (16 if QTYPE == Q4_K else 48) + i // 2 * 32, 2, PTX)
        a, b = _nibbles(a, i % 2), _nibbles(b, i % 2)
        if QTYPE == Q5_K:
            high_a, high_b = words(at + 8 * t, 16, 2, PTX)
            a, b = a | (high_a >> i & 0x01010101) << 4, b | (high_b >> i & 0x01010101) << 4
    else:
        tl.static_assert(QTYPE == Q8_0)
        a, b = word(at + 8 * t, 34 * i + 2, PTX), word(at + 8 * t, 34 * i + 6, PTX)
    return a, b


@triton.jit
def single(at, t, i: tl.constexpr, PTX: tl.constexpr):
    """Word t of the 16 elements of Q6_K from 16 i on: 128 to a half, 32 to a plane of it, low bits of planes 0 and 2
    and of planes 1 and 3 in the same bytes."""
    half: tl.constexpr = i // 8
    plane: tl.constexpr = i % 8 // 2
    unit: tl.constexpr = i % 2
    low = word(at + 4 * t, 64 * half + 32 * (plane % 2) + 16 * unit, PTX)
    low = low << 2 if plane < 2 else low >> 2
    high = word(at + 4 * t, 128 + 32 * half + 16 * unit, PTX)
    return ((high << 6 - 2 * plane) & 0xC0C0C0C0 ^ 0x80808080) | (low & 0x3C3C3C3C)


@triton.jit
def _scales_and_mins(at, PTX: tl.constexpr):
    """Of Q4_K and Q5_K: d and dmin, and words of four integers each: scales 0 to 3, 4 to 7, mins 0 to 3, 4 to 7."""
    ds, scales, mins, high = words(at, 0, 4, PTX)
    more_scales = high & 0x0F0F0F0F | scales >> 2 & 0x30303030
    return ds, scales & 0x3F3F3F3F, more_scales, mins & 0x3F3F3F3F, high >> 4 & 0x0F0F0F0F | mins >> 2 & 0x30303030


@triton.jit
def scale(QTYPE: tl.constexpr, at, i: tl.constexpr, PTX: tl.constexpr):
    """Of elements from SHARE i on -> int32. Types whose blocks have 32 elements have none."""
    if QTYPE == Q6_K:
        return byte(word(at, 192 + i // 4 * 4, PTX), i % 4, True, PTX)
    elif QTYPE == IQ4_XS:
        high, low = words(at, 0, 2, PTX)
        return (low >> 4 * i & 15 | (high >> 16 + 2 * i & 3) << 4).to(tl.int32) - 32
    else:
        return byte(_scales_and_mins(at, PTX)[1 + i // 4], i % 4, False, PTX)


@triton.jit
def _twice(four, t):
    """Byte t of a word, below 1024, as two f16 of a uint32: 0x6400 + v is 1024 + v."""
    v = (four >> (8 * t).to(tl.uint32) & 255 | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - 1024.0
    bits = v.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits | bits << 16


@triton.jit
def leasts(at, t, PTX: tl.constexpr):
    """`least` of the 32 elements from 32 t on and of those from 32 (t + 4) on, each as two f16 of a uint32."""
    found = _scales_and_mins(at, PTX)
    return _twice(found[3], t), _twice(found[4], t)


@triton.jit
def d(QTYPE: tl.constexpr, at, i: tl.constexpr, PTX: tl.constexpr):
    """Of block i of 32 elements, or the one."""
    if QTYPE == Q4_K or QTYPE == Q5_K:
        return _as_f16(words(at, 0, 4, PTX)[0])
    elif QTYPE == IQ4_XS:
        return _as_f16(words(at, 0, 2, PTX)[0])
    elif QTYPE == IQ4_NL:
        return _as_f16(short(at, 18 * i, PTX))
    elif QTYPE == MXFP4:
        return _e8m0(staging.byte(at, 17 * i, PTX))
    elif QTYPE == Q6_K:
        return _as_f16(short(at, 208, PTX)) * 0.25
    else:
        return _as_f16(short(at, 34 * i, PTX))


@triton.jit
def dmin(at, PTX: tl.constexpr):
    return _as_f16(words(at, 0, 4, PTX)[0] >> 16) * -1.0
