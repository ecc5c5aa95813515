"""The forms to which ggml rounds an activation before it multiplies with packed weights, and the op that rounds.

A lattice is named by the id of its type, `ggml_types.GGMLType.lattice` of the weight's type. Rules are those of ggml's
CPU backend on x86 (ggml-cpu/arch/x86/quants.c: quantize_row_q8_0 and _q8_1; ggml-quants.c: quantize_row_q8_K_ref), to
the bit wherever ggml's result is defined. Blocks, little-endian:

    Q8_0  32 elements, 34 bytes: f16 d, int8 q[32]                    x ~ d * q
    Q8_1  32 elements, 36 bytes: f16 d, f16 s = d * sum(q), int8 q[32]
    Q8_K  256 elements, 292 bytes: f32 d, int8 q[256], int16 sums of 16 q each

A block that holds a NaN or an infinity gets a d that is not finite, so that the fault shows in every product with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.registry import define
from dasllama_torch.ops.require import require

_FLOAT_LATTICES = {ggml_types.F32: torch.float32, ggml_types.F16: torch.float16, ggml_types.BF16: torch.bfloat16}
LATTICES = (*_FLOAT_LATTICES, ggml_types.Q8_0, ggml_types.Q8_1, ggml_types.Q8_K)
FLOATS = tuple(_FLOAT_LATTICES.values())  # dtypes of activations


def _check(x: Tensor, lattice: int) -> None:
    require(lattice in LATTICES, lambda: f"dasllama::quantize_activation: type {lattice} is not a lattice")
    block = ggml_types.GGML_TYPES[lattice].block
    require(
        x.dtype in FLOATS and x.dim() >= 1 and x.shape[-1] % block == 0,
        lambda: (
            f"dasllama::quantize_activation: x must be f32, f16 or bf16 [..., a multiple of {block}], "
            f"found {x.dtype} {list(x.shape)}"
        ),
    )


def _fake(x: Tensor, lattice: int) -> Tensor:
    _check(x, lattice)
    if lattice in _FLOAT_LATTICES:
        return x.new_empty(x.shape, dtype=_FLOAT_LATTICES[lattice])
    return x.new_empty((*x.shape[:-1], ggml_types.GGML_TYPES[lattice].row_bytes(x.shape[-1])), dtype=torch.uint8)


@define(fake=_fake)
def quantize_activation(x: Tensor, lattice: int) -> Tensor:
    """x floating [..., K] -> u8 [..., row_bytes] blocks for Q8_0, Q8_1 and Q8_K; f32, f16 or bf16 [..., K] for a float.

    lattice: id of F32, F16, BF16, Q8_0, Q8_1 or Q8_K. K must be a multiple of the lattice's block.
    """
    _check(x, lattice)
    if lattice in _FLOAT_LATTICES:
        return x.to(_FLOAT_LATTICES[lattice], memory_format=torch.contiguous_format, copy=True)
    row = ggml_types.GGML_TYPES[lattice]
    v = x.float().reshape(-1, row.block)
    # Magnitudes compare as integers, where NaN is above all numbers; of equal ones the first decides the sign in Q8_K.
    at = (v.contiguous().view(torch.int32) & 0x7FFFFFFF).argmax(-1, keepdim=True)
    top = v.gather(1, at)
    full = torch.full_like(top, 127.0)  # a Python number over a tensor would be a reciprocal and a product
    if lattice == ggml_types.Q8_K:
        inverse = torch.where(top == 0, 0.0, -full / top)
        q = _nearest(v * inverse)
        d = torch.where(top == 0, 0.0, 1.0 / inverse)
        parts = [_bytes(d), q, _bytes(q.view(-1, 16, 16).sum(-1, dtype=torch.int16))]
    else:
        d = top.abs() / 127.0
        q = _nearest(v * torch.where(top == 0, 0.0, full / top.abs()))
        parts = [_bytes(d.half()), q]
        if lattice == ggml_types.Q8_1:
            parts.insert(1, _bytes((d * q.sum(-1, keepdim=True, dtype=torch.int32).float()).half()))
    out = torch.cat([part.view(torch.uint8) for part in parts], 1)
    return out.view(*x.shape[:-1], row.row_bytes(x.shape[-1]))


def _nearest(v: Tensor) -> Tensor:
    """f32 -> int8, halves to even; what is not in [-127, 127] (NaN, infinities from a subnormal top) becomes 0."""
    q = v.round()
    return torch.where(q.abs() <= 127, q, 0.0).to(torch.int8)


def _bytes(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Activation(NamedTuple):
    """Rows of one integer lattice, taken apart; n blocks of `block` elements per row."""

    q: Tensor  # int32 [M, n, block]
    d: Tensor  # f32 [M, n]
    s: Tensor | None  # Q8_1: f32 [M, n]
    sums: Tensor | None  # Q8_K: int32 [M, n, 16]


def unpack_activation(lattice: int, rows: Tensor) -> Activation:
    """u8 [M, row_bytes] of `quantize_activation` on Q8_0, Q8_1 or Q8_K -> integers and scales."""
    row = ggml_types.GGML_TYPES[lattice]
    b = rows.view(rows.shape[0], rows.shape[1] // row.bytes, row.bytes)
    floats = 4 if lattice != ggml_types.Q8_0 else 2
    q = b[:, :, floats : floats + row.block].contiguous().view(torch.int8).int()

    def read(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return b[:, :, start:stop].clone(memory_format=torch.contiguous_format).view(dtype)

    if lattice == ggml_types.Q8_K:
        return Activation(q, read(0, 4, torch.float32)[..., 0], None, read(260, 292, torch.int16).int())
    d = read(0, 2, torch.float16)[..., 0].float()
    s = read(2, 4, torch.float16)[..., 0].float() if lattice == ggml_types.Q8_1 else None
    return Activation(q, d, s, None)
