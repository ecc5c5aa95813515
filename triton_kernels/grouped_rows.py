"""Rows times the matrices that ids name, many rows on the tensor cores.

Entries (a row of y each) are put in the order of their experts: `count_kernel` counts each expert's, `plan_kernel`
writes `order` and cuts each expert's run into tiles of at most BM entries. A program of the products owns such a tile
and BN rows of its expert's matrix, and steps along K. Packed matrices, of those experts alone that have entries, are
decoded into scratch first, to x's dtype with one rounding, as many at a time as SCRATCH holds: that was faster than
tiles that decode for themselves. Sums are f32. None of it waits for the GPU: there are as many programs as tiles could
be.

n entries of E experts, `share` of them for each row of x [., K]; N rows of each matrix. An id that is none of E gives a
row of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels.dequantize import floats, unpack
from dasllama_torch.triton_kernels.launch import on_device

CHUNK = 1024
SCRATCH = 2**28  # bytes, or one matrix


@triton.jit
def expert_of(ids, i, n, E):
    """The expert whose tiles hold entry i: that of its id, or the nearest there is; E beyond the last entry."""
    id_ = tl.load(ids + i, mask=i < n, other=0)
    return tl.where(i < n, tl.minimum(tl.maximum(id_, 0), E - 1), E).to(tl.int32)


@triton.jit
def count_kernel(counts, ids, n, E, CHUNK: tl.constexpr):
    """counts int32 [E]: entries of the expert that a program owns."""
    e = tl.program_id(0)
    found = tl.zeros([CHUNK], tl.int32)
    for first in range(0, n, CHUNK):
        found += (expert_of(ids, first + tl.arange(0, CHUNK), n, E) == e).to(tl.int32)
    tl.store(counts + e, tl.sum(found, 0))


@triton.jit
def place(order, tiles, ids, e, start, stop, tile, n, E, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Write expert e's part of a plan: its entries from `start` to `stop` of `order`, their tiles from `tile` on."""
    for first in range(start, stop, BM):
        at = tiles + (tile + (first - start) // BM) * 3
        tl.store(at, e)
        tl.store(at + 1, first)
        tl.store(at + 2, stop)
    for first in range(0, n, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        mine = expert_of(ids, entry, n, E) == e
        at = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + at, entry, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def plan_kernel(order, tiles, counts, ids, begin, n, E, BM: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """order int32 [n]; tiles int32 [., 3] of the experts from `begin` on: expert, first entry in `order` and the end of
    the expert's. A program does an expert's part."""
    e = begin + tl.program_id(0)
    i = tl.arange(0, EP)
    count = tl.load(counts + i, mask=i < E, other=0)
    start = tl.sum(tl.where(i < e, count, 0), 0)
    tile = tl.sum(tl.where((i >= begin) & (i < e), (count + BM - 1) // BM, 0), 0)
    place(order, tiles, ids, e, start, start + tl.load(counts + e), tile, n, E, BM, CHUNK)


@triton.jit
def _entries(order, tiles, BM: tl.constexpr):
    """Of this program's tile: expert, -1 if there is no such tile; entries [BM], and whether they are."""
    at = tiles + tl.program_id(0) * 3
    e, first, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    i = first + tl.arange(0, BM)
    there = i < stop  # of a tile that is none, nowhere: all three are -1
    return e, tl.load(order + i, mask=there, other=0).to(tl.int64), there


@triton.jit
def _store(y, acc, bias, ids, e, entry, there, n, N):
    """acc f32 [BM, BN] plus bias -> rows `entry` of y, columns n."""
    if bias is not None:
        acc += tl.load(bias + e.to(tl.int64) * N + n, mask=n < N, other=0.0)[None, :]
    known = tl.load(ids + entry, mask=there, other=0) == e
    acc = tl.where(known[:, None], acc, float("nan"))
    tl.store(y + entry[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def grouped_rows_kernel(
    y, x, x_stride, share, w, begin, bias, ids, order, tiles, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """w [., N, K]: the matrices of the experts from `begin` on."""
    e, entry, there = _entries(order, tiles, BM)
    if e >= 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        row = w + (((e - begin).to(tl.int64) * N + tl.minimum(n, N - 1)) * K)[None, :]
        x_row = x + (entry // share * x_stride)[:, None]
        j = tl.arange(0, BK)
        acc = tl.zeros([BM, BN], tl.float32)
        for first in range(0, K, BK):
            live = first + j < K
            xs = tl.load(x_row + (first + j)[None, :], mask=there[:, None] & live[None, :], other=0.0)
            v = tl.load(row + (first + j)[:, None], mask=live[:, None], other=0.0).to(x.dtype.element_ty)
            acc = tl.dot(xs, v, acc, input_precision="ieee")
        _store(y, acc, bias, ids, e, entry, there, n, N)


def _tile(entries: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BM, BN, BK and stages, by an expert's mean entries: what was fastest on an H200 at the shapes of
    benchmarks/cuda.py."""
    if dtype == torch.float32:
        return (16 if entries <= 16 else 64), 64, 32, 3
    return (16, 64, 64, 4) if entries <= 8 else (64, 128, 64, 3) if entries <= 128 else (128, 128, 64, 3)


def grouped_rows(
    x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """x [., K] in the dtype that is multiplied, rows contiguous, each for as many of ids int [n] -> [n, N] in dtype.

    qweight: u8 [E, N, row_bytes] of any type.
    """
    (E, N, _), K, n = qweight.shape, x.shape[1], len(ids)
    y = torch.empty((n, N), dtype=dtype, device=x.device)
    if not y.numel():
        return y
    is_float = ggml_types.GGML_TYPES[qtype].is_float
    bm, bn, bk, stages = _tile(n // E, x.dtype)
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    order = torch.empty(n, dtype=torch.int32, device=x.device)
    together = E if is_float else max(1, SCRATCH // (N * K * x.itemsize))
    with on_device(x):
        count_kernel[(E,)](counts, ids, n, E, CHUNK)
        for begin in range(0, E, together):
            own = qweight[begin : begin + together]
            tiles = torch.full((n // bm + min(len(own), n), 3), -1, dtype=torch.int32, device=x.device)
            plan_kernel[(len(own),)](order, tiles, counts, ids, begin, n, E, bm, triton.next_power_of_2(E), CHUNK)
            w = floats(own, qtype) if is_float else unpack(own, qtype, x.dtype, counts[begin:])
            grouped_rows_kernel[(len(tiles), triton.cdiv(N, bn))](
                y, x, x.stride(0), n // len(x), w, begin, bias, ids, order, tiles, N, K, bm, bn, bk,
                num_warps=4, num_stages=stages,
            )  # fmt: skip
            del w  # before the next ones are decoded
    return y
