"""Attention of a ragged batch over a paged cache, with an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867).

A program owns a tile of BM rows and the query heads of one kv head, GP of them with padding, as BM * GP rows of
products with keys; a kv head of more query heads has several `parts`. It goes through the sequences of its rows one
after the other (mostly there is one), and through each one's keys from the first that a row sees to the last, by BK.
Where a few rows may have many keys, several programs share a row (Flash-Decoding, Dao et al. 2023), `split` keys each:
each writes its sum, its maximum and its denominator, and `combine_kernel`, whose programs own a row's head, adds them
up.

Scores and sums are f32. Where keys or values are f16, an f32 factor is split into two f16 numbers that together have 22
bits, so that the tensor cores lose nothing of it; f32 of heads that are not wide is split into three bf16, which have
all of its bits. A row that sees a key or a value that is not finite shows the fault, in a tile of rows by all of its
elements, and one that does not see it is not touched by it. A row whose sequence, end or pages are out of range is NaN:
a GPU cannot raise without waiting for it. Tiles of rows decode codes, as `kv_codecs.py` says.
T rows, H query heads, G kv heads, D and Dv head dims, P pages of R rows, S sequences of at most B pages.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.kv_codecs import CODECS
from dasllama_torch.ops.paged_attention import paged_attention as op
from dasllama_torch.ops.registry import count_call, fall_back, implement
from dasllama_torch.ops.require import require
from dasllama_torch.triton_kernels import kv_codecs
from dasllama_torch.triton_kernels.attend_row import Fresh, attend_row_kernel, finish, product, write
from dasllama_torch.triton_kernels.functions import exp_of_negative, tanh
from dasllama_torch.triton_kernels.kv_write import check_caches
from dasllama_torch.triton_kernels.launch import PTX, await_inputs, check, early, heads_of, on_device

MOST = 512  # keys of a program where programs share rows, at most
# Of products in a program, at most. From 64 of them, or of keys, on Triton takes wgmma, and its 3.6 then gives wrong
# sums, and reads where nothing is, for heads of f16 that are no multiple of 16 wide.
ROWS, WIDE_ROWS = 32, 128
WIDEST = tl.constexpr(128)  # of the heads whose f32 tiles of rows multiply in parts: those of wider ones find no room
ROOMY = 150 << 10  # bytes of shared memory of a program that two stages of heads of 512 need
NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _product(a, b, acc):
    """acc + a f32 [M, K] @ b [K, N], with all bits of a: b is f32, or f16 and exact in the products."""
    if b.dtype == tl.float16:
        high = a.to(tl.float16)
        acc = tl.dot(high, b, acc)
        return tl.dot((a - high.to(tl.float32)).to(tl.float16), b, acc)
    elif b.shape[0] > WIDEST or b.shape[1] > WIDEST:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return product(a, b, acc)


@triton.jit
def paged_attention_kernel(
    out, tops, totals, q, q_row, q_head, k_cache, k_page, k_group, k_slot, v_cache, v_page, v_group, v_slot,
    block_table, row_seq, row_pos, row_end, sinks, T, H, G, D, Dv, P, S, B, parts, scale, window, softcap, split,
    R: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, SHARED: tl.constexpr, CAPPED: tl.constexpr,
    BM: tl.constexpr, GP: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out: [T, H, Dv]; SHARED: f32 [splits, T, H, Dv], with tops and totals f32 [splits, T, H]."""
    await_inputs(EARLY)
    g, part, z = tl.program_id(1) // parts, tl.program_id(1) % parts, tl.program_id(2)
    i = tl.arange(0, BM * GP)
    t, in_group = tl.program_id(0) * BM + i // GP, part * GP + i % GP
    h = g * (H // G) + in_group
    live = (t < T) & (in_group < H // G)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    at = t.to(tl.int64) * q_row + h * q_head
    qs = tl.load(q + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)

    seq = tl.load(row_seq + t, mask=live, other=-1)
    pos = tl.load(row_pos + t, mask=live, other=0)
    end = tl.load(row_end + t, mask=live, other=0)
    begin = tl.maximum(pos - window + 1, 0) if window > 0 else tl.zeros_like(pos)
    sees = (seq >= 0) & (begin < end)
    broken = sees & ((seq >= S) | (end > B * R))
    begin, end = tl.maximum(begin, z * split), tl.minimum(end, z * split + split)
    sees = sees & (broken == 0) & (begin < end)

    top = tl.full([BM * GP], float("-inf"), tl.float32)
    total = tl.zeros([BM * GP], tl.float32)
    acc = tl.zeros([BM * GP, DVP], tl.float32)
    k_cache += g.to(tl.int64) * k_group
    v_cache += g.to(tl.int64) * v_group
    s = tl.min(tl.where(sees, seq, NEVER), 0)
    while s != NEVER:
        mine = sees & (seq == s)
        first, stop = tl.min(tl.where(mine, begin, NEVER), 0), tl.max(tl.where(mine, end, 0), 0)
        for j0 in range(first // BK * BK, stop, BK):
            j = j0 + tl.arange(0, BK)
            pages = block_table + s.to(tl.int64) * B
            if R % BK == 0:  # all in one
                page = tl.load(pages + j0 // R)
                known = (page >= 0) & (page < P)
                there = (j >= first) & (j < tl.where(known, stop, 0))
                row = j0 % R + tl.arange(0, BK)
            else:
                page = tl.load(pages + j // R, mask=(j >= first) & (j < stop), other=-1)
                known = (page >= 0) & (page < P)
                there = known
                row = j % R
            page = tl.where(known, page, 0).to(tl.int64)
            k = kv_codecs.load(k_cache + (page * k_page + row * k_slot), there, D, DP, K_CODEC)
            v = kv_codecs.load(v_cache + (page * v_page + row * v_slot), there, Dv, DVP, V_CODEC)
            score = _product(qs, tl.trans(k), tl.zeros([BM * GP, BK], tl.float32)) * scale
            if CAPPED:
                score = tanh(score / softcap) * softcap
            score += tl.where(there, 0.0, float("nan"))[None, :]
            if BM > 1:  # rows of a tile see different keys: a weight of zero must meet no NaN
                v32 = v.to(tl.float32)
                score += tl.sum(v32 - v32, 1)[None, :]  # zero, or NaN
                v = tl.where(tl.abs(v32) < float("inf"), v, 0.0).to(v.dtype)
            seen = mine[:, None] & (j[None, :] >= begin[:, None]) & (j[None, :] < end[:, None])
            score = tl.where(seen, score, float("-inf"))
            most = tl.maximum(top, tl.max(score, 1))
            finite = tl.where(most == float("-inf"), 0.0, most)
            p, shrink = exp_of_negative(score - finite[:, None]), exp_of_negative(top - finite)
            total = total * shrink + tl.sum(p, 1)
            acc = _product(p, v, acc * shrink[:, None])
            top = most
        s = tl.min(tl.where(sees & (seq > s), seq, NEVER), 0)
    total = tl.where(broken, float("nan"), total)
    write(out, tops, totals, acc, top, total, sinks, z, t, T, H, h, Dv, dv, live, SHARED)


@triton.jit
def merge(acc, top, total, parts, tops, totals, at, dv, Dv, DVP: tl.constexpr, rows, first, splits,
          SPLITS: tl.constexpr):  # fmt: skip
    """Sums [N, DVP], maxima and denominators [N] of rows' heads `at`, with those of SPLITS programs from `first` on."""
    z = first + tl.arange(0, SPLITS)[:, None]
    from_ = at[None, :] + z.to(tl.int64) * rows
    live = z < splits
    # Where nothing is seen the part is written too, as zeros: it need not wait for its maximum to be read.
    wanted = live[:, :, None] & (dv < Dv)[None, :, :]
    part = tl.load(parts + from_[:, :, None] * Dv + dv[None, :, :], mask=wanted, other=0.0)
    tops_z = tl.load(tops + from_, mask=live, other=float("-inf"))
    totals_z = tl.load(totals + from_, mask=live, other=0.0)
    most = tl.maximum(top, tl.max(tops_z, 0))
    finite = tl.where(most == float("-inf"), 0.0, most)
    mine, theirs = exp_of_negative(top - finite), exp_of_negative(tops_z - finite[None, :])
    acc = acc * mine[:, None] + tl.sum(part * theirs[:, :, None], 0)
    return acc, most, total * mine + tl.sum(totals_z * theirs, 0)


@triton.jit
def combine_kernel(
    out, parts, tops, totals, sinks, rows, H, Dv, splits,
    SPLITS: tl.constexpr, DVP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts f32 [splits, T, H, Dv] with tops and totals [splits, T, H] -> out [T, H, Dv]; rows = T * H."""
    await_inputs(EARLY)
    at = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    dv = tl.arange(0, DVP)[None, :]
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DVP], tl.float32)
    for first in range(0, splits, SPLITS):
        acc, top, total = merge(acc, top, total, parts, tops, totals, at, dv, Dv, DVP, rows, first, splits, SPLITS)
    acc = finish(acc, top, total, sinks, at % H, tl.full([1], 1, tl.int1))
    tl.store(out + at[:, None] * Dv + dv, acc.to(out.dtype.element_ty), mask=dv < Dv)


class Shared(NamedTuple):
    """What programs that share rows found, and where their sum goes."""

    out: Tensor  # [..., H, Dv]
    sums: Tensor  # f32 [splits, T, H, Dv]
    tops: Tensor  # f32 [splits, T, H]
    totals: Tensor
    sinks: Tensor | None

    @property
    def chunk(self) -> int:
        """How many of the programs are added up at once."""
        return min(64, triton.next_power_of_2(len(self.sums)))

    def combine(self) -> None:
        splits, T, H, Dv = self.sums.shape
        with on_device(self.out):
            combine_kernel[(T * H,)](
                self.out, self.sums, self.tops, self.totals, self.sinks, T * H, H, Dv, splits,
                self.chunk, triton.next_power_of_2(max(Dv, 16)), num_warps=4, **early(self.out),
            )  # fmt: skip


def _tile(
    by_row: bool, gp: int, dp: int, dvp: int, is_even: bool, k_half: bool, halves: bool, roomy: bool
) -> tuple[int, int, int, int]:
    """BM, BK, warps, stages. is_even: heads are multiples of 16. k_half, halves: keys are f16, or they and values."""
    widest = max(dp, dvp)
    if by_row:
        bm, warps, stages = 1, 4 if gp <= 8 else 2, 3 if PTX and halves else 2
        bk = 32 if widest > 128 or not is_even or not (PTX or halves) else 64
    else:
        wide = halves and is_even and widest <= 128
        bm, warps, stages = (WIDE_ROWS // gp, 8, 2) if wide else (ROWS // gp, 4, 3)
        bk = 64 if dp <= 128 and k_half else 32
    if not halves and widest * (1 if by_row else 2) * (1 if roomy else 2) > 512:
        bk = 16  # f32 of wide heads, and what codes become, fill the shared memory
    if widest > 256:
        stages = min(stages, 2 if roomy else 1)
    return bm, bk, warps, stages


def _is_roomy(device: torch.device) -> bool:
    """Whether a program may have more shared memory than AMD's cards and NVIDIA's smaller ones give it."""
    if not PTX or device.type != "cuda":
        return PTX
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= ROOMY


def _check(q: Tensor, k_cache: Tensor, block_table: Tensor, rows: dict[str, Tensor], sinks: Tensor | None) -> None:
    (G, H), T = (k_cache.shape[1], q.shape[-2]), q.shape[:-2].numel()
    require(
        H % G == 0 and q.device == k_cache.device,
        lambda: (
            f"dasllama::paged_attention: q must be [..., a multiple of {G}, D] on {k_cache.device}, "
            f"found {list(q.shape)} on {q.device}"
        ),
    )
    for what, t in rows.items():
        require(
            t.dtype == torch.int32 and t.shape == (T,) and t.device == q.device,
            lambda what=what, t=t: (
                f"dasllama::paged_attention: {what} must be int32 [{T}] on {q.device}, "
                f"found {t.dtype} {list(t.shape)} on {t.device}"
            ),
        )
    require(
        block_table.dtype == torch.int32 and block_table.dim() == 2 and block_table.device == q.device,
        lambda: (
            f"dasllama::paged_attention: block_table must be int32 [S, B] on {q.device}, "
            f"found {block_table.dtype} {list(block_table.shape)} on {block_table.device}"
        ),
    )
    require(
        sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (H,) and sinks.device == q.device),
        lambda: f"dasllama::paged_attention: sinks must be f32 [{H}], found {sinks.dtype} {list(sinks.shape)}",
    )


@implement(op, "CUDA")
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_seq: Tensor,
    row_pos: Tensor,
    row_end: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_codec: int,
    v_codec: int,
    v_dim: int,
) -> Tensor:
    args = (q, k_cache, v_cache, block_table, row_seq, row_pos, row_end, scale, window, softcap, sinks)
    if not is_served(*args, k_codec, v_codec, v_dim):
        return fall_back(op, (*args, k_codec, v_codec, v_dim), {}, "codes at odd addresses")
    out, shared = attend(*args, k_codec, v_codec, v_dim)
    count_call("paged_attention", "triton" if shared is None else "triton/shared")
    if shared is not None:
        shared.combine()
    return kv_codecs.turned_back(out, v_dim, q.dtype) if CODECS[v_codec].rotated else out


def is_served(q, k_cache, v_cache, block_table, row_seq, row_pos, row_end, scale, window, softcap, sinks,
              k_codec, v_codec, v_dim) -> bool:  # fmt: skip
    """Whether the op's arguments, which must be right, are what these kernels take."""
    check("paged_attention", "q", q, k_cache)
    check_caches("paged_attention", k_cache, v_cache, k_codec, v_codec, q.shape[-1], v_dim)
    _check(q, k_cache, block_table, {"row_seq": row_seq, "row_pos": row_pos, "row_end": row_end}, sinks)
    return kv_codecs.is_even(k_cache, k_codec) and kv_codecs.is_even(v_cache, v_codec)


def _is_by_row(T: int, S: int, P: int) -> bool:
    """About a row of each sequence: a tile of rows would have many sequences."""
    return T <= 2 * S and P > 0


def can_write(fresh: Fresh, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> bool:
    """Whether `attend` may do it, for rows that are the last ones of a sequence each."""
    (P, G, _, D), (T, H, _) = k_cache.shape, fresh.q.shape
    mine = fresh.q_out.data_ptr() == q.data_ptr() and q.is_contiguous() and q.numel() == fresh.q.numel()
    return mine and _is_by_row(T, len(block_table), P) and H // G <= ROWS and fresh.k.shape == (T, G, D)


def _new(fresh: Fresh | None) -> tuple:
    """q_out to slots of `attend_row_kernel`."""
    if fresh is None:
        return (None,) * 12
    k, v = fresh.k, fresh.v
    return (
        fresh.q_out, fresh.k_out, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1),
        fresh.cos, fresh.sin, fresh.cos.shape[1], fresh.slots,
    )  # fmt: skip


def attend(q, k_cache, v_cache, block_table, row_seq, row_pos, row_end, scale, window, softcap, sinks,
           k_codec, v_codec, v_dim, fresh: Fresh | None = None) -> tuple[Tensor, Shared | None]:  # fmt: skip
    """The op's result [..., H, Dv], still rotated if the codec is, and what is to be combined into it, if anything.

    fresh: what is rotated into q, and written into the caches, by the same launch (`can_write`)."""
    (P, G, R, _), H = k_cache.shape, q.shape[-2]
    (S, B), T = block_table.shape, q.shape[:-2].numel()
    rotated = CODECS[v_codec].rotated
    Dv, dtype = (CODECS[v_codec].width(v_dim), torch.float32) if rotated else (v_dim, q.dtype)
    out = torch.empty((*q.shape[:-1], Dv), dtype=dtype, device=q.device)
    if not out.numel():
        return out, None
    by_row = _is_by_row(T, S, P)
    heads, scales = kv_codecs.queries(heads_of(q) if fresh is None else fresh.q, k_codec, whole=by_row)
    D = heads.shape[2]
    gp = min(triton.next_power_of_2(H // G), ROWS)
    parts = triton.cdiv(H // G, gp)
    least = [32 if CODECS[codec].block_bytes else 16 for codec in (k_codec, v_codec)]
    dp, dvp = (triton.next_power_of_2(max(n, m)) for n, m in zip((D, Dv), least, strict=True))
    k_half, v_half = (cache.dtype == torch.float16 for cache in (k_cache, v_cache))
    is_even, roomy = D % 16 == 0 == Dv % 16, _is_roomy(q.device)
    bm, bk, warps, stages = _tile(by_row, gp, dp, dvp, is_even, k_half, k_half and v_half, roomy)
    tiles, longest = triton.cdiv(T, bm), max(B * R, 1)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 16
    wanted = (2 if by_row else 1) * processors // (tiles * G * parts)  # programs that share a row, to fill the card
    split = min(MOST, bk * triton.cdiv(longest, bk * wanted)) if wanted > 1 else longest
    splits = triton.cdiv(longest, split)
    shared = None
    if splits > 1:
        sums = torch.empty((splits, T, H, Dv), dtype=torch.float32, device=q.device)
        tops, totals = (torch.empty((splits, T, H), dtype=torch.float32, device=q.device) for _ in range(2))
        shared = Shared(out, sums, tops, totals, sinks)
    args = (
        *((shared.sums, shared.tops, shared.totals) if shared else (out, None, None)), heads,
        *((scales,) if by_row else ()), heads.stride(0), heads.stride(1),
        k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3],
        block_table.contiguous(), row_seq.contiguous(), row_pos.contiguous(), row_end.contiguous(), sinks,
        T, H, G, D, Dv, P, S, B, parts, scale, window, softcap, split, R,
        k_codec, v_codec, shared is not None, softcap > 0,
    )  # fmt: skip
    grid, options = (tiles, G * parts, splits), dict(num_warps=warps, num_stages=stages, **early(q))
    with on_device(q):
        if by_row:
            attend_row_kernel[grid](*_new(fresh), *args, max(gp, 8), bk, dp, dvp, 32 * warps, **options)
        else:
            paged_attention_kernel[grid](*args, bm, gp, bk, dp, dvp, **options)
    return out, shared
