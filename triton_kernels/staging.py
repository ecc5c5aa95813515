"""Rows of packed blocks on their way through shared memory, each warp's for itself: NVIDIA's `cp.async` brings what
will be multiplied next while the tensor cores have the present, and holds no registers. Loads came late: the compiler
puts them where their values are used.

A warp has slots of 16 rows, of STRIDE bytes each; thread 4 g + t copies and reads of rows g and g + 8. Copies are of 16
bytes, and begin at a multiple of LINE, as what comes from memory does: a row in its slot begins with what lies before
it. Elsewhere than on NVIDIA nothing is copied, and what would be an address of shared memory, a uint32, is a pointer to
the row itself: the functions that read take either.

Reading is pure to the compiler, so that equal reads are one. It follows `arrived` by its address; that it precedes the
copies which take its slot rests on the order of the source, which compilers keep, and its values are used before.
"""

import functools

import triton
import triton.language as tl


@functools.cache
def reservation(size: int) -> str:
    """PTX: the address of `size` bytes of shared memory -> $0. At most 48 KiB with what else a kernel has."""
    return f"{{.shared .align 128 .b8 stage[{size}]; mov.u32 $0, stage;}}"


@triton.jit
def reserve(i, RESERVATION: tl.constexpr):
    """The same address for every i, int32."""
    return tl.inline_asm_elementwise(RESERVATION, "=r,r", [i], dtype=tl.uint32, is_pure=False, pack=1)


COPY = tl.constexpr(
    "{.reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.cg.shared.global.L2::128B [$1], [$2], 16; mov.u32 $0, 0;}"
)


@triton.jit
def _copy(to, source, live):
    tl.inline_asm_elementwise(
        COPY, "=r,r,l,r", [to, source, live.to(tl.uint32)], dtype=tl.uint32, is_pure=False, pack=1
    )


@triton.jit
def send(to, row, at, size, alive, t, SIZE: tl.constexpr, LINE: tl.constexpr, GRAIN: tl.constexpr):
    """Begin to copy `size` <= SIZE bytes from row + at, a multiple of GRAIN, to slot `to` if alive."""
    skipped = _skipped(row + at, LINE)
    to, source = to + (16 * t).to(tl.uint32), row + (at - skipped + 16 * t)
    PIECES: tl.constexpr = (SIZE + LINE - GRAIN + 15) // 16
    for first in tl.static_range(0, PIECES, 4):
        i = first + t
        live = alive
        if size is not None or 16 * (first + 4) > SIZE:
            live = live & (16 * i < (SIZE if size is None else size) + skipped)
        _copy(to + 16 * first, source + 16 * first, live)


@triton.jit
def _skipped(at, LINE: tl.constexpr):
    return (at.to(tl.uint64) & (LINE - 1)).to(tl.int32)


@triton.jit
def place(to, row, at, LINE: tl.constexpr):
    """Where in its slot `to` the byte row + at lies."""
    return to + _skipped(row + at, LINE).to(tl.uint32)


@triton.jit
def sent(at):
    """Close a group of copies. Returns `at`, for the order of things."""
    return tl.inline_asm_elementwise(
        "cp.async.commit_group; mov.u32 $0, $1;", "=r,r", [at], dtype=tl.uint32, is_pure=False, pack=1
    )


@triton.jit
def arrived(at, LATER: tl.constexpr):
    """Wait for all groups of the warp's but the LATER last. Returns `at`: who reads from there reads afterwards."""
    if LATER == 0:
        WAIT: tl.constexpr = "cp.async.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    elif LATER == 1:
        WAIT: tl.constexpr = "cp.async.wait_group 1; bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    elif LATER == 2:
        WAIT: tl.constexpr = "cp.async.wait_group 2; bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    else:
        tl.static_assert(LATER == 3)
        WAIT: tl.constexpr = "cp.async.wait_group 3; bar.warp.sync 0xffffffff; mov.u32 $0, $1;"
    return tl.inline_asm_elementwise(WAIT, "=r,r", [at], dtype=tl.uint32, is_pure=False, pack=1)


@triton.jit
def words(at, first: tl.constexpr, COUNT: tl.constexpr, PTX: tl.constexpr):
    """1, 2 or 4 uint32 from byte `first` of `at` on, both multiples of their size."""
    if PTX:
        at += first
        if COUNT == 1:
            return tl.inline_asm_elementwise(
                "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=tl.uint32, is_pure=True, pack=1
            )
        elif COUNT == 2:
            return tl.inline_asm_elementwise(
                "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [at], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
                dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        at = at.to(tl.pointer_type(tl.uint32)) + first // 4
        if COUNT == 1:
            return tl.load(at)
        elif COUNT == 2:
            return tl.load(at), tl.load(at + 1)
        else:
            return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def short(at, first: tl.constexpr, PTX: tl.constexpr):
    """16 bits at byte `first` of `at`, both even -> uint32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.shared.u16 $0, [$1];", "=r,r", [at + first], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.load((at + first).to(tl.pointer_type(tl.uint16))).to(tl.uint32)


@triton.jit
def word(at, first: tl.constexpr, PTX: tl.constexpr):
    """A uint32 at an even byte."""
    return short(at, first, PTX) | short(at, first + 2, PTX) << 16


@triton.jit
def anywhere(at, first: tl.constexpr, PTX: tl.constexpr):
    """A uint32 at any byte."""
    if PTX:  # what depends on `at` is the same for every fourth `first`
        from_whole = at + first % 4
        whole = from_whole & 0xFFFFFFFC
        low, high = words(whole, first // 4 * 4, 1, True), words(whole, first // 4 * 4 + 4, 1, True)
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, from_whole << 3],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.load(at + first).to(tl.uint32)
        for i in tl.static_range(1, 4):
            found |= tl.load(at + (first + i)).to(tl.uint32) << 8 * i
        return found


@triton.jit
def byte(at, first: tl.constexpr, PTX: tl.constexpr):
    """A byte -> uint32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.shared.u8 $0, [$1];", "=r,r", [at + first], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.load(at + first).to(tl.uint32)
