"""x W^T for 2 to 16 rows of x on the tensor cores, with the integer dots of `few_rows.py`.

A program owns SETS times 16 rows of W and all rows of x, in one or two TILES of 8. Its WARPS share K: each takes SPAN
elements at a time, a chunk, multiplies x by one set of rows of W after another, and adds

    float(sum of scale * dots of q_w and q_x) * (d * d_x)  +  float(sum of least * s_x) * (dmin * d_x)

to f32 sums, which the warps add up at the end. W comes through shared memory (`staging.py`), SLOTS - 1 sets in
advance; x comes into registers, a chunk in advance where that pays (`reads_ahead`). Thread 4 g + t of a warp holds rows
g and g + 8 of a set (`integer_dots.py`); of each 16 elements that share a scale it holds word t, or words 2 t and
2 t + 1 where 32 of them do, or words t and t + 4 of types with a table. A row of x has the same result whatever other
rows there are.

Up to three matrices with one x may be one launch: their programs follow each other.
M rows of x [M, K], N rows of W, K elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks, fragments, staging
from dasllama_torch.triton_kernels.fragments import SPAN
from dasllama_torch.triton_kernels.integer_dots import dots16, dots32, dots_of_halves, halves
from dasllama_torch.triton_kernels.launch import PTX, early
from dasllama_torch.triton_kernels.quantize_activation import Rounded

APART = ["w1", "w2", "y1", "y2", "N1", "N2"]  # not to compile kernels for what is special of them


@triton.jit
def part(tile, y, packed, w1, w2, y1, y2, N, N1, N2, BN: tl.constexpr):
    """The tile, result, matrix and N of a program: of the first matrix, or of one of two others that follow.

    w1, w2 and y1, y2: from the first matrix to the others in units of 16 bytes, from the first result to the others
    in elements; N1 and N2: their rows, none if there is no such matrix."""
    first = tl.cdiv(N, BN)
    second = first + tl.cdiv(N1, BN)
    one, two = tile >= first, tile >= second
    packed += tl.where(two, w2, tl.where(one, w1, 0)).to(tl.int64) * 16
    y += tl.where(two, y2, tl.where(one, y1, 0))
    tile -= tl.where(two, second, tl.where(one, first, 0))
    return tile, y, packed, tl.where(two, N2, tl.where(one, N1, N))


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _one(at, PTX: tl.constexpr):
    """A word, read here: what is wanted late the compiler would read late."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.uint32, is_pure=False, pack=1
        )
    else:
        return tl.load(at.to(tl.pointer_type(tl.uint32)))


@triton.jit
def _two(at, PTX: tl.constexpr):
    """Two words at a multiple of 8 bytes, likewise."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.uint32, tl.uint32), is_pure=False, pack=1
        )
    else:
        both = tl.load(at.to(tl.pointer_type(tl.uint64)))
        return both.to(tl.uint32), (both >> 32).to(tl.uint32)


@triton.jit
def _words_of_x(q, chunk, last, R, ms, t, SHARE: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr):
    """Of a chunk's elements in columns g, piece by piece of SHARE, tile by tile: uint32, two or one. Of chunks that may
    be cut off, whose SHARE is 32, `last` is the last piece there is, and stands again for those beyond; or None."""
    words = ()
    for i in tl.static_range(SPAN // SHARE):
        for j in tl.static_range(len(ms)):
            at = q + (chunk.to(tl.int64) * (SPAN * R) + (ms[j] * 32 + t * (4 if TABLE else SHARE // 4)))
            at += i * SHARE // 32 * 32 * R if last is None else tl.minimum(i, last) * (32 * R)
            at += i * SHARE % 32
            if TABLE:
                words = words + (_one(at, PTX), _one(at + 16, PTX))
            elif SHARE == 32:
                words = words + _two(at, PTX)
            else:
                words = words + (_one(at, PTX),)
    return words


@triton.jit
def _in_order(words, TABLE: tl.constexpr, PTX: tl.constexpr):
    """Words of x as the types' dots take them."""
    found = ()
    if TABLE:
        for j in tl.static_range(len(words) // 2):
            found = found + blocks.by_turns(words[2 * j], words[2 * j + 1], PTX)
    else:
        found = words
    return found


@triton.jit
def _scales_of_x(d, block, R, ms, PTX: tl.constexpr):
    """d of columns 2 t and 2 t + 1, tile by tile, as uint32."""
    found = ()
    for j in tl.static_range(len(ms)):
        found = found + (_one(d + block * R + ms[j], PTX),)
    return found


@triton.jit
def _sums_of_x(s, chunk, R, ms, t, PTX: tl.constexpr):
    """Sums of 16 elements of columns g: 2 t and 2 t + 1, and those 8 further on, as uint32."""
    found = ()
    for j in tl.static_range(len(ms)):
        at = s + (chunk * R + ms[j]) * 16 + 2 * t
        for half in tl.static_range(2):
            found = found + _two(at + 8 * half, PTX)
    return found


@triton.jit
def _chunk_of_x(
    q, d, s, chunk, K, R, ms, pairs, t, OFFSET: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What is read of x for a chunk, or for the last one: q's words; d, if a block is a chunk; s, if there is one."""
    chunk = tl.minimum(chunk, tl.cdiv(K, SPAN) - 1)
    last = None if EVEN or BLOCK == SPAN else K // BLOCK - 1 - chunk * (SPAN // BLOCK)
    words = _words_of_x(q, chunk, last, R, ms, t, SHARE, TABLE, PTX)
    dx = _scales_of_x(d, chunk, R, pairs, PTX) if BLOCK == SPAN else ()
    sx = _sums_of_x(s, chunk, R, ms, t, PTX) if OFFSET else ()
    return words, dx, sx


@triton.jit
def _as_halves(low, high, PTX: tl.constexpr):
    return halves(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True), PTX)


@triton.jit
def _dots(
    QTYPE: tl.constexpr, at0, at1, t, i: tl.constexpr, x, table, SHARE: tl.constexpr, TILES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Of the elements from SHARE i on -> int32, four for each tile."""
    found = ()
    if SHARE == 32:
        a0, a2 = fragments.pair(QTYPE, at0, t, i, table, PTX)
        a1, a3 = fragments.pair(QTYPE, at1, t, i, table, PTX)
        for j in tl.static_range(TILES):
            found = found + dots32(a0, a1, a2, a3, x[2 * j], x[2 * j + 1], PTX)
    else:
        a0, a1 = fragments.single(at0, t, i, PTX), fragments.single(at1, t, i, PTX)
        for j in tl.static_range(TILES):
            found = found + dots16(a0, a1, x[j], PTX)
    return found


@triton.jit
def _send(
    to, rows, chunk, end, t, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr,
    GRAIN: tl.constexpr,
):  # fmt: skip
    """Begin to copy what there is of a chunk of rows g and g + 8, each `end` bytes long."""
    at = chunk * CHUNK
    size = None if BLOCK == SPAN else tl.minimum(end - at, CHUNK)
    for half in tl.static_range(2):
        staging.send(to + 8 * half * STRIDE, rows[half], at, size, at < end, t, CHUNK, LINE, GRAIN)


@triton.jit
def _beside(v, A: tl.constexpr):
    """v[0] to v[A - 1], each [T] -> [T, A]."""
    if A == 1:
        return v[0][:, None]
    else:
        low, high = _beside(v[: A // 2], A // 2), _beside(v[A // 2 :], A // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [v[0].shape[0], A])


@triton.jit
def _row_of_x(order, m, M, share):
    """The row of x that is column m of M; the last one again beyond them. order: entries, `share` of a row each."""
    m = tl.minimum(m, M - 1)
    return m if order is None else tl.load(order + m) // share


@triton.jit
def tile_of_products(
    q, d, s, packed, table, tile, order, share, R, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, SHARE: tl.constexpr,
    TABLE: tl.constexpr, TILES: tl.constexpr, SETS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr, RESERVATION: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of M columns, rows of x of which there are R: f32 results of a program with their n and column, each [32, .]."""
    T: tl.constexpr = 32 * WARPS
    CHUNK: tl.constexpr = SPAN // BLOCK * BYTES
    GRAIN: tl.constexpr = 16 if BYTES % 16 == 0 else 2 - BYTES % 2
    SLOT: tl.constexpr = 16 * STRIDE
    i = tl.arange(0, T)
    warp, g, t = i // 32, i % 32 // 4, i % 4
    place = t.to(tl.uint32) if PTX else t
    end = K // BLOCK * BYTES
    n_chunks = tl.cdiv(K, SPAN)
    rows = ()
    for of_set in tl.static_range(2 * SETS):
        rows = rows + (packed + tl.minimum(tile * (16 * SETS) + 8 * of_set + g, N - 1).to(tl.int64) * end,)
    if PTX:
        base = staging.reserve(i, RESERVATION) + (warp * (SLOTS * SLOT) + g * STRIDE).to(tl.uint32)
        for step in tl.static_range(SLOTS - 1):
            pair = rows[2 * (step % SETS) : 2 * (step % SETS) + 2]
            _send(base + step * SLOT, pair, step // SETS * WARPS + warp, end, t, CHUNK, BLOCK, STRIDE, LINE, GRAIN)
            base = staging.sent(base)
    if EARLY and order is None:  # who has an order has waited for it
        tl.extra.cuda.gdc_wait()
    values = blocks.held(table, i, PTX) if TABLE else None
    ms, pairs = (), ()  # rows of x: of column g of each tile; of its columns 2 t and 2 t + 1
    for j in tl.static_range(TILES):
        ms = ms + (_row_of_x(order, g + 8 * j, M, share),)
        for odd in tl.static_range(2):
            pairs = pairs + (_row_of_x(order, 8 * j + 2 * t + odd, M, share),)
    acc = ()
    for _ in tl.static_range(4 * TILES * SETS):
        acc = acc + (tl.zeros([T], tl.float32),)
    slot = 0
    WORDS: tl.constexpr = SHARE // 16 * TILES
    x_ahead = ()
    if AHEAD:
        x_ahead = _chunk_of_x(q, d, s, warp, K, R, ms, pairs, t, OFFSET, BLOCK, SHARE, TABLE, EVEN, PTX)
    for first in range(0, n_chunks, WARPS):
        chunk = first + warp
        alive = None
        if not EVEN:
            alive = chunk < n_chunks
            chunk = tl.minimum(chunk, n_chunks - 1)
        wanted = first + warp + (WARPS if AHEAD else 0)
        x = _chunk_of_x(q, d, s, wanted, K, R, ms, pairs, t, OFFSET, BLOCK, SHARE, TABLE, EVEN, PTX)
        if AHEAD:
            words, dx, sx = x_ahead
            x_ahead = x
        else:
            words, dx, sx = x
        added = ()
        for one in tl.static_range(SETS):
            if PTX:
                base = staging.arrived(base, SLOTS - 2)
                to = tl.where(slot == 0, (SLOTS - 1) * SLOT, slot - SLOT)
                ahead = first + ((one + SLOTS - 1) // SETS * WARPS) + warp
                later = rows[2 * ((one + SLOTS - 1) % SETS) : 2 * ((one + SLOTS - 1) % SETS) + 2]
                _send(base + to.to(tl.uint32), later, ahead, end, t, CHUNK, BLOCK, STRIDE, LINE, GRAIN)
                base = staging.sent(base)
                at = base + slot.to(tl.uint32)
                at0 = staging.place(at, rows[2 * one], chunk * CHUNK, LINE)
                at1 = staging.place(at + 8 * STRIDE, rows[2 * one + 1], chunk * CHUNK, LINE)
                slot = tl.where(slot == (SLOTS - 1) * SLOT, 0, slot + SLOT)
            else:
                at0, at1 = rows[2 * one] + chunk * CHUNK, rows[2 * one + 1] + chunk * CHUNK
            if BLOCK == SPAN:
                sums = ()
                for _ in tl.static_range(4 * TILES):
                    sums = sums + (tl.zeros([T], tl.int32),)
                for k in tl.static_range(SPAN // SHARE):
                    xk = _in_order(words[WORDS * k : WORDS * (k + 1)], TABLE, PTX)
                    dots = _dots(QTYPE, at0, at1, place, k, xk, values, SHARE, TILES, PTX)
                    scale0, scale1 = fragments.scale(QTYPE, at0, k, PTX), fragments.scale(QTYPE, at1, k, PTX)
                    more = ()
                    for j in tl.static_range(TILES):
                        more = more + (
                            sums[4 * j] + dots[4 * j] * scale0, sums[4 * j + 1] + dots[4 * j + 1] * scale0,
                            sums[4 * j + 2] + dots[4 * j + 2] * scale1, sums[4 * j + 3] + dots[4 * j + 3] * scale1,
                        )  # fmt: skip
                    sums = more
                d0, d1 = fragments.d(QTYPE, at0, 0, PTX), fragments.d(QTYPE, at1, 0, PTX)
                if OFFSET:
                    low0, low1 = fragments.dmin(at0, PTX), fragments.dmin(at1, PTX)
                    l0, l2 = fragments.leasts(at0, place, PTX)
                    l1, l3 = fragments.leasts(at1, place, PTX)
                if alive is not None:
                    d0, d1 = tl.where(alive, d0, 0.0), tl.where(alive, d1, 0.0)
                    if OFFSET:
                        low0, low1 = tl.where(alive, low0, 0.0), tl.where(alive, low1, 0.0)
                for j in tl.static_range(TILES):
                    f0, f1 = sums[4 * j].to(tl.float32) * d0, sums[4 * j + 1].to(tl.float32) * d0
                    f2, f3 = sums[4 * j + 2].to(tl.float32) * d1, sums[4 * j + 3].to(tl.float32) * d1
                    dx0, dx1 = dx[2 * j].to(tl.float32, bitcast=True), dx[2 * j + 1].to(tl.float32, bitcast=True)
                    if OFFSET:
                        s0 = _as_halves(sx[4 * j], sx[4 * j + 1], PTX)
                        s1 = _as_halves(sx[4 * j + 2], sx[4 * j + 3], PTX)
                        c0, c1, c2, c3 = dots_of_halves(l0, l1, l2, l3, s0, s1, PTX)
                        # Of a sum of two products a compiler may round either first, here so and there so.
                        f0, f1 = tl.fma(c0, low0, f0), tl.fma(c1, low0, f1)
                        f2, f3 = tl.fma(c2, low1, f2), tl.fma(c3, low1, f3)
                    before = acc[4 * (TILES * one + j) : 4 * (TILES * one + j) + 4]
                    added = added + (
                        before[0] + f0 * dx0, before[1] + f1 * dx1,
                        before[2] + f2 * dx0, before[3] + f3 * dx1,
                    )  # fmt: skip
            else:
                sums = acc[4 * TILES * one : 4 * TILES * (one + 1)]
                for k in tl.static_range(SPAN // BLOCK):
                    block, there = chunk * (SPAN // BLOCK) + k, None
                    d0, d1 = fragments.d(QTYPE, at0, k, PTX), fragments.d(QTYPE, at1, k, PTX)
                    if alive is not None:
                        there = alive & (block < K // BLOCK)
                        block = tl.minimum(block, K // BLOCK - 1)
                        d0, d1 = tl.where(there, d0, 0.0), tl.where(there, d1, 0.0)
                    dk = ()
                    for j in tl.static_range(2 * TILES):
                        dk = dk + (tl.load(d + block * R + pairs[j]),)
                    xk = _in_order(words[WORDS * k : WORDS * (k + 1)], TABLE, PTX)
                    dots = _dots(QTYPE, at0, at1, place, k, xk, values, SHARE, TILES, PTX)
                    more = ()
                    for j in tl.static_range(TILES):
                        more = more + (
                            sums[4 * j] + dots[4 * j].to(tl.float32) * d0 * dk[2 * j],
                            sums[4 * j + 1] + dots[4 * j + 1].to(tl.float32) * d0 * dk[2 * j + 1],
                            sums[4 * j + 2] + dots[4 * j + 2].to(tl.float32) * d1 * dk[2 * j],
                            sums[4 * j + 3] + dots[4 * j + 3].to(tl.float32) * d1 * dk[2 * j + 1],
                        )  # fmt: skip
                    sums = more
                added = added + sums
        acc = added
    A: tl.constexpr = 4 * TILES * SETS
    result = tl.reduce(tl.reshape(_beside(acc, A), [WARPS, 32, A]), 0, _add)
    lane, k = tl.arange(0, 32)[:, None], tl.arange(0, A)[None, :]
    n = tile * (16 * SETS) + k // (4 * TILES) * 16 + k % 4 // 2 * 8 + lane // 4
    m = k // 4 % TILES * 8 + lane % 4 * 2 + k % 2
    return result, n, m


@triton.jit(do_not_specialize=APART)
def few_rows_mma_kernel(
    y, q, d, s, packed, table, bias, residual, total, w1, w2, y1, y2, N1, N2, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, SHARE: tl.constexpr,
    TABLE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SETS: tl.constexpr, WARPS: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr,
    RESERVATION: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q, d and s as `Rounded` has them, with blocks of BLOCK. ROWS: M where kernels are compiled for it, or 0. EVEN:
    all warps have the same number of whole chunks. AHEAD: x is read a chunk before it is multiplied."""
    tile, y, packed, N = part(tl.program_id(0), y, packed, w1, w2, y1, y2, N, N1, N2, 16 * SETS)
    if ROWS:
        M = ROWS
    result, n, m = tile_of_products(
        q, d, s, packed, table, tile, None, 1, M, M, N, K,
        QTYPE, OFFSET, BLOCK, BYTES, SHARE, TABLE, TILES, SETS, WARPS, EVEN, AHEAD, SLOTS, STRIDE, LINE, RESERVATION,
        PTX, EARLY,
    )  # fmt: skip
    live = (n < N) & (m < M)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0)
    tl.store(y + m * N + n, result.to(y.dtype.element_ty), mask=live)
    if residual is not None:
        tl.store(total + m * N + n, result + tl.load(residual + m * N + n, mask=live, other=0.0), mask=live)


_STRIDE = {  # bytes of a row in a slot, a chunk and what comes before it in its LINE, with few bank conflicts; and LINE
    ggml_types.Q4_K: (160, 32),
    ggml_types.Q5_K: (208, 32),
    ggml_types.Q6_K: (240, 32),
    ggml_types.Q8_0: (288, 16),
    ggml_types.IQ4_NL: (176, 16),
    ggml_types.IQ4_XS: (176, 16),
    ggml_types.MXFP4: (176, 16),
}
STAGED = 40 * 1024  # bytes of shared memory of a program


def serves(qtype: int) -> bool:
    """Not on AMD's cards, whose cores want other fragments and for which the plain form would be slow."""
    return qtype in fragments.SHARE and torch.version.hip is None


def shape(qtype: int, M: int, lengths: list[int], K: int) -> tuple[int, int, int]:
    """SETS, WARPS and SLOTS: what was fastest on an H200 at the shapes of benchmarks/cuda.py. lengths: rows of each W.
    WARPS, which the order of sums depends on, are not M's; of a launch they are its longest matrix'."""
    small, longest = qtype in (ggml_types.Q4_K, ggml_types.Q5_K), max(lengths)
    warps = 4
    if K < 8192 and longest >= (12288 if small else 65536) and qtype != ggml_types.Q8_0:
        warps = 1 if small else 2
    warps = min(warps, triton.next_power_of_2(triton.cdiv(K, SPAN.value)))
    sets = 2 if M > 8 and sum(lengths) >= (28672 if small else 65536) and warps < 4 else 1
    return sets, warps, slots_of(qtype, warps)


def reads_ahead(qtype: int, tiles: int, K: int, warps: int, programs: int) -> bool:
    """Whether AHEAD was faster on an H200: where a launch has few warps, which wait for memory, but not so few that x
    comes fast, each has some chunks, and their registers are not those that other warps would work with."""
    few = 512 <= programs * warps <= 2048 and 4 * SPAN.value * warps <= K
    return few and tiles == 2 and qtype not in (ggml_types.IQ4_NL, ggml_types.MXFP4)


def kind(qtype: int) -> tuple[int, ...]:
    """What `tile_of_products` has to know of a type: QTYPE to TABLE."""
    _, _, block, size, _ = blocks.layout(qtype)
    return qtype, qtype in blocks.OFFSETS, block, size, fragments.SHARE[qtype], qtype in blocks.TABLES


def program(qtype: int, K: int, sets: int, warps: int, slots: int, tiles: int, programs: int) -> tuple:
    """And of its programs, of which there are so many: TILES to RESERVATION."""
    stride, line = _STRIDE[qtype]
    even, ahead = K % (SPAN.value * warps) == 0, reads_ahead(qtype, tiles, K, warps, programs)
    return tiles, sets, warps, even, ahead, slots, stride, line, staging.reservation(warps * slots * 16 * stride)


def slots_of(qtype: int, warps: int) -> int:
    return min(4, STAGED // (warps * 16 * _STRIDE[qtype][0]))


def launch(
    a: Rounded, w: Tensor, qtype: int, y: Tensor, bias: Tensor | None, residual: Tensor | None, total: Tensor | None,
    lengths: list[int], apart: list[int],
) -> None:  # fmt: skip
    """As `few_rows.few_rows_together`; lengths: rows of each matrix; apart: w1 to N2."""
    M, K = a.rows, a.width
    sets, warps, slots = shape(qtype, M, lengths, K)
    programs = sum(triton.cdiv(n, 16 * sets) for n in lengths)
    few_rows_mma_kernel[(programs,)](
        y, a.q, a.d, a.s, w, blocks.table(qtype, w.device), bias, residual, total, *apart, M, lengths[0], K,
        *kind(qtype), M if M in (2, 4, 8, 16) else 0,
        *program(qtype, K, sets, warps, slots, 1 if M <= 8 else 2, programs), PTX,
        num_warps=warps, **early(w),
    )  # fmt: skip
