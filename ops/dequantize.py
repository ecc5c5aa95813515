"""Packed weights to floats."""

import torch
from torch import Tensor

from dasllama_torch.ops import blocks, ggml_types
from dasllama_torch.ops.registry import define
from dasllama_torch.ops.require import require


def row_length(op: str, qweight: Tensor, qtype: int) -> int:
    """Elements per row of qweight u8 [..., row_bytes]; raises what every op raises for a wrong dtype, rank or size."""
    row = ggml_types.GGML_TYPES.get(qtype)
    require(
        row is not None and row.is_weight,
        lambda: f"dasllama::{op}: qtype {qtype} {'is unknown' if row is None else f'({row.name}) is no weight type'}",
    )
    require(
        qweight.dtype == torch.uint8 and qweight.dim() >= 1 and qweight.shape[-1] % row.bytes == 0,
        lambda: (
            f"dasllama::{op}: qweight must be uint8 [..., a multiple of {row.bytes}] for {row.name}, "
            f"found {qweight.dtype} {list(qweight.shape)}"
        ),
    )
    return qweight.shape[-1] // row.bytes * row.block


def matrix_shape(op: str, qweight: Tensor, qtype: int) -> tuple[int, int]:
    """(N, K) of a packed matrix [N, row_bytes], which ops address in place: it must be contiguous. Raises likewise."""
    K = row_length(op, qweight, qtype)
    require(
        qweight.dim() == 2 and qweight.is_contiguous(),
        lambda: (
            f"dasllama::{op}: qweight must be a contiguous [N, row_bytes], "
            f"found {'' if qweight.is_contiguous() else 'strided '}{list(qweight.shape)}"
        ),
    )
    return qweight.shape[0], K


def _fake(qweight: Tensor, qtype: int) -> Tensor:
    return qweight.new_empty((*qweight.shape[:-1], row_length("dequantize", qweight, qtype)), dtype=torch.float32)


@define(fake=_fake)
def dequantize(qweight: Tensor, qtype: int) -> Tensor:
    """qweight u8 [..., row_bytes] of a weight type -> f32 [..., K], bit for bit what gguf-py gives."""
    K = row_length("dequantize", qweight, qtype)
    rows = qweight.reshape(-1, ggml_types.GGML_TYPES[qtype].bytes)
    return blocks.dequantize_blocks(qtype, rows).view(*qweight.shape[:-1], K)
