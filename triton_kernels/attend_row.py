"""Attention of single rows over a paged cache: the kernel of `paged_attention.py` where tokens come one by one.

A program owns the GP query heads of a kv head, with padding, of one row, and `split` of its keys, which it goes through
by BK. Keys and values lie in the products as they lie in the cache, as rows of the left factor, and heads are columns:
8 of them take half of what 16 rows would. Codes are multiplied as whole numbers, block by block, and scales come
behind: of keys to the products, of values to the weights.

Where each row is the last one of a sequence of its own, the kernel may also rotate its query and key and write its key
and value into plain caches first (`Fresh`): of the programs that share a row, the one that has that key writes it.

Legend and what is out of range: as there.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.triton_kernels import kv_codecs, launch
from dasllama_torch.triton_kernels.functions import exp, exp_of_negative, tanh
from dasllama_torch.triton_kernels.launch import await_inputs

INTERPRETED = tl.constexpr(launch.INTERPRETED)
WIDEST = tl.constexpr(256)  # of the f32 that tensor cores multiply in parts: those of wider heads find no registers


@triton.jit
def in_three(x):
    """Three bf16 whose sum is x, by cutting off, which takes fewer instructions than rounding: 8 bits each."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def product(a, b, acc):
    """acc + a @ b, b f32, with all bits of both: a is f32, or f16 and exact in the products."""
    if a.dtype == tl.float16:
        high = b.to(tl.float16)
        acc = tl.dot(a, high, acc)
        return tl.dot(a, (b - high.to(tl.float32)).to(tl.float16), acc)
    elif a.shape[0] > WIDEST or a.shape[1] > WIDEST or INTERPRETED:  # which has no products of bf16
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        x, y = in_three(a), in_three(b)
        acc = tl.dot(x[1], y[1], acc)
        acc = tl.dot(x[2], y[0], acc)
        acc = tl.dot(x[0], y[2], acc)
        acc = tl.dot(x[1], y[0], acc)
        acc = tl.dot(x[0], y[1], acc)
        return tl.dot(x[0], y[0], acc)


@triton.jit
def product_of_codes(codes, b, acc):
    """acc + codes @ b f32, with all bits of b; codes are whole numbers of 8 bits."""
    if INTERPRETED:
        return tl.dot(codes.to(tl.float32), b, acc, input_precision="ieee")
    else:
        whole, y = codes.to(tl.float32).to(tl.bfloat16), in_three(b)
        acc = tl.dot(whole, y[2], acc)
        acc = tl.dot(whole, y[1], acc)
        return tl.dot(whole, y[0], acc)


@triton.jit
def finish(acc, top, total, sinks, h, live):
    """Sum, maximum and denominator of rows of heads h -> the softmax's result; nothing seen gives zero."""
    if sinks is not None:
        sink = tl.load(sinks + h, mask=live, other=0.0)
        most = tl.maximum(top, sink)
        shrink = exp(top - most)
        acc, total = acc * shrink[:, None], total * shrink + exp(sink - most)
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def write(out, tops, totals, acc, top, total, sinks, z, t, T, H, h, Dv, dv, live, SHARED: tl.constexpr):
    """What a program has found for heads h of rows t -> out; SHARED: as its part z, with maximum and denominator."""
    if SHARED:
        at = (z.to(tl.int64) * T + t) * H + h
        tl.store(tops + at, top, mask=live)
        tl.store(totals + at, total, mask=live)
    else:
        at = t.to(tl.int64) * H + h
        acc = finish(acc, top, total, sinks, h, live)
    tl.store(
        out + at[:, None] * Dv + dv[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (dv < Dv)[None, :]
    )


@triton.jit
def _approach(
    k_cache, k_page, k_slot, v_cache, v_page, v_slot, block_table, seq, pos, end, P, S, B, window, begin,
    R: tl.constexpr, BK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Asks for a program's first BK keys while its queries are being made. Nothing that is read here is more than a
    guess, and none of it may stay in the cache of the first level: what it says may be about to be written."""
    s, end = tl.load(seq, cache_modifier=".cg"), tl.load(end, cache_modifier=".cg")
    if window > 0:
        begin = tl.maximum(begin, tl.load(pos, cache_modifier=".cg") - window + 1)
    fits = (s >= 0) & (s < S) & (begin < tl.minimum(end, B * R))
    page = tl.load(block_table + s.to(tl.int64) * B + begin // R, mask=fits, other=-1, cache_modifier=".cg")
    asks = (tl.arange(0, THREADS) == 0) & (page >= 0) & (page < P)
    page, row = page.to(tl.int64), begin % R // BK * BK
    kv_codecs.ask(k_cache + page * k_page + row * k_slot, BK, k_slot, asks)
    kv_codecs.ask(v_cache + page * v_page + row * v_slot, BK, v_slot, asks)


class Fresh(NamedTuple):
    """A row's query, key and value before they are rotated and written: f32 [T, H, D], [T, G, D] and [T, G, Dv], heads
    contiguous. q_out, k_out: where the rotated ones go, contiguous. cos, sin: f32 [T, half]. slots: int64 [T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_out: Tensor
    k_out: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor


@triton.jit
def _turned(x, d, cos, sin, half, mask):
    """Elements d of heads at x, of which the first 2 half are rotated."""
    inside, first = d < 2 * half, d < half
    i = tl.where(first, d, d - half)
    c, s = tl.load(cos + i, mask=inside, other=1.0), tl.load(sin + i, mask=inside, other=0.0)
    partner = tl.load(x + tl.where(first, d + half, d - half), mask=mask & inside, other=0.0)
    return tl.load(x + d, mask=mask, other=0.0) * c + tl.where(first, -partner, partner) * s


@triton.jit
def _keep(at, v, mask):
    if at.dtype.element_ty == tl.float16:
        v = kv_codecs.clamped(v)
    tl.store(at, v.to(at.dtype.element_ty), mask=mask)


@triton.jit
def attend_row_kernel(
    q_out, k_out, k_new, k_row, k_head, v_new, v_row, v_head, cos, sin, half, slots,
    out, tops, totals, q, q_d, q_row, q_head, k_cache, k_page, k_group, k_slot, v_cache, v_page, v_group, v_slot,
    block_table, row_seq, row_pos, row_end, sinks, T, H, G, D, Dv, P, S, B, parts, scale, window, softcap, split,
    R: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, SHARED: tl.constexpr, CAPPED: tl.constexpr,
    GP: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, THREADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out: [T, H, Dv]; SHARED: f32 [splits, T, H, Dv], with tops and totals f32 [splits, T, H]. q_d: of codes' q.
    q_out to slots: of `Fresh`, or None."""
    K_CODED: tl.constexpr = K_CODEC == kv_codecs.Q8_0 or K_CODEC == kv_codecs.TQ4
    V_CODED: tl.constexpr = V_CODEC == kv_codecs.Q8_0 or V_CODEC == kv_codecs.TQ4
    t, g, part, z = tl.program_id(0), tl.program_id(1) // parts, tl.program_id(1) % parts, tl.program_id(2)
    k_cache += g.to(tl.int64) * k_group
    v_cache += g.to(tl.int64) * v_group
    if EARLY and R % BK == 0:
        _approach(
            k_cache, k_page, k_slot, v_cache, v_page, v_slot, block_table, row_seq + t, row_pos + t, row_end + t,
            P, S, B, window, z * split, R, BK, THREADS,
        )  # fmt: skip
    await_inputs(EARLY)
    n, d, dv = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, DVP)
    h, live = g * (H // G) + part * GP + n, part * GP + n < H // G
    at = t.to(tl.int64) * q_row + h * q_head
    if K_CODED:
        b = tl.arange(0, DP // 32)[:, None]
        has = live[None, :] & (b * 32 < D)
        i = tl.arange(0, 32)[None, :, None]
        qs = tl.load(q + (at[None, :] + b * 32)[:, None, :] + i, mask=has[:, None, :], other=0.0)
        qd = tl.load(q_d + at[None, :] // 32 + b, mask=has, other=0.0)
    elif slots is None:
        qs = tl.load(q + at[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)
    else:
        has = live[None, :] & (d < D)[:, None]
        cos += t.to(tl.int64) * half
        sin += t.to(tl.int64) * half
        qs = _turned(q + at[None, :], d[:, None], cos, sin, half, has)
        if z == 0:
            tl.store(q_out + ((t.to(tl.int64) * H + h) * D)[None, :] + d[:, None], qs, mask=has)

    s, pos, end = tl.load(row_seq + t), tl.load(row_pos + t), tl.load(row_end + t)
    if slots is not None:
        if z == tl.minimum(tl.maximum(pos, 0) // split, tl.num_programs(2) - 1):
            slot = tl.load(slots + t)
            known = (slot >= 0) & (slot // R < P)
            page, row = tl.where(known, slot // R, 0), slot % R
            k = _turned(k_new + (t.to(tl.int64) * k_row + g * k_head), d, cos, sin, half, d < D)
            v = tl.load(v_new + (t.to(tl.int64) * v_row + g * v_head) + dv, mask=dv < Dv, other=0.0)
            tl.store(k_out + (t.to(tl.int64) * G + g) * D + d, k, mask=d < D)
            _keep(k_cache + (page * k_page + row * k_slot) + d, k, d < tl.where(known, D, 0))
            _keep(v_cache + (page * v_page + row * v_slot) + dv, v, dv < tl.where(known, Dv, 0))
        tl.debug_barrier()  # this program's threads read what one of them has written
    begin = tl.maximum(pos - window + 1, 0) if window > 0 else 0
    sees = (s >= 0) & (begin < end)
    broken = sees & ((s >= S) | (end > B * R))
    begin = tl.maximum(begin, z * split)
    end = tl.where(sees & (broken == 0), tl.minimum(end, z * split + split), 0)
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([DVP // 32, 32, GP] if V_CODED else [DVP, GP], tl.float32)
    pages = block_table + s.to(tl.int64) * B
    follows = tl.load(pages + begin // R, mask=begin < end, other=-1)
    for j0 in range(begin // BK * BK, end, BK):
        j = j0 + tl.arange(0, BK)
        seen = (j >= begin) & (j < end)
        if R % BK == 0:  # all in one page; the next is looked up before it is wanted
            page, row = follows, j0 % R + tl.arange(0, BK)
            follows = tl.load(pages + tl.minimum(j0 + BK, end - 1) // R)
            known = (page >= 0) & (page < P)
            there = (j >= begin) & (j < tl.where(known, end, 0))
        else:
            page, row = tl.load(pages + j // R, mask=seen, other=-1), j % R
            known = (page >= 0) & (page < P)
            there = known
        page = tl.where(known, page, 0).to(tl.int64)
        k_at, v_at = k_cache + (page * k_page + row * k_slot), v_cache + (page * v_page + row * v_slot)
        # All loads come first: what is written to shared memory between them would keep them in order.
        if K_CODED:
            k, kd = kv_codecs.load_codes(k_at, there, tl.cdiv(D, 32), DP // 32, K_CODEC)
        elif R % BK == 0:  # what else lies in a page may be read, and is not seen
            k = tl.load(k_at[:, None] + d[None, :], mask=(d < tl.where(known, D, 0))[None, :], other=0.0)
        else:
            k = tl.load(k_at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        if V_CODED:
            v, vd = kv_codecs.load_codes(v_at, there, tl.cdiv(Dv, 32), DVP // 32, V_CODEC)
        else:
            v = tl.load(v_at[None, :] + dv[:, None], mask=there[None, :] & (dv < Dv)[:, None], other=0.0)
        if K_CODED:
            whole = tl.dot(tl.permute(k.to(tl.float16), (1, 0, 2)), qs)
            score = tl.sum(whole * (tl.trans(kd)[:, :, None] * qd[:, None, :]), 0)
        else:
            score = product(k, qs, tl.zeros([BK, GP], tl.float32))
        score *= scale
        if CAPPED:
            score = tanh(score / softcap) * softcap
        score = tl.where(there[:, None], score, tl.where(seen, float("nan"), float("-inf"))[:, None])
        most = tl.maximum(top, tl.max(score, 0))
        finite = tl.where(most == float("-inf"), 0.0, most)
        p, shrink = exp_of_negative(score - finite[None, :]), exp_of_negative(top - finite)
        total = total * shrink + tl.sum(p, 0)
        top = most
        if V_CODED:
            weights = p[None, :, :] * tl.trans(vd)[:, :, None]
            acc = product_of_codes(tl.permute(v, (1, 2, 0)), weights, acc * shrink[None, None, :])
        else:
            acc = product(v, p, acc * shrink[None, :])
    total = tl.where(broken, float("nan"), total)
    if V_CODED:
        acc = tl.reshape(acc, [DVP, GP])
    write(out, tops, totals, tl.trans(acc), top, total, sinks, z, t, T, H, h, Dv, dv, live, SHARED)
