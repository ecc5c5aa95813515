"""x W^T for up to 16 rows of x, at the speed of reading W once.

A program owns BN rows of W and steps along them by L words (`blocks.py`), of which each thread holds WORDS; its warps
lie side by side along a row, so that no tensor changes hands within the loop. A word of W meets all ROWS rows of x
while it is in a register. With integer dots (dp4a on NVIDIA), on the lattice of the type, each thread adds, for its
words of a unit in all planes,

    float(sum of scale * q_w * q_x) * (d * d_x)  +  (sum of least * s_x) * (dmin * d_x)    on Q8_1 without this d_x

to f32 sums that stay apart by thread until the row's end. In f32, words are decoded to floats and multiplied by x.
ROWS rows of x [M, K], N rows of W, K elements; row M and up repeat the last and are not stored.

Several matrices with one x may be one launch, PARTS of them: their programs follow each other. A residual is added to
what a single one gives, into `total`. With ids, W is one of E matrices: program (., i) multiplies row i // share of x
by the matrix ids[i], for row i of y. A GPU cannot raise without waiting for it: an id that is none of E gives a row of
NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks
from dasllama_torch.triton_kernels.launch import PTX, aligned, early, on_device, rows_for
from dasllama_torch.triton_kernels.quantize_activation import Rounded, rounded


@triton.jit
def _dot4(a, b, PTX: tl.constexpr):
    """Sum of the products of four int8 each, in uint32 words that broadcast -> int32."""
    a, b = tl.broadcast(a, b)
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        total = (a.to(tl.int8).to(tl.int32)) * (b.to(tl.int8).to(tl.int32))
        for i in tl.static_range(1, 4):
            total += (a >> 8 * i).to(tl.int8).to(tl.int32) * (b >> 8 * i).to(tl.int8).to(tl.int32)
        return total


@triton.jit
def _named(ids, E):
    """The matrix of this program's row, and whether there is one of that id."""
    id_ = tl.load(ids + tl.program_id(1)).to(tl.int64)
    known = (id_ >= 0) & (id_ < E)
    return tl.where(known, id_, 0), known


@triton.jit
def _store(y, sums, bias, residual, total, m: tl.constexpr, M, N, n, known):
    """sums f32 [BN, lanes] of row m, added up, plus bias -> y [M, N]; plus residual -> total."""
    result = tl.sum(sums, 1)
    if known is not None:
        result = tl.where(known, result, float("nan"))
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0)
    live = n < tl.where(m < M, N, 0)
    tl.store(y + m * N + n, result.to(y.dtype.element_ty), mask=live)
    if residual is not None:
        tl.store(total + m * N + n, result + tl.load(residual + m * N + n, mask=live, other=0.0), mask=live)


@triton.jit
def few_rows_native_kernel(
    y, q, d, s, packed, table, bias, residual, total, ids, share, E, w1, w2, y1, y2, N1, N2, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    L: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """w1, w2 and y1, y2: from the first matrix to the others in units of 16 bytes, from the first result to the others
    in elements; N1 and N2: their rows."""
    known = None
    tile = tl.program_id(0)
    if PARTS > 1:
        first = tl.cdiv(N, BN)
        second = first + tl.cdiv(N1, BN)
        one, two = tile >= first, tile >= second
        packed += tl.where(two, w2, tl.where(one, w1, 0)).to(tl.int64) * 16
        y += tl.where(two, y2, tl.where(one, y1, 0))
        tile -= tl.where(two, second, tl.where(one, first, 0))
        N = tl.where(two, N2, tl.where(one, N1, N))
    if ids is not None:
        id_, known = _named(ids, E)
        i = tl.program_id(1).to(tl.int64)
        packed += id_ * N * (K // BLOCK * BYTES)
        y += i * N
        q += i // share * K
        d += i // share * (K // SPAN)
        s += i // share * (K // 16)
        if bias is not None:
            bias += id_ * N
    n = tile * BN + tl.arange(0, BN)
    row = packed + (tl.minimum(n, N - 1).to(tl.int64) * (K // BLOCK * BYTES))[:, None]
    if EARLY:  # and lets nobody begin before it ends: who waits takes the place of programs that read
        tl.extra.cuda.gdc_wait()
    n_units = K // (16 * PLANES)
    i = tl.arange(0, L)[None, :]
    w = i % 4
    lane = tl.arange(0, L // WORDS)[None, :] // (4 // WORDS)  # the unit whose scales a thread needs
    x_words = q.to(tl.pointer_type(tl.uint32))
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros([BN, L // WORDS], tl.float32),)
    UNROLL: tl.constexpr = 4 if ROWS == 1 else 1  # loads of the steps to come, while one is added up
    for first in tl.range(0, n_units, L // 4, loop_unroll_factor=UNROLL):
        at, u, start = blocks.place(tl.minimum(first + i // 4, n_units - 1), PLANES, WIDTH, BLOCK, BYTES)
        live = first + lane < n_units
        lane_at, lane_u, lane_start = blocks.place(tl.minimum(first + lane, n_units - 1), PLANES, WIDTH, BLOCK, BYTES)
        b = row + lane_at
        words, scales, leasts = (), (), ()
        for p in tl.static_range(PLANES):
            words = words + (blocks.word(QTYPE, row + at, u, p, w, table, PTX),)  # [BN, L]
            scales = scales + (blocks.scale(QTYPE, b, lane_u, p),)  # [BN, L / WORDS]
            leasts = leasts + (blocks.least(QTYPE, b, lane_u, p),)
        dw = tl.where(live, blocks.d(QTYPE, b, lane_u), 0.0)
        if OFFSET:
            counted = live if WORDS == 4 else live & (w == 0)  # once for a unit
            low_d = tl.where(counted, blocks.dmin(QTYPE, b), 0.0)
        sums = ()
        for r in tl.static_range(ROWS):
            m = tl.minimum(r, M - 1).to(tl.int64)
            dots, lows = tl.zeros([BN, L // WORDS], tl.int32), tl.zeros([BN, L // WORDS], tl.float32)
            for p in tl.static_range(PLANES):
                dot = _dot4(words[p], tl.load(x_words + m * (K // 4) + ((start + p * WIDTH) // 4 + w)), PTX)
                if WORDS == 4:
                    dot = tl.sum(tl.reshape(dot, [BN, L // 4, 4]), 2)
                dots += dot * scales[p]
                if OFFSET:
                    lows += leasts[p] * tl.load(s + m * (K // 16) + (lane_start + p * WIDTH) // 16)
            dx = tl.load(d + m * (K // SPAN) + lane_start // SPAN)
            added = acc[r] + dots.to(tl.float32) * (dw * dx)
            if OFFSET:
                added += lows * (low_d * dx if SPAN == 256 else low_d)
            sums = sums + (added,)
        acc = sums
    for r in tl.static_range(ROWS):
        _store(y, acc[r], bias, residual, total, r, M, N, n, known)


@triton.jit
def few_rows_float_kernel(
    y, x, x_stride, packed, table, bias, ids, share, E, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    known = None
    if ids is not None:
        id_, known = _named(ids, E)
        i = tl.program_id(1).to(tl.int64)
        packed += id_ * N * (K // BLOCK * BYTES)
        y += i * N
        x += i // share * x_stride
        if bias is not None:
            bias += id_ * N
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
        _store(y, acc[r], bias, None, None, r, M, N, n, known)


def _tile(kind: blocks.Layout, rows: int, K: int) -> tuple[int, int]:
    """BN and warps: what was fastest on an H200 at the shapes of benchmarks/cuda.py."""
    if rows == 1:
        return (4 if K // kind.block * kind.bytes <= 1024 else 1), 1  # a short row is no work for a program
    return (4 if rows >= 8 and kind.words == 1 else 2), 1


def few_rows_native(
    x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor | None = None, share: int = 1
) -> Tensor:
    """x [M <= 16, K] on the type's lattice, qweight u8 [N, row_bytes] of a packed type -> [M, N] in x.dtype.

    ids: int [n], of matrices qweight u8 [E, N, row_bytes] with bias [E, N], `share` of them for each row of x, however
    many -> [n, N].
    """
    K, N = x.shape[1], qweight.shape[-2]
    kind, a = blocks.layout(qtype), rounded(x, ggml_types.GGML_TYPES[qtype].lattice)
    M, grid, y = _result(x, N, ids)
    if y.numel():
        rows = rows_for(M)
        bn, warps = _tile(kind, rows, K)
        with on_device(x):
            few_rows_native_kernel[(triton.cdiv(N, bn), grid)](
                y, a.q, a.d, a.s, aligned(qweight, qtype), blocks.table(qtype, x.device), bias, None, None,
                ids, share, qweight.shape[0], 0, 0, 0, 0, 0, 0, M, N, K,
                qtype, qtype in blocks.OFFSETS, *kind, a.span, rows, bn, 32 * warps * kind.words, 1, PTX,
                num_warps=warps, **early(x),
            )  # fmt: skip
    return y


PARTS = 3  # matrices of a launch, at most


def few_rows_together(
    a: Rounded,
    qweights: list[Tensor],
    qtype: int,
    ys: list[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """x [M <= 16, K], as it is rounded, times up to PARTS matrices u8 [N, row_bytes] of one packed type, contiguous and
    aligned to 16 bytes, into ys f32 [M, N]. bias, and residual and total f32 [M, N], are a single matrix' only."""
    (M, K), kind, y, w = a.q.shape, blocks.layout(qtype), ys[0], qweights[0]
    rows = rows_for(M)
    bn, warps = _tile(kind, rows, K)
    places = [[(other.data_ptr() - w.data_ptr()) // 16 for other in qweights[1:]]]
    places += [[(other.data_ptr() - y.data_ptr()) // 4 for other in ys[1:]], [len(other) for other in qweights[1:]]]
    apart = [part for each in places for part in (*each, 0, 0)[: PARTS - 1]]
    with on_device(w):
        few_rows_native_kernel[(sum(triton.cdiv(len(other), bn) for other in qweights), 1)](
            y, a.q, a.d, a.s, w, blocks.table(qtype, w.device), bias, residual, total, None, 1, 1, *apart, M, len(w), K,
            qtype, qtype in blocks.OFFSETS, *kind, a.span, rows, bn, 32 * warps * kind.words, len(qweights), PTX,
            num_warps=warps, **early(w),
        )  # fmt: skip


def few_rows_float(
    x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor | None = None, share: int = 1
) -> Tensor:
    """The same in f32, with x as it is."""
    K, N = x.shape[1], qweight.shape[-2]
    M, grid, y = _result(x, N, ids)
    if y.numel():
        with on_device(x):
            few_rows_float_kernel[(triton.cdiv(N, 4), grid)](
                y, x, x.stride(0), aligned(qweight, qtype), blocks.table(qtype, x.device), bias,
                ids, share, qweight.shape[0], M, N, K,
                qtype, qtype in blocks.OFFSETS, *blocks.layout(qtype), rows_for(M), 4, 128, PTX, num_warps=4,
            )  # fmt: skip
    return y


def _result(x: Tensor, N: int, ids: Tensor | None) -> tuple[int, int, Tensor]:
    """Rows of a program, programs beside each other, and the result."""
    M, grid = (x.shape[0], 1) if ids is None else (1, len(ids))
    return M, grid, torch.empty((M * grid, N), dtype=x.dtype, device=x.device)
