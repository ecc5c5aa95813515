"""Exact products of small integers: by dp4a, four of a thread at once, and by the tensor cores, a warp's together.

The tensor cores' functions are NVIDIA's `mma.sync` on tensors [32 WARPS] of an element for each thread. Thread
4 g + t of a warp gives of A [16, .] the rows g and g + 8, of B [., 8] the column g, and gets of C [16, 8] the columns
2 t and 2 t + 1 of rows g and g + 8, as (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). Beside the PTX stands
a plain form, with the same results.
"""

import triton
import triton.language as tl


@triton.jit
def dot4(a, b, c, PTX: tl.constexpr):
    """c int32 plus the sum of the products of four int8 each, in uint32 words; a and b broadcast -> int32."""
    a, b = tl.broadcast(a, b)
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            c += (a >> 8 * i).to(tl.int8).to(tl.int32) * (b >> 8 * i).to(tl.int8).to(tl.int32)
        return c


@triton.jit
def byte(word, i: tl.constexpr, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Byte i of a uint32 -> int32: one instruction, of which compilers make two."""
    if PTX:
        PICK: tl.constexpr = (0x888 + 0x111 * i << 4) + i if SIGNED else 0x4440 + i  # 8: the sign of a byte
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, PICK], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = (word >> 8 * i & 255).to(tl.int32)
        return (found ^ 128) - 128 if SIGNED else found


@triton.jit
def _outer(a, b, INTEGERS: tl.constexpr):
    """Of a row and a column of each thread: products, added up over the four threads t -> columns 2 t, 2 t + 1."""
    WARPS: tl.constexpr = a.shape[0] // 32
    a, b = tl.reshape(a, [WARPS, 8, 1, 4]), tl.reshape(b, [WARPS, 1, 8, 4])
    if INTEGERS:
        a, b = tl.broadcast(a, b)
        c = dot4(a, b, tl.zeros(a.shape, tl.int32), False)
    else:
        c = a * b
    even, odd = tl.split(tl.reshape(tl.sum(c, 3), [WARPS, 8, 4, 2]))
    return tl.reshape(even, [32 * WARPS]), tl.reshape(odd, [32 * WARPS])


@triton.jit
def dots16(a0, a1, b, PTX: tl.constexpr):
    """A [16, 16] B [16, 8] of int8 -> int32. Words t along K: a0, a1 of rows g, g + 8, b of column g."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0;"
            "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {z, z, z, z};}",
            "=r,=r,=r,=r,r,r,r", [a0, a1, b], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        c0, c1 = _outer(a0, b, True)
        c2, c3 = _outer(a1, b, True)
        return c0, c1, c2, c3


@triton.jit
def dots32(a0, a1, a2, a3, b0, b1, PTX: tl.constexpr):
    """A [16, 32] B [32, 8] of int8 -> int32. A thread's words are any two of the 8 along K, the same ones in A and B:
    a0, a2 of row g, a1, a3 of row g + 8, b0, b1 of column g."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0;"
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {z, z, z, z};}",
            "=r,=r,=r,=r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        c0, c1, c2, c3 = dots16(a0, a1, b0, False)
        e0, e1, e2, e3 = dots16(a2, a3, b1, False)
        return c0 + e0, c1 + e1, c2 + e2, c3 + e3


@triton.jit
def halves(low, high, PTX: tl.constexpr):
    """Two f32 as f16 in a uint32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        low, high = low.to(tl.float16).to(tl.uint16, bitcast=True), high.to(tl.float16).to(tl.uint16, bitcast=True)
        return low.to(tl.uint32) | high.to(tl.uint32) << 16


@triton.jit
def _half(word, i: tl.constexpr):
    return (word >> 16 * i).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _outer_halves(a, b):
    c0, c1 = _outer(_half(a, 0), _half(b, 0), False)
    e0, e1 = _outer(_half(a, 1), _half(b, 1), False)
    return c0 + e0, c1 + e1


@triton.jit
def dots_of_halves(a0, a1, a2, a3, b0, b1, PTX: tl.constexpr):
    """A [16, 16] B [16, 8] of f16 -> f32, exact where they are whole numbers and sums are below 2^24. Words of two
    elements, words t and t + 4: a0, a2 of row g, a1, a3 of row g + 8, b0, b1 of column g."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .f32 z; mov.f32 z, 0f00000000;"
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {z, z, z, z};}",
            "=f,=f,=f,=f,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        c0, c1 = _outer_halves(a0, b0)
        c2, c3 = _outer_halves(a1, b0)
        e0, e1 = _outer_halves(a2, b1)
        e2, e3 = _outer_halves(a3, b1)
        return c0 + e0, c1 + e1, c2 + e2, c3 + e3
