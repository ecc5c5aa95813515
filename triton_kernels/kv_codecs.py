"""How the codecs of `ops.kv_codecs` keep heads, in Triton: the only place in this backend where a codec is read or
written.

A quantized head is blocks of 32 elements: an f16 scale, then 32 bytes (q8_0) or 16 (tq4). Attention of tiles of rows
reads codes as f32 numbers, scale times code, which is exact; that of single rows multiplies whole numbers, and scales
the products. Queries are rounded for keys of codes, and rotated for rotated ones; rotated values add up to a rotated
result, which is turned back in the end (`rotate_kernel`).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import kv_codecs
from dasllama_torch.ops.kv_codecs import CODECS, KV_CODECS
from dasllama_torch.triton_kernels.launch import await_inputs, early, on_device, prefetch

Q8_0, TQ4 = tl.constexpr(KV_CODECS["q8_0"].id), tl.constexpr(KV_CODECS["tq4"].id)
F16_MAX = tl.constexpr(kv_codecs.F16_MAX)


@functools.cache
def signs(device: torch.device) -> Tensor:
    """What tq4 multiplies a head by before the transform, f32 [MOST_ROTATED]: a shorter head has the first of them."""
    with torch.inference_mode(False):  # the table outlives the call
        return kv_codecs._signs(torch.empty(kv_codecs.MOST_ROTATED)).to(device)


@triton.jit
def load_codes(at, there, n, NB: tl.constexpr, CODEC: tl.constexpr):
    """Heads of n blocks at pointers [N] -> whole numbers int32 [N, NB, 32] and scales f32 [N, NB], which are zero for
    what is not there. Blocks begin at even addresses, and so do the pairs that are read."""
    WORDS: tl.constexpr = 16 if CODEC == Q8_0 else 8
    b = tl.arange(0, NB)[None, :]
    place, live = at[:, None] + b * (2 * WORDS + 2), there[:, None] & (b < n)
    d = tl.load(place.to(tl.pointer_type(tl.float16)), mask=live, other=0.0).to(tl.float32)
    words = (place + 2).to(tl.pointer_type(tl.int16))[:, :, None] + tl.arange(0, WORDS)[None, None, :]
    w = tl.load(words, mask=live[:, :, None], other=0).to(tl.int32)
    if CODEC == Q8_0:
        codes = tl.join(w << 24 >> 24, w >> 8)
    else:
        codes = tl.join(tl.join(w & 15, w >> 8 & 15), tl.join(w >> 4 & 15, w >> 12 & 15)) - 8
    return tl.reshape(codes, [at.shape[0], NB, 32]), d


@triton.jit
def load(at, there, D, W: tl.constexpr, CODEC: tl.constexpr):
    """Heads of D elements at pointers [N] -> [N, W] as they enter products, f32 or f16; zeros where not there."""
    if CODEC == Q8_0 or CODEC == TQ4:
        codes, d = load_codes(at, there, tl.cdiv(D, 32), W // 32, CODEC)
        return tl.reshape(codes.to(tl.float32) * d[:, :, None], [at.shape[0], W])
    else:
        i = tl.arange(0, W)[None, :]
        return tl.load(at[:, None] + i, mask=there[:, None] & (i < D), other=0.0)


@triton.jit
def ask(at, rows, slot, mask):
    """`launch.prefetch` of rows of a cache that lie `slot` elements apart, from the pointer `at` on."""
    BYTES: tl.constexpr = at.dtype.element_ty.primitive_bitwidth // 8
    begin = at.to(tl.int64)
    end = begin + rows * slot * BYTES
    begin = (begin + 15) // 16 * 16
    prefetch(begin, ((end - begin) // 16 * 16).to(tl.int32), mask)


@triton.jit
def clamped(v):
    """Within f16's range; a NaN stays one."""
    return tl.where(v > F16_MAX, F16_MAX, tl.where(v < -F16_MAX, -F16_MAX, v))


@triton.jit
def hadamard(x, N: tl.constexpr):
    """The orthonormal Walsh-Hadamard transform of x f32 [N], stage by stage as in `ops.kv_codecs`."""
    sign = tl.arange(0, 2) * -2 + 1
    for stage in tl.static_range(10):
        if 2**stage < N:
            pairs = tl.reshape(x, [N // 2 ** (stage + 1), 2, 2**stage])
            plus, minus = tl.sum(pairs, 1), tl.sum(pairs * sign[None, :, None], 1)
            x = tl.reshape(tl.permute(tl.join(plus, minus), [0, 2, 1]), [N])
    return x * N**-0.5


@triton.jit
def _top(blocks):
    """The element of largest magnitude of each block f32 [B, 32], the first of equals, NaN above all."""
    i = tl.arange(0, 32)[None, :]
    bits = blocks.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    first = tl.min(tl.where(magnitude == tl.max(magnitude, 1)[:, None], i, 32), 1)
    return tl.sum(tl.where(i == first[:, None], bits, 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(d):
    return tl.where(d == 0, 0.0, tl.div_rn(tl.full([d.shape[0]], 1.0, tl.float32), d))


@triton.jit
def store(cache, x, signs, D, W: tl.constexpr, CODEC: tl.constexpr):
    """Write a head x, D elements at a pointer, as the codec keeps it. W: its width, a power of two or the next one."""
    i = tl.arange(0, W)
    v = clamped(tl.load(x + i, mask=i < D, other=0.0).to(tl.float32))
    if CODEC == TQ4:
        v = hadamard(v * tl.load(signs + i), W)
    B: tl.constexpr = W // 32
    blocks = tl.reshape(v, [B, 32])
    b, j = tl.arange(0, B), tl.arange(0, 32)[None, :]
    used = b * 32 < D
    if CODEC == Q8_0:
        top = _top(blocks)
        d = tl.div_rn(tl.abs(top), tl.full([B], 127.0, tl.float32))
        a = blocks * _inverse(d)[:, None]
        size = tl.abs(a)
        whole = tl.floor(size) + tl.floor(2.0 * (size - tl.floor(size)))
        q = tl.where(whole <= 127, tl.where(a < 0, -whole, whole), 0.0).to(tl.int32)
        tl.store(cache + (b * 34)[:, None] + 2 + j, (q & 255).to(tl.uint8), mask=used[:, None])
        tl.store((cache + b * 34).to(tl.pointer_type(tl.float16)), d.to(tl.float16), mask=used)
    else:
        blocks = tl.where(blocks > 8 * F16_MAX, 8 * F16_MAX, tl.where(blocks < -8 * F16_MAX, -8 * F16_MAX, blocks))
        d = _top(blocks) * -0.125
        q = blocks * _inverse(d)[:, None] + 8.5
        q = tl.where(q > 15.0, 15.0, tl.where(q >= 0.0, q, 0.0)).to(tl.int32)
        even, odd = tl.split(tl.reshape(q, [B, 16, 2]))
        half = tl.arange(0, 16)[None, :]
        tl.store(cache + (b * 18)[:, None] + 2 + half, (even | odd << 4).to(tl.uint8))
        tl.store((cache + b * 18).to(tl.pointer_type(tl.float16)), d.to(tl.float16))


@triton.jit
def query_kernel(
    out, scales, q, row, head, signs, H, D, width, W: tl.constexpr, CODEC: tl.constexpr, EARLY: tl.constexpr
):
    """Heads of q as they meet keys of codes, rotated for tq4 and rounded to blocks of 32 int8: f32 [T, H, width]; or,
    where `scales` are, whole numbers f16 and the scales f32 [T, H, width / 32]."""
    await_inputs(EARLY)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, W)
    v = tl.load(q + t * row + h * head + i, mask=i < D, other=0.0).to(tl.float32)
    if CODEC == TQ4:
        v = hadamard(v * tl.load(signs + i), W)
    B: tl.constexpr = W // 32
    blocks = tl.reshape(v, [B, 32])
    top = tl.abs(_top(blocks))
    inverse = tl.where(top == 0, 0.0, tl.div_rn(tl.full([B], 127.0, tl.float32), top))
    whole = (blocks * inverse[:, None] + 12582912.0) - 12582912.0  # to the nearest, halves to even
    scale = tl.div_rn(top, tl.full([B], 127.0, tl.float32))
    at = (t * H + h) * width
    if scales is None:
        tl.store(out + at + i, tl.reshape(whole * scale[:, None], [W]), mask=i < width)
    else:
        b = tl.arange(0, B)
        tl.store(out + at + i, tl.reshape(whole, [W]).to(tl.float16), mask=i < width)
        tl.store(scales + at // 32 + b, scale, mask=b * 32 < width)


@triton.jit
def rotate_kernel(out, x, signs, D, W: tl.constexpr, EARLY: tl.constexpr):
    """Heads x f32 [., W], rotated by tq4 -> [., D] as they were."""
    await_inputs(EARLY)
    at = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, W)
    v = hadamard(tl.load(x + at * W + i), W) * tl.load(signs + i)
    tl.store(out + at * D + i, v.to(out.dtype.element_ty), mask=i < D)


def is_even(cache: Tensor, codec: int) -> bool:
    """Whether the scales of blocks lie where a GPU can read them."""
    places = (cache.data_ptr(), *cache.stride()[:3])
    return not CODECS[codec].block_bytes or all(place % 2 == 0 for place in places)


def whole_width(codec: int, dim: int) -> int:
    """Elements that a codec keeps of a head, up to a power of two."""
    return triton.next_power_of_2(CODECS[codec].width(dim))


def queries(heads: Tensor, codec: int, whole: bool) -> tuple[Tensor, Tensor | None]:
    """heads [T, H, D], each contiguous, as they meet keys of the codec: [T, H, width], for codes, where `whole` is
    asked for, with the scales of whole numbers."""
    T, H, D = heads.shape
    if not CODECS[codec].block_bytes:
        return heads, None
    width = CODECS[codec].width(D)
    out = torch.empty((T, H, width), dtype=torch.float16 if whole else torch.float32, device=heads.device)
    scales = torch.empty((T, H, width // 32), dtype=torch.float32, device=heads.device) if whole else None
    if out.numel():
        with on_device(heads):
            # Products must round before 1.5 * 2^23 is added to them.
            query_kernel[(T, H)](
                out, scales, heads, heads.stride(0), heads.stride(1), signs(heads.device), H, D, width,
                whole_width(codec, D), codec, num_warps=1, enable_fp_fusion=False, **early(heads),
            )  # fmt: skip
    return out, scales


def turned_back(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Heads f32 [..., W], contiguous, rotated by tq4 -> [..., dim] in dtype."""
    W = x.shape[-1]
    out = torch.empty((*x.shape[:-1], dim), dtype=dtype, device=x.device)
    if out.numel():
        with on_device(x):
            rotate_kernel[(x.numel() // W,)](out, x, signs(x.device), dim, W, num_warps=1, **early(x))
    return out
