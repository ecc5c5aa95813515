"""Decoding of packed weights in Triton: the only place in this backend where a type is decoded, but for four of them
that tensor cores take in another order (`fragments.py`).

A block is read by units of 16 consecutive bytes or so, which hold the same 16 places of PLANES planes of elements: a
byte of Q4_K has an element in its low half and, 32 elements on, one in its high half. Within a plane a unit is four
words of four elements. Element (u, p, w, i) of a block, for unit u, plane p < PLANES, word w < 4 and byte i < 4, is

    u // (WIDTH / 16) * WIDTH * PLANES  +  p * WIDTH  +  u % (WIDTH / 16) * 16  +  4 * w  +  i

`word` gives four elements at once, as the int8 values q of `ops.blocks.Parts` in one uint32 (byte i is element i),
which is what integer dots take; of Q6_K they are 4 q, so that their sign is the byte's, and `d` is a quarter. The 16
elements of a unit and a plane share the integers `scale` and `least`, and a unit the floats `d` and `dmin` (which is
-dmin of `Parts`, or m, whose `least` is 1):

    element = d * scale * q  +  dmin * least

These are, bit for bit, the results of `ops.blocks.dequantize_blocks`: d * scale * q is exact where something is added.

Where planes share bytes their loads have the same address expressions for each p, so that the compiler keeps one of
them. Pointers: b u8 at the block; u, w int32 that broadcast with b; p int or int32. table: what `table` gives for the
type. PTX: whether inline PTX may be used; the plain form beside it gives the same bits.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dasllama_torch.ops import codebooks, ggml_types


class Layout(NamedTuple):
    """How units and planes of a type's block lie (see the top of this file), and the type's sizes."""

    planes: int
    width: int
    block: int  # elements
    bytes: int
    words: int  # of a unit's four that a thread holds; 4 where they are one aligned load


_PLANES = {  # planes, width; the others have one plane
    **dict.fromkeys((ggml_types.Q4_0, ggml_types.Q4_1, ggml_types.Q5_0, ggml_types.Q5_1), (2, 16)),
    **dict.fromkeys((ggml_types.IQ4_NL, ggml_types.MXFP4, ggml_types.IQ4_XS), (2, 16)),
    **dict.fromkeys((ggml_types.Q4_K, ggml_types.Q5_K), (2, 32)),
    **dict.fromkeys((ggml_types.Q2_K, ggml_types.Q3_K, ggml_types.Q6_K, ggml_types.TQ2_0), (4, 32)),
}


def layout(qtype: int) -> Layout:
    """The layout of a packed weight type."""
    row = ggml_types.GGML_TYPES[qtype]
    return Layout(*_PLANES.get(qtype, (1, 16)), row.block, row.bytes, 4 if row.bytes % 16 == 0 else 1)


_GRIDS = {
    ggml_types.IQ2_XXS: "IQ2_XXS_GRID",
    ggml_types.IQ2_XS: "IQ2_XS_GRID",
    ggml_types.IQ2_S: "IQ2_S_GRID",
    ggml_types.IQ3_XXS: "IQ3_XXS_GRID",
    ggml_types.IQ3_S: "IQ3_S_GRID",
    ggml_types.IQ1_S: "IQ1_S_GRID",
    ggml_types.IQ1_M: "IQ1_S_GRID",
}
_VALUES = {
    ggml_types.IQ4_NL: codebooks.IQ4_VALUES,
    ggml_types.IQ4_XS: codebooks.IQ4_VALUES,
    ggml_types.MXFP4: codebooks.FP4_VALUES,
    ggml_types.NVFP4: codebooks.FP4_VALUES,
}


@functools.cache
def table(qtype: int, device: torch.device) -> torch.Tensor:
    """The codebook of a type as `word` reads it: int8 values, twice (`held`), or a grid's points as words of four int8
    coordinates (eighths for IQ1). A type without one gets an empty tensor.
    """
    with torch.inference_mode(False):  # the table outlives the call
        if qtype in _GRIDS:
            points = torch.tensor(getattr(codebooks, _GRIDS[qtype]).points(), dtype=torch.int8)
            scale = 8 if _GRIDS[qtype] == "IQ1_S_GRID" else 1
            return (points * scale).view(torch.int32).to(device)
        return torch.tensor(_VALUES.get(qtype, ()) * 2, dtype=torch.int8).to(device)


def _lookup_asm(values: tuple[int, ...]) -> str:
    """PTX: $2 of eight nibbles -> $0 and $1, the values of the low and of the high nibble of each byte.

    prmt picks four of eight bytes by the low three bits of four nibbles, so the nibbles' upper bits choose between two.
    """
    words = [sum((value & 255) << 8 * i for i, value in enumerate(values[at : at + 4])) for at in (0, 4, 8, 12)]
    return f"""{{
        .reg .b32 index, pick, t<4>, low, high, a, b;
        mov.b32 t0, {words[0]}; mov.b32 t1, {words[1]}; mov.b32 t2, {words[2]}; mov.b32 t3, {words[3]};
        and.b32 index, $2, 0x77777777;
        and.b32 pick, $2, 0x88888888;
        shr.u32 pick, pick, 1;
        or.b32 pick, pick, 0x32103210;
        prmt.b32 low, t0, t1, index;
        prmt.b32 high, t2, t3, index;
        prmt.b32 a, low, high, pick;
        shr.u32 index, index, 16;
        shr.u32 pick, pick, 16;
        prmt.b32 low, t0, t1, index;
        prmt.b32 high, t2, t3, index;
        prmt.b32 b, low, high, pick;
        prmt.b32 $0, a, b, 0x6420;
        prmt.b32 $1, a, b, 0x7531;
    }}"""


_IQ4_ASM = tl.constexpr(_lookup_asm(codebooks.IQ4_VALUES))
_FP4_ASM = tl.constexpr(_lookup_asm(codebooks.FP4_VALUES))
_TURNS_ASM = tl.constexpr("""{
    .reg .b32 index, pick, low, high;
    and.b32 index, $2, 0x77777777;
    shr.u32 pick, $2, 1;
    and.b32 pick, pick, 0x44444444;
    or.b32 pick, pick, 0x32103210;
    prmt.b32 low, $3, $4, index;
    prmt.b32 high, $5, $6, index;
    prmt.b32 $0, low, high, pick;
    shr.u32 index, index, 16;
    shr.u32 pick, pick, 16;
    prmt.b32 low, $3, $4, index;
    prmt.b32 high, $5, $6, index;
    prmt.b32 $1, low, high, pick;
}""")
_APART_ASM = tl.constexpr("""{
    .reg .b32 own, other;
    mov.b32 own, $4;
    xor.b32 other, own, 0x88888888;
    prmt.b32 $0, $5, $6, own;
    prmt.b32 $2, $7, $8, other;
    shr.u32 own, own, 16;
    shr.u32 other, other, 16;
    prmt.b32 $1, $5, $6, own;
    prmt.b32 $3, $7, $8, other;
}""")

Q4_0, Q4_1 = tl.constexpr(ggml_types.Q4_0), tl.constexpr(ggml_types.Q4_1)
Q5_0, Q5_1 = tl.constexpr(ggml_types.Q5_0), tl.constexpr(ggml_types.Q5_1)
Q8_0, Q1_0, Q2_0 = tl.constexpr(ggml_types.Q8_0), tl.constexpr(ggml_types.Q1_0), tl.constexpr(ggml_types.Q2_0)
Q2_K, Q3_K, Q4_K = tl.constexpr(ggml_types.Q2_K), tl.constexpr(ggml_types.Q3_K), tl.constexpr(ggml_types.Q4_K)
Q5_K, Q6_K = tl.constexpr(ggml_types.Q5_K), tl.constexpr(ggml_types.Q6_K)
TQ1_0, TQ2_0 = tl.constexpr(ggml_types.TQ1_0), tl.constexpr(ggml_types.TQ2_0)
IQ4_NL, IQ4_XS = tl.constexpr(ggml_types.IQ4_NL), tl.constexpr(ggml_types.IQ4_XS)
MXFP4, NVFP4 = tl.constexpr(ggml_types.MXFP4), tl.constexpr(ggml_types.NVFP4)
IQ2_XXS, IQ2_XS, IQ2_S = (
    tl.constexpr(ggml_types.IQ2_XXS),
    tl.constexpr(ggml_types.IQ2_XS),
    tl.constexpr(ggml_types.IQ2_S),
)
IQ3_XXS, IQ3_S = tl.constexpr(ggml_types.IQ3_XXS), tl.constexpr(ggml_types.IQ3_S)
IQ1_S, IQ1_M = tl.constexpr(ggml_types.IQ1_S), tl.constexpr(ggml_types.IQ1_M)


# ---- bytes to words and floats --------------------------------------------------------------------------------------


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.uint32)


@triton.jit
def _short(at):
    """The little-endian 16 bits at an even address."""
    return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.uint32)


@triton.jit
def _word(b, first: tl.constexpr, i, ALIGN: tl.constexpr):
    """Word i, little-endian, of those from byte `first` of b on. b and first are multiples of ALIGN."""
    at = first + 4 * i
    if ALIGN == 4:  # counted in words: the compiler then sees that words i = 0..3 are one load of 16 bytes
        return tl.load(b.to(tl.pointer_type(tl.uint32)) + (first // 4 + i))
    elif ALIGN == 2:
        return _short(b + at) | _short(b + at + 2) << 16
    else:
        return _byte(b + at) | _byte(b + at + 1) << 8 | _byte(b + at + 2) << 16 | _byte(b + at + 3) << 24


@triton.jit
def _shifted(low, high, bits):
    """The 32 bits from `bits` on, 0 to 32, of two words."""
    return ((high.to(tl.uint64) << 32 | low.to(tl.uint64)) >> bits).to(tl.uint32)


@triton.jit
def _run(b, first: tl.constexpr, i):
    """`_word` of N words in a row [T, N], 2 or 4, for each b [T, 1], even: loads of whole words, half as many.

    The word behind the last is one more load, or the last one again where it holds nothing of it."""
    T: tl.constexpr = i.shape[0]
    N: tl.constexpr = i.shape[1]
    odd = ((b + first % 4).to(tl.uint64) & 2).to(tl.int32)  # bytes past a whole word's address
    low = tl.load((b - odd + first + 4 * i).to(tl.pointer_type(tl.uint32)))
    ends = b + odd + first + 4 * i
    bits = tl.reshape(odd * 8, [T]).to(tl.uint64)
    if N == 2:
        _, end = tl.split(ends)
        w0, w1 = tl.split(low)
        return tl.join(_shifted(w0, w1, bits), _shifted(w1, tl.load(end.to(tl.pointer_type(tl.uint32))), bits))
    else:
        _, end = tl.split(tl.reshape(ends, [T, 2, 2]))
        _, end = tl.split(end)
        even, odd = tl.split(tl.reshape(low, [T, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        end = tl.load(end.to(tl.pointer_type(tl.uint32)))
        even = tl.join(_shifted(w0, w1, bits), _shifted(w2, w3, bits))
        odd = tl.join(_shifted(w1, w2, bits), _shifted(w3, end, bits))
        return tl.reshape(tl.join(even, odd), [T, 4])


@triton.jit
def _f16(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _nibbles(raw, p):
    return raw >> 4 * p & 0x0F0F0F0F


@triton.jit
def _pairs(raw, p):
    return raw >> 2 * p & 0x03030303


@triton.jit
def _minus(v, c: tl.constexpr):
    """Bytes of v, each below 128, minus c < 128, as int8: the high bits keep borrows inside of the bytes."""
    return ((v | 0x80808080) - c * 0x01010101) ^ 0x80808080


@triton.jit
def _spread(nibble):
    """Four bits -> four bytes of 0 or 1."""
    return nibble * 0x00204081 & 0x01010101


@triton.jit
def _negate(v, nibble):
    """Bytes of v, each from 1 to 127, negated where the nibble has its bit set."""
    ones = _spread(nibble)
    return (v ^ ones * 255) + ones


@triton.jit
def _even(seven):
    """Seven sign bits -> eight; the eighth makes the number of minuses even."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    return seven | ((folded ^ folded >> 1) & 1) << 7


@triton.jit
def _value(table, nibble, i: tl.constexpr):
    return (tl.load(table + (nibble >> 8 * i & 15)).to(tl.uint32) & 255) << 8 * i


@triton.jit
def _lookup(raw, p, table, ASM: tl.constexpr, PTX: tl.constexpr):
    """The values of the low (p = 0) or the high nibbles of a word."""
    if PTX:
        low, high = tl.inline_asm_elementwise(ASM, "=r,=r,r", [raw], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
        return tl.where(p == 0, low, high)
    else:
        n = _nibbles(raw, p)
        return _value(table, n, 0) | _value(table, n, 1) | _value(table, n, 2) | _value(table, n, 3)


@triton.jit
def _ternary(raw, digit):
    """Digit 0..4 of each byte of TQ1_0, a fraction of 256 in base 3: floor(3 * frac(byte * 3^digit / 256))."""
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    power = power.to(tl.uint32)
    even = ((raw & 0x00FF00FF) * power & 0x00FF00FF) * 3 >> 8 & 0x00FF00FF
    odd = ((raw >> 8 & 0x00FF00FF) * power & 0x00FF00FF) * 3 >> 8 & 0x00FF00FF
    return even | odd << 8


@triton.jit
def _iq1(table, index, half, minus):
    """A half of a point of IQ1's grid, in eighths, plus 1 or (where minus) less 1."""
    v = tl.load(table + (index * 2 + half)).to(tl.uint32, bitcast=True) ^ 0x80808080
    return tl.where(minus != 0, v - 0x01010101, v + 0x01010101) ^ 0x80808080


@triton.jit
def _point(table, index):
    return tl.load(table + index).to(tl.uint32, bitcast=True)


# ---- the elements ---------------------------------------------------------------------------------------------------


@triton.jit
def word(QTYPE: tl.constexpr, b, u, p, w, table, PTX: tl.constexpr, RUN: tl.constexpr = False):
    """Four int8 elements of a block: unit u, plane p, word w -> uint32. RUN: w [T, N] are words in a row of each u, b
    [T, 1]."""
    pt = 2 * u + w // 2  # points of grids have 8 elements
    half = w % 2
    if QTYPE == Q4_0:
        return _minus(_nibbles(_word(b, 2, w, 2), p), 8)
    elif QTYPE == Q4_1:
        return _nibbles(_word(b, 4, w, 4), p)
    elif QTYPE == Q5_0:
        high = _spread(_word(b, 2, 0, 2) >> 16 * p + 4 * w & 15) << 4
        return _minus(_nibbles(_word(b, 6, w, 2), p) | high, 16)
    elif QTYPE == Q5_1:
        high = _spread(_word(b, 4, 0, 4) >> 16 * p + 4 * w & 15) << 4
        return _nibbles(_word(b, 8, w, 4), p) | high
    elif QTYPE == Q8_0:
        return _run(b, 2, 4 * u + w) if RUN else _word(b, 2, 4 * u + w, 2)
    elif QTYPE == Q1_0:
        bits = _byte(b + 2 + pt) >> (4 * half).to(tl.uint32) & 15
        return _minus(_spread(bits) << 1, 1)
    elif QTYPE == Q2_0:
        v = _byte(b + 2 + 4 * u + w)
        return _minus((v | v << 6 | v << 12 | v << 18) & 0x03030303, 1)
    elif QTYPE == IQ4_NL:
        return _lookup(_word(b, 2, w, 2), p, table, _IQ4_ASM, PTX)
    elif QTYPE == IQ4_XS:
        return _lookup(_word(b, 8, 4 * u + w, 4), p, table, _IQ4_ASM, PTX)
    elif QTYPE == MXFP4:
        return _lookup(_word(b, 1, w, 1), p, table, _FP4_ASM, PTX)
    elif QTYPE == NVFP4:
        return _lookup(_word(b, 4, 2 * u + half, 4), w // 2, table, _FP4_ASM, PTX)
    elif QTYPE == Q2_K:
        return _pairs(_word(b, 16, 4 * u + w, 4), p)
    elif QTYPE == Q3_K:
        high = _word(b, 0, u % 2 * 4 + w, 2) >> (u // 2 * 4 + p).to(tl.uint32) & 0x01010101
        return _minus(_pairs(_word(b, 32, 4 * u + w, 2), p) | high << 2, 4)
    elif QTYPE == Q4_K:
        return _nibbles(_word(b, 16, 4 * u + w, 4), p)
    elif QTYPE == Q5_K:
        high = _word(b, 16, u % 2 * 4 + w, 4) >> (u // 2 * 2 + p).to(tl.uint32) & 0x01010101
        return _nibbles(_word(b, 48, 4 * u + w, 4), p) | high << 4
    elif QTYPE == Q6_K:
        if RUN:
            low, high = _run(b, 0, u // 2 * 16 + p % 2 * 8 + u % 2 * 4 + w), _run(b, 128, 4 * u + w)
        else:
            low, high = _word(b, 0, u // 2 * 16 + p % 2 * 8 + u % 2 * 4 + w, 2), _word(b, 128, 4 * u + w, 2)
        return _nibbles(low, p // 2) << 2 | _pairs(high ^ 0xAAAAAAAA, p) << 6
    elif QTYPE == TQ2_0:
        return _minus(_pairs(_word(b, 0, 4 * u + w, 2), p), 1)
    elif QTYPE == TQ1_0:  # 32 bytes of five digits, 16 bytes of five, 4 bytes of four
        at = tl.where(u < 10, u % 2 * 4 + w, tl.where(u < 15, 8 + w, 12))
        digit = tl.where(u < 10, u // 2, tl.where(u < 15, u - 10, w))
        return _minus(_ternary(_word(b, 0, at, 2), digit), 1)
    elif QTYPE == IQ2_XXS:
        seven = _word(b, 6, u // 2 * 2, 2) >> (7 * (pt % 4)).to(tl.uint32) & 127
        v = _point(table, _byte(b + 2 + u // 2 * 8 + pt % 4) * 2 + half)
        return _negate(v, _even(seven) >> (4 * half).to(tl.uint32) & 15)
    elif QTYPE == IQ2_XS:
        code = _short(b + 2 + 2 * pt)
        return _negate(_point(table, (code & 511) * 2 + half), _even(code >> 9) >> (4 * half).to(tl.uint32) & 15)
    elif QTYPE == IQ2_S:
        high = _byte(b + 66 + pt // 4) >> (2 * (pt % 4)).to(tl.uint32) & 3
        v = _point(table, (_byte(b + 2 + pt) | high << 8) * 2 + half)
        return _negate(v, _byte(b + 34 + pt) >> (4 * half).to(tl.uint32) & 15)
    elif QTYPE == IQ3_XXS:
        seven = _word(b, 66, u // 2, 2) >> (7 * (pt % 4)).to(tl.uint32) & 127
        return _negate(_point(table, _byte(b + 2 + 4 * u + w)), _even(seven) >> (4 * half).to(tl.uint32) & 15)
    elif QTYPE == IQ3_S:
        high = _byte(b + 66 + u // 2) >> (u % 2 * 4 + w).to(tl.uint32) & 1
        v = _point(table, _byte(b + 2 + 4 * u + w) | high << 8)
        return _negate(v, _byte(b + 74 + pt) >> (4 * half).to(tl.uint32) & 15)
    elif QTYPE == IQ1_S:
        code = _short(b + 34 + u // 2 * 2)
        index = _byte(b + 2 + pt) | (code >> (3 * (pt % 4)).to(tl.uint32) & 7) << 8
        return _iq1(table, index, half, code >> 15)
    else:
        tl.static_assert(QTYPE == IQ1_M)
        code = _byte(b + 32 + u) >> (4 * (w // 2)).to(tl.uint32) & 15
        return _iq1(table, _byte(b + pt) | (code & 7) << 8, half, code >> 3)


# ---- the elements of types with a table of 16, for integer dots -----------------------------------------------------

TABLES = {ggml_types.IQ4_NL, ggml_types.IQ4_XS, ggml_types.MXFP4}  # with two planes of 16, one in the low nibbles


@triton.jit
def by_turns(a, b, PTX: tl.constexpr):
    """Bytes of two words by turns -> the first and the last four of them. The plain form leaves them as they are: what
    they multiply is in the order of `turns`, which has none elsewhere."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a; prmt.b32 a, $2, $3, 0x7362; prmt.b32 $0, $2, $3, 0x5140; mov.b32 $1, a;}",
            "=r,=r,r,r", [a, b], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return a, b


@triton.jit
def held(table, i, PTX: tl.constexpr):
    """The table of one of these types as `turns` wants it: in four words for each thread i. Odd ones have the second of
    two that are alike: what is the same in a warp, compilers copy for each use."""
    if PTX:
        at = table.to(tl.pointer_type(tl.uint32)) + i % 2 * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return table


@triton.jit
def turns(raw, table, PTX: tl.constexpr):
    """A word of nibbles -> int8 elements in two words, as `by_turns` has a word of each plane."""
    if PTX:
        return tl.inline_asm_elementwise(
            _TURNS_ASM, "=&r,=&r,r,r,r,r,r", [raw, table[0], table[1], table[2], table[3]],
            dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _lookup(raw, 0, table, "", False), _lookup(raw, 1, table, "", False)


@triton.jit
def _behind(b, HEAD: tl.constexpr, i):
    """Words i [T, 4], 0 to 3, behind HEAD <= 2 bytes at any b [T] -> those bytes, lowest in a uint32 [T], and the words
    [T, 4]: loads of whole words, each of which holds something of it."""
    T: tl.constexpr = b.shape[0]
    odd = (b.to(tl.uint64) & 3).to(tl.int32)
    low = tl.load(((b - odd)[:, None] + 4 * i).to(tl.pointer_type(tl.uint32)))
    end = tl.load((b - odd + 16).to(tl.pointer_type(tl.uint32)))
    even, odds = tl.split(tl.reshape(low, [T, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odds)
    bits = ((odd + HEAD) * 8).to(tl.uint64)
    even = tl.join(_shifted(w0, w1, bits), _shifted(w2, w3, bits))
    odds = tl.join(_shifted(w1, w2, bits), _shifted(w3, end, bits))
    return w0 >> (odd * 8).to(tl.uint32), tl.reshape(tl.join(even, odds), [T, 4])


@triton.jit
def magnitudes(QTYPE: tl.constexpr, table, i):
    """For each thread i, of a type of TABLES: two words of the values of nibbles below 8, and two of the others, which
    have the other sign."""
    w0, w1, w2, w3 = held(table, i, True)
    if QTYPE == MXFP4:
        return w0, w1, w0, w1
    else:
        return (w0 ^ 0xFFFFFFFF) + 0x01010101, (w1 ^ 0xFFFFFFFF) + 0x01010101, w2, w3


@triton.jit
def apart(QTYPE: tl.constexpr, b, u, w, halves):
    """Units u [T] of a type of TABLES at b [T], words w [T, 4], for NVIDIA: magnitudes of elements above 0 in two words
    [T, 4] and of those below 0 in two, with 0 for the others, in the order of `by_turns`; and d f32 [T].

    prmt picks four of eight bytes by the low three bits of four nibbles. The upper bit has it take the sign of a byte,
    which magnitudes do not have, in place of the byte: as each half of a table has one sign, nothing has to choose."""
    if QTYPE == IQ4_XS:
        raw, found = _word(b[:, None], 8, 4 * u[:, None] + w, 4), d(QTYPE, b, u)
    elif QTYPE == IQ4_NL:
        head, raw = _behind(b, 2, w)
        found = _as_f16(head)
    else:
        tl.static_assert(QTYPE == MXFP4)
        head, raw = _behind(b, 1, w)
        found = _e8m0(head & 255)
    x0, x1, y0, y1 = tl.inline_asm_elementwise(
        _APART_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [raw, halves[0][:, None], halves[1][:, None], halves[2][:, None], halves[3][:, None]],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip
    if QTYPE == MXFP4:
        return x0, x1, y0, y1, found
    else:
        return y0, y1, x0, x1, found


# ---- their scales ---------------------------------------------------------------------------------------------------


@triton.jit
def _six_bits(b, u, p):
    """The 8 scales and 8 mins of 6 bits in bytes 4 to 15 of Q4_K and Q5_K -> scale, min of a unit and plane.

    Two loads of 8 bytes; up to the bytes of a plane, all is the same for both of them.
    """
    words = b.to(tl.pointer_type(tl.uint64))
    first, second = tl.load(words), tl.load(words + 1)
    shift = (u // 2 % 2 * 16).to(tl.uint32)
    low, mid = (first >> 32).to(tl.uint32) >> shift, second.to(tl.uint32) >> shift
    high = (second >> 32).to(tl.uint32) >> shift
    scales = tl.where(u < 4, low & 0x3F3F, high & 0x0F0F | low >> 2 & 0x3030)
    mins = tl.where(u < 4, mid & 0x3F3F, high >> 4 & 0x0F0F | mid >> 2 & 0x3030)
    return (scales >> 8 * p & 255).to(tl.int32), (mins >> 8 * p & 255).to(tl.int32)


@triton.jit
def _as_f16(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e8m0(e):
    """2^(e - 128): half of the power of two, because FP4_VALUES are doubled; 0 and 1 give subnormals."""
    return tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(s):
    """e4m3 without a sign, halved likewise; 0x7F gives 0."""
    e, mantissa = s >> 3 & 15, (s & 7).to(tl.int32).to(tl.float32)
    power = (e + 119 << 23).to(tl.float32, bitcast=True)
    return tl.where(s == 0x7F, 0.0, tl.where(e == 0, mantissa * 0.0009765625, (1.0 + mantissa * 0.125) * power))


@triton.jit
def _odd(code):
    """The scale 2 code + 1 of the IQ types."""
    return (2 * code + 1).to(tl.int32)


@triton.jit
def _nibble_of(at, i):
    """Nibble i of the bytes from `at` on, low ones first."""
    return _byte(at + i // 2) >> (4 * (i % 2)).to(tl.uint32) & 15


@triton.jit
def d(QTYPE: tl.constexpr, b, u):
    """The float that multiplies unit u of a block -> f32."""
    if QTYPE == Q2_K:
        return _f16(b + 80)
    elif QTYPE == Q3_K:
        return _f16(b + 108)
    elif QTYPE == Q4_K or QTYPE == Q5_K or QTYPE == IQ4_XS:
        return _as_f16(tl.load(b.to(tl.pointer_type(tl.uint64))))
    elif QTYPE == Q6_K:
        return _f16(b + 208) * 0.25
    elif QTYPE == TQ2_0:
        return _f16(b + 64)
    elif QTYPE == TQ1_0:
        return _f16(b + 52)
    elif QTYPE == MXFP4:
        return _e8m0(_byte(b))
    elif QTYPE == NVFP4:
        return _e4m3(_byte(b + u))
    elif QTYPE == IQ2_XXS or QTYPE == IQ2_XS or QTYPE == IQ2_S or QTYPE == IQ1_S:
        return _f16(b) * 0.125
    elif QTYPE == IQ3_XXS:
        return _f16(b) * 0.25
    elif QTYPE == IQ1_M:  # spread over the top nibbles of the four words of scales
        bits = _short(b + 48) >> 12 | _short(b + 50) >> 12 << 4 | _short(b + 52) >> 12 << 8 | _short(b + 54) >> 12 << 12
        return _as_f16(bits) * 0.125
    else:
        return _f16(b)


@triton.jit
def scale(QTYPE: tl.constexpr, b, u, p):
    """The integer that multiplies the 16 elements of unit u and plane p -> int32, or 1."""
    if QTYPE == Q2_K:
        return (_byte(b + u // 2 * 8 + p * 2 + u % 2) & 15).to(tl.int32)
    elif QTYPE == Q3_K:
        low = _byte(b + 96 + p * 2 + u % 2) >> (u // 2 * 4).to(tl.uint32) & 15
        high = _byte(b + 104 + (p * 2 + u % 2) % 4) >> (u // 2 * 4 + p // 2 * 2).to(tl.uint32) & 3
        return (low | high << 4).to(tl.int32) - 32
    elif QTYPE == Q4_K or QTYPE == Q5_K:
        return _six_bits(b, u, p)[0]
    elif QTYPE == Q6_K:
        both = _short(b + 192 + u // 2 * 8 + p * 2)  # one load for two units
        return (both >> (u % 2 * 8).to(tl.uint32)).to(tl.int8).to(tl.int32)
    elif QTYPE == IQ4_XS:  # in the one load that has d
        head = tl.load(b.to(tl.pointer_type(tl.uint64)))
        low = (head >> 32).to(tl.uint32) >> (u * 4).to(tl.uint32)
        high = head.to(tl.uint32) >> (u * 2 + 16).to(tl.uint32)
        return (low & 15 | (high & 3) << 4).to(tl.int32) - 32
    elif QTYPE == IQ2_XXS:
        return _odd(_short(b + 8 + u // 2 * 8) >> 12)
    elif QTYPE == IQ2_XS:
        return _odd(_nibble_of(b + 66, u))
    elif QTYPE == IQ2_S:
        return _odd(_nibble_of(b + 74, u))
    elif QTYPE == IQ3_XXS:
        return _odd(_short(b + 68 + u // 2 * 4) >> 12)
    elif QTYPE == IQ3_S:
        return _odd(_nibble_of(b + 106, u // 2))
    elif QTYPE == IQ1_S:
        return _odd(_short(b + 34 + u // 2 * 2) >> 12 & 7)
    elif QTYPE == IQ1_M:
        return _odd(_short(b + 48 + u // 4 * 2) >> (u % 4 * 3).to(tl.uint32) & 7)
    else:
        return 1


@triton.jit
def dmin(QTYPE: tl.constexpr, b):
    """The float that multiplies `least`, in the types of OFFSETS -> f32. A product by -1 keeps the sign of zeros."""
    if QTYPE == Q2_K:
        return _f16(b + 82) * -1.0
    elif QTYPE == Q4_K or QTYPE == Q5_K:
        return _as_f16(tl.load(b.to(tl.pointer_type(tl.uint64))) >> 16) * -1.0
    else:
        return _f16(b + 2)


@triton.jit
def least(QTYPE: tl.constexpr, b, u, p):
    """The integer that is added times dmin to the 16 elements of unit u and plane p -> int32, or 1."""
    if QTYPE == Q2_K:
        return (_byte(b + u // 2 * 8 + p * 2 + u % 2) >> 4).to(tl.int32)
    elif QTYPE == Q4_K or QTYPE == Q5_K:
        return _six_bits(b, u, p)[1]
    else:
        return 1


@triton.jit
def factor(QTYPE: tl.constexpr, b, u, p):
    """d * scale -> f32."""
    return d(QTYPE, b, u) * scale(QTYPE, b, u, p)


@triton.jit
def offset(QTYPE: tl.constexpr, b, u, p):
    """dmin * least -> f32."""
    return dmin(QTYPE, b) * least(QTYPE, b, u, p)


OFFSETS = (
    ggml_types.Q4_1, ggml_types.Q5_1, ggml_types.Q2_K, ggml_types.Q4_K, ggml_types.Q5_K,
)  # fmt: skip


@triton.jit
def place(unit, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, last=None):
    """Units of a row, int32, counted through its blocks -> byte of the block, unit in it, first element of plane 0.

    last: the last block, which serves for those beyond it."""
    UNITS: tl.constexpr = BLOCK // (16 * PLANES)
    block, u = unit // UNITS, unit % UNITS
    if last is not None:
        block = tl.minimum(block, last)
    return block * BYTES, u, block * BLOCK + u // (WIDTH // 16) * (WIDTH * PLANES) + u % (WIDTH // 16) * 16


@triton.jit
def element(q, i: tl.constexpr):
    """Element i of words of four -> f32."""
    return (q >> 8 * i).to(tl.int8).to(tl.float32)


@triton.jit
def in_order(e0, e1, e2, e3, N: tl.constexpr, T: tl.constexpr):
    """The elements of words, four times [N, T] -> [N, 4 T]."""
    return tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [N, 4 * T])


@triton.jit
def per_word(v, N: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr):
    """What stands once for the words that a thread holds of a unit, [N, 4 UNITS / WORDS] -> [N, 4 UNITS]."""
    if WORDS == 4:
        return tl.reshape(tl.broadcast_to(v[:, :, None], [N, UNITS, 4]), [N, 4 * UNITS])
    else:
        return v
