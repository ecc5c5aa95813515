"""Few rows for each of the matrices that ids name, on the tensor cores, as `few_rows_mma.py` multiplies few.

One launch rounds x and puts the entries (a row of y each) in the order of their experts, whose runs it cuts into tiles
of BM entries; a program of the other has such a tile and 16 rows of its expert's matrix, which is so read once for all
of them. Nothing waits for the GPU: there are as many programs as tiles could be. An entry has the same result whatever
others there are.

n entries of E experts, `share` of them for each of R rows of x [R, K]; N rows of each matrix. An id that is none of E
gives a row of NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.triton_kernels import blocks, few_rows_mma
from dasllama_torch.triton_kernels.few_rows_mma import tile_of_products
from dasllama_torch.triton_kernels.grouped_rows import expert_of, place
from dasllama_torch.triton_kernels.launch import PTX, aligned, await_inputs, early, on_device
from dasllama_torch.triton_kernels.quantize_activation import ROUNDS, round_blocks, unrounded


@triton.jit
def _plan(order, tiles, ids, e, n, E, slots, BM: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """An expert's part of order int32 [n] and of tiles int32 [slots, 3]: expert, or -1 if there is no such tile, first
    entry in `order` and the end of the expert's."""
    i, of = tl.arange(0, CHUNK), tl.arange(0, EP)
    found = tl.zeros([CHUNK, EP], tl.int32)
    for first in range(0, n, CHUNK):
        found += (expert_of(ids, first + i, n, E)[:, None] == of[None, :]).to(tl.int32)
    counts = tl.where(of < E, tl.sum(found, 0), 0)
    cut = (counts + BM - 1) // BM
    start, tile = tl.sum(tl.where(of < e, counts, 0), 0), tl.sum(tl.where(of < e, cut, 0), 0)
    stop = start + tl.sum(tl.where(of == e, counts, 0), 0)
    if e == E - 1:
        for slot in range(tl.sum(cut, 0), slots):
            tl.store(tiles + slot * 3, -1)
    if start < stop:
        place(order, tiles, ids, e, start, stop, tile, n, E, BM, CHUNK)


@triton.jit(do_not_specialize=["M", "n", "slots"])
def round_and_plan_kernel(
    q_out, d_out, s_out, x, x_stride, order, tiles, ids, M, K, n, E, slots,
    LATTICE: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, EP: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has an expert's part of the plan, or BLOCKS blocks of a row of x, as `quantize_activation` has them."""
    await_inputs(EARLY)
    i = tl.program_id(0)
    if i < E:
        _plan(order, tiles, ids, i, n, E, slots, BM, EP, CHUNK)
    else:
        parts = tl.cdiv(K // SPAN, BLOCKS)
        m = ((i - E) // parts).to(tl.int64)
        block = (i - E) % parts * BLOCKS + tl.arange(0, BLOCKS)
        live = block < K // SPAN
        at = block[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        v = tl.load(x + m * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
        round_blocks(v, q_out, d_out, s_out, m, block, live, M, LATTICE, SPAN, BLOCKS)


@triton.jit(do_not_specialize=["share", "R"])
def few_rows_experts_kernel(
    y, q, d, s, packed, table, bias, ids, order, tiles, share, R, N, K,
    QTYPE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, SHARE: tl.constexpr,
    TABLE: tl.constexpr, TILES: tl.constexpr, SETS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr, RESERVATION: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q, d and s as `Rounded` has them, of R rows."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = tiles + tl.program_id(1) * 3
    e = tl.load(at)
    if e >= 0:
        first, stop = tl.load(at + 1), tl.load(at + 2)
        matrix = packed + e.to(tl.int64) * N * (K // BLOCK * BYTES)
        result, n, m = tile_of_products(
            q, d, s, matrix, table, tl.program_id(0), order + first, share, R, stop - first, N, K,
            QTYPE, OFFSET, BLOCK, BYTES, SHARE, TABLE, TILES, SETS, WARPS, EVEN, AHEAD, SLOTS, STRIDE, LINE,
            RESERVATION, PTX, EARLY,
        )  # fmt: skip
        live = m < stop - first
        entry = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        if bias is not None:
            result += tl.load(bias + e.to(tl.int64) * N + n, mask=n < N, other=0.0)
        known = tl.load(ids + entry, mask=live, other=0) == e
        result = tl.where(known, result, float("nan"))
        tl.store(y + entry * N + n, result.to(y.dtype.element_ty), mask=live & (n < N))


CELLS = 4096  # ids and experts that are compared at once
WARPS = 1  # of a program, which have all of K: the order of sums depends on nothing else


def _rows(n: int, E: int) -> int:
    """BM: what was fastest on an H200 at the shapes of benchmarks/cuda.py."""
    return 8 if n <= 8 * E else 16


def few_rows_experts(x: Tensor, qweight: Tensor, qtype: int, bias: Tensor | None, ids: Tensor) -> Tensor:
    """x [R, K] on the type's lattice, rows contiguous, each for as many of ids int [n]; qweight u8 [E, N, row_bytes] of
    a type that `few_rows_mma.serves`; bias [E, N] -> [n, N] in x.dtype."""
    (E, N, _), (R, K), n = qweight.shape, x.shape, len(ids)
    y = torch.empty((n, N), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    a = unrounded(R, K, ggml_types.GGML_TYPES[qtype].lattice, x.device)
    bm = _rows(n, E)
    slots = (n + min(E, n) * (bm - 1)) // bm
    order, tiles = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (n, 3 * slots))
    experts, count = triton.next_power_of_2(E), 1024 // a.span
    with on_device(x):
        round_and_plan_kernel[(E + R * triton.cdiv(K // a.span, count),)](
            a.q, a.d, a.s, x, x.stride(0), order, tiles, ids, R, K, n, E, slots,
            ggml_types.GGML_TYPES[qtype].lattice, a.span, count, bm, experts, max(16, CELLS // experts),
            num_warps=4, enable_fp_fusion=ROUNDS, **early(x),
        )  # fmt: skip
        programs = triton.cdiv(N, 16), slots
        few_rows_experts_kernel[programs](
            y, a.q, a.d, a.s, aligned(qweight, qtype), blocks.table(qtype, x.device), bias, ids, order, tiles,
            n // R, R, N, K, *few_rows_mma.kind(qtype),
            *few_rows_mma.program(
                qtype, K, 1, WARPS, few_rows_mma.slots_of(qtype, WARPS), bm // 8, programs[0] * programs[1]
            ), PTX,
            num_warps=WARPS, **early(x),
        )  # fmt: skip
    return y
