"""Floats to packed weights, for the load modes that requantize: types that gguf-py packs and that need no search."""

from collections.abc import Callable

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.registry import define
from dasllama_torch.ops.require import require


def _bytes(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _top(v: Tensor) -> Tensor:
    """[n, block] -> the element of largest magnitude of each block, the first of equals, [n, 1]."""
    return v.gather(1, v.abs().argmax(-1, keepdim=True))


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1.0 / d)


def pack_q8_0(v: Tensor) -> Tensor:
    """[n, 32] -> u8 [n, 34]: d = max|v| / 127, q = v / d with halves away from zero; what is no number or beyond int8
    becomes 0."""
    d = _top(v).abs() / 127.0
    a = v * _inverse(d)
    q = a.sign() * (a.abs().floor() + (2.0 * (a.abs() - a.abs().floor())).floor())
    q = torch.where(q.abs() <= 127, q, 0.0).to(torch.int8)
    return torch.cat([_bytes(d.half()), _bytes(q)], 1)


def round_to_nibbles(v: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 32] -> u8 [n, 32], codes of 4 bits, and the bytes of their scale f16, u8 [n, 2]: d = the element of largest
    magnitude / -8, q = v / d + 8 in [0, 15]."""
    d = _top(v) / -8.0
    q = (v * _inverse(d) + 8.5).clamp(0, 15).nan_to_num(nan=0.0).to(torch.uint8)  # the cast truncates
    return q, _bytes(d.half())


def _q4_0(v: Tensor) -> Tensor:
    q, d = round_to_nibbles(v)
    return torch.cat([d, q[:, :16] | q[:, 16:] << 4], 1)


def _bf16(v: Tensor) -> Tensor:
    """Round to nearest even; a NaN keeps its upper bits."""
    bits = v.contiguous().view(torch.int32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return _bytes(torch.where(v.isnan(), bits >> 16 | 64, rounded).to(torch.int16))


_QUANTIZERS: dict[int, Callable[[Tensor], Tensor]] = {
    ggml_types.F32: _bytes,
    ggml_types.F16: lambda v: _bytes(v.half()),
    ggml_types.BF16: _bf16,
    ggml_types.Q4_0: _q4_0,
    ggml_types.Q8_0: pack_q8_0,
}


def _row_bytes(x: Tensor, qtype: int) -> int:
    require(
        qtype in _QUANTIZERS,
        lambda: (
            f"dasllama::quantize: cannot pack to type "
            f"{ggml_types.GGML_TYPES[qtype].name if qtype in ggml_types.GGML_TYPES else qtype}; "
            f"possible: {', '.join(ggml_types.GGML_TYPES[known].name for known in _QUANTIZERS)}"
        ),
    )
    row = ggml_types.GGML_TYPES[qtype]
    require(
        x.dtype == torch.float32 and x.dim() >= 1 and x.shape[-1] % row.block == 0,
        lambda: (
            f"dasllama::quantize: x must be float32 [..., a multiple of {row.block}] for {row.name}, "
            f"found {x.dtype} {list(x.shape)}"
        ),
    )
    return row.row_bytes(x.shape[-1])


def _fake(x: Tensor, qtype: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], _row_bytes(x, qtype)), dtype=torch.uint8)


@define(fake=_fake)
def quantize(x: Tensor, qtype: int) -> Tensor:
    """x f32 [..., K] -> u8 [..., row_bytes] of type F32, F16, BF16, Q4_0 or Q8_0, bit for bit what gguf-py gives.

    Other types raise by name: they need a search for good scales. K must be a multiple of the type's block.
    """
    size = _row_bytes(x, qtype)
    packed = _QUANTIZERS[qtype](x.reshape(-1, ggml_types.GGML_TYPES[qtype].block))
    return packed.view(*x.shape[:-1], size)
