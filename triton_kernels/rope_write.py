"""The rotation of queries and keys, and the writing of keys and values into plain caches, in one launch. Rotated
queries and keys are written for themselves, too.

A program owns a head of a row: one of the H query heads, or one of the G kv heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.triton_kernels import kv_codecs
from dasllama_torch.triton_kernels.launch import await_inputs, early, on_device


@triton.jit
def _keep(cache, i, v, mask):
    if cache is not None:
        if cache.dtype.element_ty == tl.float16:
            v = kv_codecs.clamped(v)
        tl.store(cache + i, v.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(y, cache, x, cos, sin, half, D, BLOCK: tl.constexpr):
    """A head of D elements, of which the first 2 half are rotated, to y and to a cache's row."""
    i = tl.arange(0, BLOCK)
    pair = i < half
    a, b = tl.load(x + i, mask=pair, other=0.0), tl.load(x + half + i, mask=pair, other=0.0)
    c, s = tl.load(cos + i, mask=pair, other=0.0), tl.load(sin + i, mask=pair, other=0.0)
    first, second = a * c - b * s, b * c + a * s
    tl.store(y + i, first, mask=pair)
    tl.store(y + half + i, second, mask=pair)
    _keep(cache, i, first, pair)
    _keep(cache, half + i, second, pair)
    for begin in range(2 * half, D, BLOCK):
        v = tl.load(x + begin + i, mask=begin + i < D)
        tl.store(y + begin + i, v, mask=begin + i < D)
        _keep(cache, begin + i, v, begin + i < D)


@triton.jit
def rope_write_kernel(
    q_out, q, q_row, q_head, k_out, k, k_row, k_head, cos, sin, v, v_row, v_head,
    k_cache, k_page, k_group, k_slot, v_cache, v_page, v_group, v_slot, slots,
    P, R, H, G, D, Dv, half, BLOCK: tl.constexpr, WV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += t * half
    sin += t * half
    if h < H:
        _rotate(q_out + (t * H + h) * D, None, q + t * q_row + h * q_head, cos, sin, half, D, BLOCK)
    else:
        g = (h - H).to(tl.int64)
        y, x = k_out + (t * G + g) * D, k + t * k_row + g * k_head
        slot = tl.load(slots + t)
        if (slot >= 0) & (slot // R < P):
            page, row = slot // R, slot % R
            _rotate(y, k_cache + page * k_page + g * k_group + row * k_slot, x, cos, sin, half, D, BLOCK)
            i = tl.arange(0, WV)
            value = tl.load(v + t * v_row + g * v_head + i, mask=i < Dv, other=0.0)
            _keep(v_cache + page * v_page + g * v_group + row * v_slot, i, value, i < Dv)
        else:
            _rotate(y, None, x, cos, sin, half, D, BLOCK)


def rope_write(
    q_out: Tensor, q: Tensor, k_out: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
    v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    """q [T, H, D], k [T, G, D] and v [T, G, Dv], all f32, their heads contiguous; q_out and k_out of the same shapes,
    contiguous; cos and sin f32 [T, half]; caches f32 or f16 [P, G, R, D] and [P, G, R, Dv]; slots int64 [T]."""
    (T, H, D), (G, Dv), half = q.shape, v.shape[1:], cos.shape[1]
    P, _, R, _ = k_cache.shape
    with on_device(q):
        rope_write_kernel[(T, H + G)](
            q_out, q, q.stride(0), q.stride(1), k_out, k, k.stride(0), k.stride(1), cos, sin,
            v, v.stride(0), v.stride(1), k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3], slots,
            P, R, H, G, D, Dv, half, triton.next_power_of_2(max(half, 16)), triton.next_power_of_2(Dv),
            num_warps=1, **early(q),
        )  # fmt: skip
