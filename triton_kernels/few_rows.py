"""x W^T for up to 16 rows of x, at the speed of reading W once.

A program owns BN rows of W, through which its WARPS step together, a unit (`blocks.py`) or WORDS words of one to each
thread. Each thread adds, with integer dots (dp4a on NVIDIA) on the lattice of the type, for its words in all planes,

    float(sum of scale * q_w * q_x) * (d * d_x)  +  (sum of least * s_x) * (dmin * d_x)    on Q8_1 without this d_x

to f32 sums that stay apart by thread until the rows' end. Elements of types with a table of 16 are looked up where they
are above 0 and where they are below, and both multiplied (`blocks.apart`). What is read of x serves all BN rows of W; a
word of W meets all ROWS rows of x while it is in a register. From 2 rows on the tensor cores multiply W of some types
(`few_rows_mma.py`). In f32, words are decoded to floats and multiplied by x.
ROWS rows of x [M, K], N rows of W, K elements; row M and up repeat the last and are not stored.

Up to three matrices with one x may be one launch: their programs follow each other, and the last one may be of another
type. A residual is added to what a single one gives, into `total`. With ids, W is one of E matrices: program (., i)
multiplies row i // share of x by the matrix ids[i], for row i of y. A GPU cannot raise without waiting for it: an id
that is none of E gives a row of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks, few_rows_mma
from dasllama_torch.triton_kernels.few_rows_mma import APART, part
from dasllama_torch.triton_kernels.integer_dots import dot4
from dasllama_torch.triton_kernels.launch import PTX, aligned, early, on_device, prefetch, rows_for
from dasllama_torch.triton_kernels.quantize_activation import Rounded, rounded


@triton.jit
def _named(ids, E, share, y, packed, N, row_bytes):
    """Of this program's row of y: it, its row of x, the matrix, rows of matrices before that one, and whether there is
    a matrix of that id."""
    entry = tl.program_id(1).to(tl.int64)
    id_ = tl.load(ids + entry).to(tl.int64)
    known = (id_ >= 0) & (id_ < E)
    id_ = tl.where(known, id_, 0)
    return y + entry * N, entry // share, packed + id_ * N * row_bytes, id_ * N, known


@triton.jit
def _store(y, result, bias, residual, total, m: tl.constexpr, M, N, n, known):
    """result f32 [BN] of row m plus bias -> y [M, N]; plus residual -> total."""
    if known is not None:
        result = tl.where(known, result, float("nan"))
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0)
    live = n < tl.where(m < M, N, 0)
    tl.store(y + m * N + n, result.to(y.dtype.element_ty), mask=live)
    if residual is not None:
        tl.store(total + m * N + n, result + tl.load(residual + m * N + n, mask=live, other=0.0), mask=live)


@triton.jit
def _beside(acc, first: tl.constexpr, BN: tl.constexpr):
    """acc[first], acc[first + 1], ..., each [T] -> [T, BN]."""
    if BN == 1:
        return acc[first][:, None]
    elif BN == 2:
        return tl.join(acc[first], acc[first + 1])
    else:
        even, odd = tl.join(acc[first], acc[first + 2]), tl.join(acc[first + 1], acc[first + 3])
        return tl.reshape(tl.join(even, odd), [even.shape[0], 4])


@triton.jit
def _multiply(
    y, q, d, s, packed, table, bias, residual, total, tile, x_row, known, R, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program's rows of y."""
    T: tl.constexpr = 32 * WARPS
    PER: tl.constexpr = 4 // WORDS  # threads of a unit
    HALVES: tl.constexpr = TABLE and PTX  # the plain form looks elements up as other types do
    thread = tl.arange(0, T)
    lane, w = thread // PER, (thread % PER * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    n_units, last = K // (16 * PLANES), K // BLOCK - 1
    rows = ()
    for one in tl.static_range(BN):
        rows = rows + (packed + tl.minimum(tile * BN + one, N - 1).to(tl.int64) * (K // BLOCK * BYTES),)
    if EARLY:  # W is there: the first of it comes nearer while x is being made
        if AHEAD > 0:
            for one in tl.static_range(BN):
                prefetch(rows[one], tl.minimum(AHEAD, K // BLOCK * BYTES), thread == 0)
        tl.extra.cuda.gdc_wait()  # and lets nobody begin before it ends: who waits takes the place of who reads
    if HALVES:
        halves = blocks.magnitudes(QTYPE, table, thread)
    x_words = q.to(tl.pointer_type(tl.uint32))
    acc = ()
    for _ in tl.static_range(BN * ROWS):
        acc = acc + (tl.zeros([T], tl.float32),)
    for first in tl.range(0, n_units, T // PER, loop_unroll_factor=UNROLL):
        at, u, start = blocks.place(first + lane, PLANES, WIDTH, BLOCK, BYTES, last)
        live = first + lane < n_units
        words, scales, leasts, ds, lows = (), (), (), (), ()
        for n in tl.static_range(BN):
            b = rows[n] + at
            if HALVES:
                above0, above1, below0, below1, dw = blocks.apart(QTYPE, b, u, w, halves)
                words = words + (above0, above1, below0, below1)
                scales = scales + (blocks.scale(QTYPE, b, u, 0),)
            else:
                for p in tl.static_range(PLANES):
                    words = words + (blocks.word(QTYPE, b[:, None], u[:, None], p, w, table, PTX, True),)
                    scales = scales + (blocks.scale(QTYPE, b, u, p),)
                    leasts = leasts + (blocks.least(QTYPE, b, u, p),)
                dw = blocks.d(QTYPE, b, u)
            ds = ds + (tl.where(live, dw, 0.0),)
            if OFFSET:
                counted = live & (thread % PER == 0)  # once for a unit
                lows = lows + (tl.where(counted, blocks.dmin(QTYPE, b), 0.0),)
        added = ()
        for r in tl.static_range(ROWS):
            m = x_row + tl.minimum(r, M - 1)
            xs, sums = (), ()
            for p in tl.static_range(PLANES):
                e = start + p * WIDTH
                xs = xs + (tl.load(x_words + (((e // 32 * R + m) * 8 + e % 32 // 4)[:, None] + w)),)
                if OFFSET:
                    sums = sums + (tl.load(s + ((e // SPAN * R + m) * (SPAN // 16) + e % SPAN // 16)),)
            dx = tl.load(d + (start // SPAN * R + m))
            if HALVES:
                xs = blocks.by_turns(xs[0], xs[1], PTX)
            for n in tl.static_range(BN):
                dots, low = tl.zeros([T], tl.int32), tl.zeros([T], tl.float32)
                if HALVES:
                    above, below = tl.zeros([T, WORDS], tl.int32), tl.zeros([T, WORDS], tl.int32)
                    for p in tl.static_range(2):
                        above = dot4(words[4 * n + p], xs[p], above, PTX)
                        below = dot4(words[4 * n + 2 + p], xs[p], below, PTX)
                    dots = tl.sum(above - below, 1) * scales[n]
                else:
                    for p in tl.static_range(PLANES):
                        dot = dot4(words[n * PLANES + p], xs[p], tl.zeros([T, WORDS], tl.int32), PTX)
                        dots += tl.sum(dot, 1) * scales[n * PLANES + p]
                        if OFFSET:
                            low += leasts[n * PLANES + p] * sums[p]
                result = acc[r * BN + n] + dots.to(tl.float32) * (ds[n] * dx)
                if OFFSET:
                    result += low * (lows[n] * dx if SPAN == 256 else lows[n])
                added = added + (result,)
        acc = added
    n_out = tile * BN + tl.arange(0, BN)
    for r in tl.static_range(ROWS):
        _store(y, tl.sum(_beside(acc, r * BN, BN), 0), bias, residual, total, r, M, N, n_out, known)


@triton.jit(do_not_specialize=[*APART, "other"])
def few_rows_native_kernel(
    y, q, d, s, packed, table, bias, residual, total, ids, share, E, w1, w2, y1, y2, N1, N2, other, R, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, QTYPE2: tl.constexpr, OFFSET2: tl.constexpr, PLANES2: tl.constexpr,
    WIDTH2: tl.constexpr, BLOCK2: tl.constexpr, BYTES2: tl.constexpr, WORDS2: tl.constexpr, MIXED: tl.constexpr,
    TABLE: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
    UNROLL: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q, d and s as `Rounded` has them, of R rows. MIXED: programs from `other` on have a matrix of QTYPE2. TABLE: the
    type is of `blocks.TABLES`, which are never mixed.

    AHEAD: bytes of a row, in sixteens, that a program asks for before x is there."""
    tile, y, packed, N = part(tl.program_id(0), y, packed, w1, w2, y1, y2, N, N1, N2, BN)
    known, x_row = None, 0
    if ids is not None:
        if EARLY:  # ids may be new, too
            tl.extra.cuda.gdc_wait()
        y, x_row, packed, before, known = _named(ids, E, share, y, packed, N, K // BLOCK * BYTES)
        if bias is not None:
            bias += before
    if MIXED:
        is_other = tl.program_id(0) >= other
    else:
        is_other: tl.constexpr = False
    if is_other:
        _multiply(
            y, q, d, s, packed, table, bias, residual, total, tile, x_row, known, R, M, N, K,
            QTYPE2, OFFSET2, PLANES2, WIDTH2, BLOCK2, BYTES2, WORDS2, TABLE, SPAN,
            ROWS, BN, WARPS, UNROLL, AHEAD, PTX, EARLY,
        )  # fmt: skip
    else:
        _multiply(
            y, q, d, s, packed, table, bias, residual, total, tile, x_row, known, R, M, N, K,
            QTYPE, OFFSET, PLANES, WIDTH, BLOCK, BYTES, WORDS, TABLE, SPAN,
            ROWS, BN, WARPS, UNROLL, AHEAD, PTX, EARLY,
        )  # fmt: skip


@triton.jit
def few_rows_float_kernel(
    y, x, x_stride, packed, table, bias, ids, share, E, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    known = None
    if ids is not None:
        y, row_of_x, packed, before, known = _named(ids, E, share, y, packed, N, K // BLOCK * BYTES)
        x += row_of_x * x_stride
        if bias is not None:
            bias += before
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = packed + (tl.minimum(n, N - 1).to(tl.int64) * (K // BLOCK * BYTES))[:, None]
    n_units = K // (16 * PLANES)
    i = tl.arange(0, L)[None, :]
    w = i % 4
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros([BN, L], tl.float32),)
    for first in range(0, n_units, L // 4):
        live = first + i // 4 < n_units
        at, u, start = blocks.place(tl.minimum(first + i // 4, n_units - 1), PLANES, WIDTH, BLOCK, BYTES)
        for p in tl.static_range(PLANES):
            v = blocks.word(QTYPE, row + at, u, p, w, table, PTX)
            f = tl.where(live, blocks.factor(QTYPE, row + at, u, p), 0.0)
            o = tl.where(live, blocks.offset(QTYPE, row + at, u, p), 0.0) if OFFSET else 0.0
            e = start + p * WIDTH + 4 * w
            sums = ()
            for r in tl.static_range(ROWS):
                x_row = x + tl.minimum(r, M - 1).to(tl.int64) * x_stride
                total = acc[r]
                for c in tl.static_range(4):
                    xc = tl.load(x_row + e + c, mask=live, other=0.0).to(tl.float32)
                    total += (f * blocks.element(v, c) + o) * xc
                sums = sums + (total,)
            acc = sums
    for r in tl.static_range(ROWS):
        _store(y, tl.sum(acc[r], 1), bias, None, None, r, M, N, n, known)


_WORDS = {  # of a unit that a thread holds; one where a type is not named
    ggml_types.Q4_K: 4,
    ggml_types.Q5_K: 4,
    ggml_types.Q6_K: 2,
    ggml_types.Q8_0: 4,
    **dict.fromkeys(blocks.TABLES, 4),
}


def _tile(qtype: int, rows: int, total: int, K: int, row_bytes: int) -> tuple[int, int, int]:
    """BN, WARPS and UNROLL: what was fastest on an H200 at the shapes of benchmarks/cuda.py. total: rows of W in all.

    WARPS, which the order of sums depends on, is K's alone."""
    warps = 2 if K >= 8192 else 1
    if rows > 1:
        return 2, warps, 1
    if warps == 2 and total >= 4096 and qtype in blocks.TABLES:
        return 4, warps, 1
    unroll = 1 if qtype == ggml_types.Q4_K or (qtype == ggml_types.Q6_K and warps == 1) else 2
    return (4 if total >= 8192 and row_bytes <= 4096 else 2 if total >= 2048 else 1), warps, unroll


_AHEAD = 512  # bytes of a row that a program asks for, at most, from a multiple of 16; with more all was slower


def _kind(qtype: int) -> tuple[int, ...]:
    """What a kernel has to know of a type: QTYPE to WORDS."""
    return qtype, qtype in blocks.OFFSETS, *blocks.layout(qtype)[:4], _WORDS.get(qtype, 1)


def _launch(
    a: Rounded, w: Tensor, qtype: int, y: Tensor, lengths: list[int], apart: list[int], bias: Tensor | None,
    residual: Tensor | None = None, total: Tensor | None = None, ids: Tensor | None = None, share: int = 1, E: int = 1,
    last: int | None = None,
) -> None:  # fmt: skip
    """lengths: rows of the matrices of a launch; apart: w1 to N2 of `few_rows_mma.part`; last: the last one's type."""
    M, entries = (a.rows, 1) if ids is None else (1, len(ids))
    with on_device(w):
        if M > 1 and few_rows_mma.serves(qtype):
            few_rows_mma.launch(a, w, qtype, y, bias, residual, total, lengths, apart)
            return
        rows, row_bytes = rows_for(M), w.shape[-1]
        last_bytes = row_bytes if last is None else ggml_types.GGML_TYPES[last].row_bytes(a.width)
        bn, warps, unroll = _tile(qtype, rows, sum(lengths) * entries, a.width, row_bytes)
        programs = [triton.cdiv(n, bn) for n in lengths]
        few_rows_native_kernel[(sum(programs), entries)](
            y, a.q, a.d, a.s, w, blocks.table(qtype, w.device), bias, residual, total, ids, share, E,
            *apart, sum(programs[:-1]), a.rows, M, lengths[0], a.width,
            *_kind(qtype), *_kind(qtype if last is None else last), last is not None, qtype in blocks.TABLES,
            a.span, rows, bn, warps, unroll, 0 if (w.data_ptr() | row_bytes | last_bytes) % 16 else _AHEAD, PTX,
            num_warps=warps, **early(w),
        )  # fmt: skip


def few_rows_native(
    x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor | None = None, share: int = 1
) -> Tensor:
    """x [M <= 16, K] on the type's lattice, qweight u8 [N, row_bytes] of a packed type -> [M, N] in x.dtype.

    ids: int [n], of matrices qweight u8 [E, N, row_bytes] with bias [E, N], `share` of them for each row of x, however
    many -> [n, N].
    """
    N = qweight.shape[-2]
    y = _result(x, N, ids)
    if y.numel():
        # In this order: products may read W while the launch before them ends, which must not be a copy to there.
        w, E = aligned(qweight, qtype), 1 if ids is None else qweight.shape[0]
        a = rounded(x, ggml_types.GGML_TYPES[qtype].lattice)
        _launch(a, w, qtype, y, [N], [0] * 6, bias, ids=ids, share=share, E=E)
    return y


PARTS = 3  # matrices of a launch, at most


def can_mix(M: int, qtype: int, last: int) -> bool:
    """Whether a launch may have matrices of one type and a last one of another, of the same lattice."""
    return M == 1 and {qtype, last} <= {ggml_types.Q4_K, ggml_types.Q5_K, ggml_types.Q6_K}  # those without a table


def few_rows_together(
    a: Rounded,
    qweights: list[Tensor],
    qtype: int,
    ys: list[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    last: int | None = None,
) -> None:
    """x [M <= 16, K], as it is rounded, times up to PARTS matrices u8 [N, row_bytes] of one packed type, contiguous and
    aligned to 16 bytes, into ys f32 [M, N]. bias, and residual and total f32 [M, N], are a single matrix' only.

    last: the type of the last matrix, where it is another that `can_mix`."""
    y, w, lengths = ys[0], qweights[0], [len(each) for each in qweights]
    places = [[(other.data_ptr() - w.data_ptr()) // 16 for other in qweights[1:]]]
    places += [[(other.data_ptr() - y.data_ptr()) // 4 for other in ys[1:]], lengths[1:]]
    apart = [part for each in places for part in (*each, 0, 0)[: PARTS - 1]]
    _launch(a, w, qtype, y, lengths, apart, bias, residual, total, last=last)


def few_rows_float(
    x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor | None = None, share: int = 1
) -> Tensor:
    """The same in f32, with x as it is."""
    (M, K), N = x.shape if ids is None else (1, x.shape[1]), qweight.shape[-2]
    y = _result(x, N, ids)
    if y.numel():
        with on_device(x):
            few_rows_float_kernel[(triton.cdiv(N, 4), 1 if ids is None else len(ids))](
                y, x, x.stride(0), aligned(qweight, qtype), blocks.table(qtype, x.device), bias,
                ids, share, qweight.shape[0], M, N, K,
                qtype, qtype in blocks.OFFSETS, *blocks.layout(qtype), rows_for(M), 4, 128, PTX, num_warps=4,
            )  # fmt: skip
    return y


def _result(x: Tensor, N: int, ids: Tensor | None) -> Tensor:
    return torch.empty((len(x if ids is None else ids), N), dtype=x.dtype, device=x.device)
