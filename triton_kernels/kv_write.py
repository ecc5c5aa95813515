"""Writing keys and values into pages, as their codecs keep them. A program owns a row's head: its k and its v.

A GPU cannot raise without waiting for it: a slot outside of the cache is not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.kv_codecs import CODECS
from dasllama_torch.ops.kv_write import kv_write as op
from dasllama_torch.ops.registry import count_call, fall_back, implement
from dasllama_torch.ops.require import require
from dasllama_torch.triton_kernels import kv_codecs
from dasllama_torch.triton_kernels.launch import check, heads_of, on_device


@triton.jit
def _write(x, cache, signs, n, W: tl.constexpr, CODEC: tl.constexpr):
    """A head of n elements; W: elements that the codec keeps of it, up to a power of two."""
    if CODEC == kv_codecs.Q8_0 or CODEC == kv_codecs.TQ4:
        kv_codecs.store(cache, x, signs, n, W, CODEC)
    else:
        i = tl.arange(0, W)
        v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        if cache.dtype.element_ty == tl.float16:
            v = kv_codecs.clamped(v)
        tl.store(cache + i, v.to(cache.dtype.element_ty), mask=i < n)


@triton.jit
def kv_write_kernel(
    k, k_row, k_head, v, v_row, v_head, k_cache, k_page, k_group, k_slot, v_cache, v_page, v_group, v_slot, slots,
    signs, P, R, D, Dv, W: tl.constexpr, WV: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
):  # fmt: skip
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + t)
    if (slot >= 0) & (slot // R < P):
        page, row = slot // R, slot % R
        k_at, v_at = page * k_page + g * k_group + row * k_slot, page * v_page + g * v_group + row * v_slot
        _write(k + t * k_row + g * k_head, k_cache + k_at, signs, D, W, K_CODEC)
        _write(v + t * v_row + g * v_head, v_cache + v_at, signs, Dv, WV, V_CODEC)


def check_caches(op: str, k_cache: Tensor, v_cache: Tensor, k_codec: int, v_codec: int, D: int, Dv: int) -> None:
    """Caches must be [P, G, R, row] of their codecs' dtypes and rows, on one device, rows contiguous."""
    for what, cache, codec, head in (("k_cache", k_cache, k_codec, D), ("v_cache", v_cache, v_codec, Dv)):
        dim = CODECS[codec].row(head)
        require(
            cache.dim() == 4
            and cache.dtype == CODECS[codec].dtype
            and cache.shape[:3] == k_cache.shape[:3]
            and cache.shape[3] == dim
            and (cache.stride(3) == 1 or dim == 1)
            and cache.device == k_cache.device,
            lambda what=what, cache=cache, codec=codec, dim=dim: (
                f"dasllama::{op}: {what} must be {CODECS[codec].dtype} [P, G, R, {dim}] with contiguous rows, both of "
                f"one P, G and R on {k_cache.device}, found {cache.dtype} {list(cache.shape)} on {cache.device}"
            ),
        )


@implement(op, "CUDA")
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_codec: int, v_codec: int) -> None:
    check("kv_write", "k", k, k_cache)
    check("kv_write", "v", v, k_cache)
    check_caches("kv_write", k_cache, v_cache, k_codec, v_codec, k.shape[-1], v.shape[-1])
    P, G, R, _ = k_cache.shape
    T, D, Dv = slots.shape[0], k.shape[-1], v.shape[-1]
    require(
        slots.dtype == torch.int64 and slots.dim() == 1 and slots.device == k.device == v.device == k_cache.device,
        lambda: (
            f"dasllama::kv_write: slots must be int64 [T] on {k_cache.device} like k and v, "
            f"found {slots.dtype} {list(slots.shape)} on {slots.device}"
        ),
    )
    require(
        k.shape[:-1].numel() == v.shape[:-1].numel() == T * G and k.shape[-2] == v.shape[-2] == G,
        lambda: (
            f"dasllama::kv_write: k and v must be [..., {G}, D] of {T} rows, found {list(k.shape)} and {list(v.shape)}"
        ),
    )
    if not (kv_codecs.is_even(k_cache, k_codec) and kv_codecs.is_even(v_cache, v_codec)):
        return fall_back(op, (k, v, k_cache, v_cache, slots, k_codec, v_codec), {}, "codes at odd addresses")
    count_call("kv_write", "triton")
    if T:
        ks, vs = heads_of(k), heads_of(v)
        with on_device(k):
            kv_write_kernel[(T, G)](
                ks, ks.stride(0), ks.stride(1), vs, vs.stride(0), vs.stride(1),
                k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3], slots.contiguous(),
                kv_codecs.signs(k.device), P, R, D, Dv, kv_codecs.whole_width(k_codec, D),
                kv_codecs.whole_width(v_codec, Dv), k_codec, v_codec,
                num_warps=1, enable_fp_fusion=False,  # codes follow from roundings of products
            )  # fmt: skip
    return None
