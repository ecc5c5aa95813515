"""Decoding of packed weights in torch: one function per type, the only place in Python where a type is decoded.

Every packed type is an integer times scales: element = (d * scale) * q - dmin * min, or d * q + m, where q, scale and
min are integers and d, dmin and m floats shared by many elements (`Parts`). Constants of a type's definition such as
1/8 are powers of two and are folded into d, which is exact. Layouts: block structs of ggml-common.h (llama.cpp) and
`gguf.quants` of gguf-py, whose results these equal bit for bit. The C++ twin is csrc/blocks.h.

n blocks; all integers are int32 tensors, all floats f32, on the device of the input.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dasllama_torch.ops import codebooks, ggml_types


class Parts(NamedTuple):
    """n decoded blocks. scale, min and d have one column per equal group of a block's elements; None: 1, 0 and 0."""

    q: Tensor  # int32 [n, block]
    d: Tensor  # f32 [n, 1], for NVFP4 [n, 4]
    scale: Tensor | None = None  # int32 [n, groups]
    dmin: Tensor | None = None  # f32 [n, 1], subtracted times min
    min: Tensor | None = None  # int32 [n, groups]
    m: Tensor | None = None  # f32 [n, 1], added


_DECODERS: dict[int, Callable[[Tensor], Parts]] = {}


def _decodes(qtype: int):
    def register(function):
        _DECODERS[qtype] = function
        return function

    return register


def unpack_blocks(qtype: int, blocks: Tensor) -> Parts:
    """u8 [n, bytes] of a packed type -> its integers and scales."""
    return _DECODERS[qtype](blocks.to(torch.int32))


def dequantize_blocks(qtype: int, blocks: Tensor) -> Tensor:
    """u8 [n, bytes] of a weight type -> f32 [n, block]; for F32, F16 and BF16 a block is one element."""
    if qtype == ggml_types.F32:
        return _word(blocks.to(torch.int32), 4).view(torch.float32)
    if qtype == ggml_types.F16:
        return _f16(blocks.to(torch.int32), 0)
    if qtype == ggml_types.BF16:
        return (_word(blocks.to(torch.int32), 2) << 16).view(torch.float32)
    parts = unpack_blocks(qtype, blocks)
    d = parts.d if parts.scale is None else parts.d * parts.scale.float()
    y = d[:, :, None] * parts.q.float().unflatten(1, (d.shape[1], -1))
    if parts.min is not None:
        y = y - (parts.dmin * parts.min.float())[:, :, None]
    if parts.m is not None:
        y = y + parts.m[:, :, None]
    return y.flatten(1)


# ---- bytes to integers and floats -----------------------------------------------------------------------------------


def _word(b: Tensor, size: int) -> Tensor:
    """Bytes [n, L] as int32 -> little-endian words of `size` bytes, int32 [n, L / size]."""
    return functools.reduce(torch.bitwise_or, (b[:, i::size] << 8 * i for i in range(size)))


def _half(bits: Tensor) -> Tensor:
    """The low 16 bits of each int32, read as f16 -> f32."""
    return bits.to(torch.int16).view(torch.float16).float()


def _f16(b: Tensor, at: int) -> Tensor:
    """The f16 in bytes at and at + 1 -> f32 [n, 1]."""
    return _half(_word(b[:, at : at + 2], 2))


def _int8(b: Tensor) -> Tensor:
    return (b ^ 128) - 128


def _range(stop: int, step: int, b: Tensor) -> Tensor:
    return torch.arange(0, stop, step, dtype=torch.int32, device=b.device)


def _fields(b: Tensor, width: int, bits: int) -> Tensor:
    """Bytes [n, L] -> their fields of `bits` bits, int32 [n, 8 L / bits].

    `width` bytes go together: first the lowest field of each of them, then the next higher one of each, and so on.
    """
    planes = b.unflatten(1, (-1, 1, width)) >> _range(8, bits, b).view(1, 1, -1, 1)
    return (planes & (1 << bits) - 1).flatten(1)


@functools.cache
def _table(name: str, device: torch.device) -> Tensor:
    """A codebook of `codebooks` as int32 tensor, [points, length] for a grid."""
    entry = getattr(codebooks, name)
    values = entry.points() if isinstance(entry, codebooks.Grid) else entry
    with torch.inference_mode(False):  # the table outlives the call
        return torch.tensor(values, dtype=torch.int32, device=device)


def _lookup(name: str, index: Tensor) -> Tensor:
    """Entries of a codebook for int32 [n, L] -> [n, L], or for a grid [n, L * length]."""
    return _table(name, index.device)[index].flatten(1)


def _signs(bits: Tensor) -> Tensor:
    """0 or 1 -> 1 or -1."""
    return 1 - 2 * bits


def _even_signs(index: Tensor) -> Tensor:
    """Seven sign bits each, int32 [n, L] -> signs [n, 8 L]; the eighth makes the number of minuses even."""
    seven = index[:, :, None] >> _range(7, 1, index) & 1
    return _signs(torch.cat([seven, seven.sum(-1, keepdim=True, dtype=torch.int32) & 1], -1)).flatten(1)


# ---- blocks of 32 with one scale, and their kin ---------------------------------------------------------------------


@_decodes(ggml_types.Q4_0)
def _q4_0(b: Tensor) -> Parts:
    return Parts(_fields(b[:, 2:], 16, 4) - 8, _f16(b, 0))


@_decodes(ggml_types.Q4_1)
def _q4_1(b: Tensor) -> Parts:
    return Parts(_fields(b[:, 4:], 16, 4), _f16(b, 0), m=_f16(b, 2))


@_decodes(ggml_types.Q5_0)
def _q5_0(b: Tensor) -> Parts:
    return Parts((_fields(b[:, 6:], 16, 4) | _fields(b[:, 2:6], 1, 1) << 4) - 16, _f16(b, 0))


@_decodes(ggml_types.Q5_1)
def _q5_1(b: Tensor) -> Parts:
    return Parts(_fields(b[:, 8:], 16, 4) | _fields(b[:, 4:8], 1, 1) << 4, _f16(b, 0), m=_f16(b, 2))


@_decodes(ggml_types.Q8_0)
def _q8_0(b: Tensor) -> Parts:
    return Parts(_int8(b[:, 2:]), _f16(b, 0))


@_decodes(ggml_types.Q1_0)
def _q1_0(b: Tensor) -> Parts:
    return Parts(2 * _fields(b[:, 2:], 1, 1) - 1, _f16(b, 0))


@_decodes(ggml_types.Q2_0)
def _q2_0(b: Tensor) -> Parts:
    return Parts(_fields(b[:, 2:], 1, 2) - 1, _f16(b, 0))


@_decodes(ggml_types.IQ4_NL)
def _iq4_nl(b: Tensor) -> Parts:
    return Parts(_lookup("IQ4_VALUES", _fields(b[:, 2:], 16, 4)), _f16(b, 0))


@_decodes(ggml_types.MXFP4)
def _mxfp4(b: Tensor) -> Parts:
    """The scale is a power of two, e8m0: 2^(e - 127), halved because FP4_VALUES are doubled.

    As in ggml all 256 exponents are numbers: 0 and 1 give subnormals, 255 gives 2^127 (the OCP standard has NaN there).
    """
    e = b[:, :1]
    d = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    return Parts(_lookup("FP4_VALUES", _fields(b[:, 1:], 16, 4)), d)


@_decodes(ggml_types.NVFP4)
def _nvfp4(b: Tensor) -> Parts:
    """One scale per 16 elements: e4m3 without its sign bit, halved because FP4_VALUES are doubled; 0x7F gives 0."""
    e, mantissa = b[:, :4] >> 3 & 15, (b[:, :4] & 7).float()
    power = (e + 119 << 23).view(torch.float32)  # 2^(e - 8)
    d = torch.where(e == 0, mantissa * 2.0**-10, (1.0 + mantissa / 8.0) * power)
    return Parts(_lookup("FP4_VALUES", _fields(b[:, 4:], 8, 4)), torch.where(b[:, :4] == 0x7F, 0.0, d))


# ---- super-blocks of 256 with integer scales ------------------------------------------------------------------------


@_decodes(ggml_types.Q2_K)
def _q2_k(b: Tensor) -> Parts:
    return Parts(_fields(b[:, 16:80], 32, 2), _f16(b, 80), b[:, :16] & 15, dmin=_f16(b, 82), min=b[:, :16] >> 4)


@_decodes(ggml_types.Q3_K)
def _q3_k(b: Tensor) -> Parts:
    q = (_fields(b[:, 32:96], 32, 2) | _fields(b[:, :32], 32, 1) << 2) - 4
    scale = (_fields(b[:, 96:104], 8, 4) | _fields(b[:, 104:108], 4, 2) << 4) - 32
    return Parts(q, _f16(b, 108), scale)


def _six_bit(b: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> 8 scales and 8 mins of 6 bits."""
    low, mid, high = b[:, :4], b[:, 4:8], b[:, 8:12]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1)
    return scale, torch.cat([mid & 63, (high >> 4) | (mid >> 6) << 4], 1)


@_decodes(ggml_types.Q4_K)
def _q4_k(b: Tensor) -> Parts:
    scale, low = _six_bit(b[:, 4:16])
    return Parts(_fields(b[:, 16:], 32, 4), _f16(b, 0), scale, dmin=_f16(b, 2), min=low)


@_decodes(ggml_types.Q5_K)
def _q5_k(b: Tensor) -> Parts:
    scale, low = _six_bit(b[:, 4:16])
    q = _fields(b[:, 48:], 32, 4) | _fields(b[:, 16:48], 32, 1) << 4
    return Parts(q, _f16(b, 0), scale, dmin=_f16(b, 2), min=low)


@_decodes(ggml_types.Q6_K)
def _q6_k(b: Tensor) -> Parts:
    q = (_fields(b[:, :128], 64, 4) | _fields(b[:, 128:192], 32, 2) << 4) - 32
    return Parts(q, _f16(b, 208), _int8(b[:, 192:208]))


@_decodes(ggml_types.IQ4_XS)
def _iq4_xs(b: Tensor) -> Parts:
    scale = (_fields(b[:, 4:8], 1, 4) | _fields(b[:, 2:4], 1, 2) << 4) - 32
    return Parts(_lookup("IQ4_VALUES", _fields(b[:, 8:], 16, 4)), _f16(b, 0), scale)


@_decodes(ggml_types.TQ1_0)
def _tq1_0(b: Tensor) -> Parts:
    """Five ternary digits per byte as a fraction of 256: digit i is floor(3 * frac(byte * 3^i / 256))."""

    def digits(part: Tensor, width: int, count: int) -> Tensor:
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.int32, device=b.device).view(1, 1, -1, 1)
        return ((part.unflatten(1, (-1, 1, width)) * powers & 255) * 3 >> 8).flatten(1)

    q = torch.cat([digits(b[:, :32], 32, 5), digits(b[:, 32:48], 16, 5), digits(b[:, 48:52], 4, 4)], 1)
    return Parts(q - 1, _f16(b, 52))


@_decodes(ggml_types.TQ2_0)
def _tq2_0(b: Tensor) -> Parts:
    return Parts(_fields(b[:, :64], 32, 2) - 1, _f16(b, 64))


# ---- super-blocks of grid points. The scale is (2 s + 1) / 8 or so: the fraction goes into d. -----------------------


@_decodes(ggml_types.IQ2_XXS)
def _iq2_xxs(b: Tensor) -> Parts:
    """Per 32 elements: four grid indices, then four times 7 sign bits and 4 bits of scale."""
    groups = b[:, 2:].unflatten(1, (8, 8))
    word = _word(groups[:, :, 4:].flatten(1), 4)
    signs = _even_signs((word[:, :, None] >> _range(28, 7, b) & 127).flatten(1))
    q = _lookup("IQ2_XXS_GRID", groups[:, :, :4].flatten(1)) * signs
    return Parts(q, _f16(b, 0) * 0.125, 2 * (word >> 28 & 15) + 1)


@_decodes(ggml_types.IQ2_XS)
def _iq2_xs(b: Tensor) -> Parts:
    word = _word(b[:, 2:66], 2)
    q = _lookup("IQ2_XS_GRID", word & 511) * _even_signs(word >> 9)
    return Parts(q, _f16(b, 0) * 0.125, 2 * _fields(b[:, 66:], 1, 4) + 1)


@_decodes(ggml_types.IQ2_S)
def _iq2_s(b: Tensor) -> Parts:
    index = b[:, 2:34] | _fields(b[:, 66:74], 1, 2) << 8
    q = _lookup("IQ2_S_GRID", index) * _signs(_fields(b[:, 34:66], 1, 1))
    return Parts(q, _f16(b, 0) * 0.125, 2 * _fields(b[:, 74:], 1, 4) + 1)


@_decodes(ggml_types.IQ3_XXS)
def _iq3_xxs(b: Tensor) -> Parts:
    word = _word(b[:, 66:], 4)
    signs = _even_signs((word[:, :, None] >> _range(28, 7, b) & 127).flatten(1))
    return Parts(_lookup("IQ3_XXS_GRID", b[:, 2:66]) * signs, _f16(b, 0) * 0.25, 2 * (word >> 28 & 15) + 1)


@_decodes(ggml_types.IQ3_S)
def _iq3_s(b: Tensor) -> Parts:
    index = b[:, 2:66] | _fields(b[:, 66:74], 1, 1) << 8
    q = _lookup("IQ3_S_GRID", index) * _signs(_fields(b[:, 74:106], 1, 1))
    return Parts(q, _f16(b, 0), 2 * _fields(b[:, 106:], 1, 4) + 1)


@_decodes(ggml_types.IQ1_S)
def _iq1_s(b: Tensor) -> Parts:
    """Elements are scale * (point +- 1/8), kept as eighths: q = 8 * point +- 1."""
    word = _word(b[:, 34:], 2)
    index = b[:, 2:34] | (word[:, :, None] >> _range(12, 3, b) & 7).flatten(1) << 8
    delta = _signs(word >> 15).repeat_interleave(32, 1)
    return Parts(8 * _lookup("IQ1_S_GRID", index) + delta, _f16(b, 0) * 0.125, 2 * (word >> 12 & 7) + 1)


@_decodes(ggml_types.IQ1_M)
def _iq1_m(b: Tensor) -> Parts:
    """As IQ1_S, with a delta per 8 and a scale per 16 elements; d is spread over the top nibbles of the scale words."""
    word = _word(b[:, 48:], 2)
    d = _half(functools.reduce(torch.bitwise_or, (word[:, i : i + 1] >> 12 << 4 * i for i in range(4))))
    high = _fields(b[:, 32:48], 1, 4)
    points = _lookup("IQ1_S_GRID", b[:, :32] | (high & 7) << 8)
    delta = _signs(high >> 3).repeat_interleave(8, 1)
    return Parts(8 * points + delta, d * 0.125, 2 * (word[:, :, None] >> _range(12, 3, b) & 7).flatten(1) + 1)
