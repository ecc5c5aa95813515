"""Rows of a packed table, dequantized."""

import torch
from torch import Tensor

from dasllama_torch.ops.dequantize import dequantize, matrix_shape
from dasllama_torch.ops.ggml_types import GGML_TYPES
from dasllama_torch.ops.registry import Cost, define
from dasllama_torch.ops.require import require


def _check(ids: Tensor, qweight: Tensor, qtype: int) -> tuple[int, int]:
    require(
        ids.dtype in (torch.int64, torch.int32) and ids.device == qweight.device,
        lambda: (
            f"dasllama::embedding: ids must be int64 or int32 on {qweight.device} like qweight, "
            f"found {ids.dtype} on {ids.device}"
        ),
    )
    return matrix_shape("embedding", qweight, qtype)


def _fake(ids: Tensor, qweight: Tensor, qtype: int, scale: float) -> Tensor:
    return ids.new_empty((*ids.shape, _check(ids, qweight, qtype)[1]), dtype=torch.float32)


def _cost(ids: Tensor, qweight: Tensor, qtype: int, scale: float) -> Cost:
    V, C = _check(ids, qweight, qtype)
    return Cost(ids.numel() * (qweight.nbytes // V + 4 * C), 0, f"{ids.numel()} x {C} {GGML_TYPES[qtype].name}")


@define(fake=_fake, cost=_cost)
def embedding(ids: Tensor, qweight: Tensor, qtype: int, scale: float) -> Tensor:
    """ids int64 or int32 [...], qweight u8 [V, row_bytes] of type qtype -> f32 [..., C]: dequantized rows times scale.

    The product is one f32 multiplication; scale 1.0 leaves rows exact. An id outside [0, V) raises.
    """
    V, C = _check(ids, qweight, qtype)
    flat = ids.reshape(-1).long()
    for bad in flat[(flat < 0) | (flat >= V)][:1].tolist():
        raise RuntimeError(f"dasllama::embedding: id {bad} is outside the table of {V} rows")
    return (dequantize.reference(qweight[flat], qtype) * scale).view(*ids.shape, C)
