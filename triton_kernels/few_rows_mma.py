"""x W^T for 2 to 16 rows of x on the tensor cores, with the integer dots of `few_rows.py`.

A program owns 16 rows of W and all rows of x, in one or two TILES of 8. Its WARPS share K: each takes SPAN_OF_WARP
elements at a time, reads its fragments of W straight from the packed rows, decodes them in registers and adds

    float(sum of scale * dots of q_w and q_x) * (d * d_x)  +  float(sum of least * s_x) * (dmin * d_x)

to f32 sums, which the warps add up at the end. Thread 4 g + t of a warp holds rows g and g + 8 of W
(`integer_dots.py`); of each 16 elements that share a scale it holds word t, or words 2 t and 2 t + 1 where 32 of them
do. A row of x has the same result whatever other rows there are.

Up to three matrices with one x may be one launch: their programs follow each other.
M rows of x [M, K], N rows of W, K elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks
from dasllama_torch.triton_kernels.integer_dots import dots8, dots16, dots32
from dasllama_torch.triton_kernels.launch import PTX, early
from dasllama_torch.triton_kernels.quantize_activation import Rounded

SPAN_OF_WARP = tl.constexpr(256)  # elements of K
ROWS = 16


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
def _leasts(QTYPE: tl.constexpr, b, v, PLANES: tl.constexpr, WIDTH: tl.constexpr):
    """`least` of the 16 elements from 16 v on -> f32."""
    HALVES: tl.constexpr = WIDTH // 16
    u, p = v // (PLANES * HALVES) * HALVES + v % HALVES, v // HALVES % PLANES
    return blocks.least(QTYPE, b, u, p).to(tl.float32)


@triton.jit(do_not_specialize=APART)
def few_rows_mma_kernel(
    y, q, d, s, packed, table, bias, residual, total, w1, w2, y1, y2, N1, N2, M, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BYTES: tl.constexpr, SHARE: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q, d and s as `Rounded` has them, with blocks of BLOCK. SHARE: units that share a scale, 1 or 2."""
    tile, y, packed, N = part(tl.program_id(0), y, packed, w1, w2, y1, y2, N, N1, N2, 16)
    T: tl.constexpr = 32 * WARPS
    i = tl.arange(0, T)
    warp, g, t = i // 32, i % 32 // 4, i % 4
    pair = tl.arange(0, 2)[None, :]
    n_blocks = K // BLOCK
    first_row = packed + tl.minimum(tile * 16 + g, N - 1).to(tl.int64) * (n_blocks * BYTES)
    second_row = packed + tl.minimum(tile * 16 + g + 8, N - 1).to(tl.int64) * (n_blocks * BYTES)
    x_words = q.to(tl.pointer_type(tl.uint32))
    if EARLY:
        tl.extra.cuda.gdc_wait()
    BATCH: tl.constexpr = SPAN_OF_WARP // BLOCK
    acc = ()
    for _ in tl.static_range(4 * TILES):
        acc = acc + (tl.zeros([T], tl.float32),)
    for first in range(0, n_blocks, WARPS * BATCH):
        for k in tl.static_range(BATCH):
            block = first + warp * BATCH + k
            live = block < n_blocks
            block = tl.minimum(block, n_blocks - 1)
            b0, b1 = first_row + block * BYTES, second_row + block * BYTES
            sums = ()
            for _ in tl.static_range(4 * TILES):
                sums = sums + (tl.zeros([T], tl.int32),)
            for unit in tl.static_range(0, BLOCK // (16 * PLANES), SHARE):
                u = tl.full([T], unit, tl.int32)
                for p in tl.static_range(PLANES):
                    start = block * BLOCK + (unit // (WIDTH // 16) * (WIDTH * PLANES) + unit % (WIDTH // 16) * 16)
                    at = start + p * WIDTH
                    if SHARE == 2:
                        units, w = (u + t // 2)[:, None], (2 * (t % 2))[:, None] + pair
                        a0, a2 = tl.split(blocks.word(QTYPE, b0[:, None], units, p, w, table, PTX))
                        a1, a3 = tl.split(blocks.word(QTYPE, b1[:, None], units, p, w, table, PTX))
                    else:
                        a0, a1 = (blocks.word(QTYPE, b0, u, p, t, table, PTX),
                                  blocks.word(QTYPE, b1, u, p, t, table, PTX))  # fmt: skip
                    scale0, scale1 = blocks.scale(QTYPE, b0, u, p), blocks.scale(QTYPE, b1, u, p)
                    added = ()
                    for j in tl.static_range(TILES):
                        x_row = x_words + ((at // 32) * M + tl.minimum(g + 8 * j, M - 1)) * 8 + at % 32 // 4
                        if SHARE == 2:
                            x0, x1 = tl.split(tl.load((x_row + 2 * t)[:, None] + pair))
                            c0, c1, c2, c3 = dots32(a0, a1, a2, a3, x0, x1, PTX)
                        else:
                            c0, c1, c2, c3 = dots16(a0, a1, tl.load(x_row + t), PTX)
                        added = added + (
                            sums[4 * j] + c0 * scale0, sums[4 * j + 1] + c1 * scale0,
                            sums[4 * j + 2] + c2 * scale1, sums[4 * j + 3] + c3 * scale1,
                        )  # fmt: skip
                    sums = added
            d0, d1 = tl.where(live, blocks.d(QTYPE, b0, 0), 0.0), tl.where(live, blocks.d(QTYPE, b1, 0), 0.0)
            if OFFSET:  # elements t and t + 4 of two products along the block's 16 sums
                low0, low1 = tl.where(live, blocks.dmin(QTYPE, b0), 0.0), tl.where(live, blocks.dmin(QTYPE, b1), 0.0)
                leasts = ()
                for half in tl.static_range(2):
                    for v in tl.static_range(half, half + 16, 8):
                        leasts = leasts + (_leasts(QTYPE, b0, 2 * t + v, PLANES, WIDTH),
                                           _leasts(QTYPE, b1, 2 * t + v, PLANES, WIDTH))  # fmt: skip
            added = ()
            for j in tl.static_range(TILES):
                f0, f1 = sums[4 * j].to(tl.float32) * d0, sums[4 * j + 1].to(tl.float32) * d0
                f2, f3 = sums[4 * j + 2].to(tl.float32) * d1, sums[4 * j + 3].to(tl.float32) * d1
                if OFFSET:
                    s_row = s + (block * M + tl.minimum(g + 8 * j, M - 1)) * 16 + 2 * t
                    even0, odd0 = tl.split(tl.load(s_row[:, None] + pair))
                    even1, odd1 = tl.split(tl.load(s_row[:, None] + 8 + pair))
                    c0, c1, c2, c3 = dots8(leasts[0], leasts[1], leasts[2], leasts[3], even0, even1, PTX)
                    e0, e1, e2, e3 = dots8(leasts[4], leasts[5], leasts[6], leasts[7], odd0, odd1, PTX)
                    f0, f1 = f0 + (c0 + e0) * low0, f1 + (c1 + e1) * low0
                    f2, f3 = f2 + (c2 + e2) * low1, f3 + (c3 + e3) * low1
                dx = d + block * M
                dx0 = tl.load(dx + tl.minimum(8 * j + 2 * t, M - 1))
                dx1 = tl.load(dx + tl.minimum(8 * j + 2 * t + 1, M - 1))
                added = added + (
                    acc[4 * j] + f0 * dx0, acc[4 * j + 1] + f1 * dx1,
                    acc[4 * j + 2] + f2 * dx0, acc[4 * j + 3] + f3 * dx1,
                )  # fmt: skip
            acc = added
    lane = tl.arange(0, 32)
    for k in tl.static_range(4 * TILES):
        n = tile * 16 + lane // 4 + k % 4 // 2 * 8
        m = k // 4 * 8 + lane % 4 * 2 + k % 2
        result = tl.reduce(tl.reshape(acc[k], [WARPS, 32]), 0, _add)
        live = (n < N) & (m < M)
        if bias is not None:
            result += tl.load(bias + n, mask=n < N, other=0.0)
        tl.store(y + m * N + n, result.to(y.dtype.element_ty), mask=live)
        if residual is not None:
            tl.store(total + m * N + n, result + tl.load(residual + m * N + n, mask=live, other=0.0), mask=live)


# Units that share a scale, of the types that this was measured to be faster for. Their blocks are the activation's,
# with one d, and have a `least` for each 16 elements if any.
_SHARE = {ggml_types.Q4_K: 2, ggml_types.Q5_K: 2, ggml_types.Q6_K: 1, ggml_types.Q8_0: 2}


def serves(qtype: int) -> bool:
    """Not on AMD's cards, whose cores want other fragments and for which the plain form would be slow."""
    return qtype in _SHARE and torch.version.hip is None


def _warps(N: int, K: int) -> int:
    """Warps that share K: what was fastest on an H200 at the shapes of benchmarks/cuda.py."""
    return min(8 if K >= 8192 or N < 8192 else 4, triton.next_power_of_2(triton.cdiv(K, SPAN_OF_WARP.value)))


def launch(
    a: Rounded, w: Tensor, qtype: int, y: Tensor, bias: Tensor | None, residual: Tensor | None, total: Tensor | None,
    lengths: list[int], apart: list[int],
) -> None:  # fmt: skip
    """As `few_rows.few_rows_together`; lengths: rows of each matrix; apart: w1 to N2."""
    M, K = a.rows, a.width
    kind = blocks.layout(qtype)
    warps = _warps(sum(lengths), K)
    few_rows_mma_kernel[(sum(triton.cdiv(n, ROWS) for n in lengths),)](
        y, a.q, a.d, a.s, w, blocks.table(qtype, w.device), bias, residual, total, *apart, M, lengths[0], K,
        qtype, qtype in blocks.OFFSETS, *kind[:4], _SHARE[qtype], 1 if M <= 8 else 2, warps, PTX,
        num_warps=warps, **early(w),
    )  # fmt: skip
