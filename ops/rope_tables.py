"""Tables of the rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define


def _fake(positions, inv_freq, scale, axes=None):
    shape = (positions.shape[0], inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@define(fake=_fake)
def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of positions int32 or int64 [T] times inv_freq f32 [R/2], times scale -> two f32 [T, R/2].

    scale is YaRN's attention factor, 1.0 without. The angle is an f32 product of f32(position) and the frequency, as in
    transformers; cosine and sine of it are exact before they are rounded to f32, also at large positions.
    axes: int32 [R/2], for rows that have several positions (M-RoPE, Wang et al. 2024, arXiv:2409.12191): frequency i
    turns with positions[:, axes[i]] of positions [T, A]. Positions [T] stand for rows whose positions are all equal.
    """
    rows = positions.float()
    if positions.dim() == 1:
        rows = rows[:, None]
    elif axes is None or ((axes < 0) | (axes >= positions.shape[1])).any():
        raise ValueError(
            f"dasllama::rope_tables: positions {list(positions.shape)} need axes [R / 2] below {positions.shape[1]}"
        )
    else:
        rows = rows[:, axes.long()]
    angle = (rows * inv_freq).double()
    return angle.cos().float() * scale, angle.sin().float() * scale


def _long_fake(positions, lengths, short, long, original, scale):
    shape = (positions.shape[0], short.shape[0])
    return short.new_empty(shape), short.new_empty(shape)


@define(fake=_long_fake)
def long_rope_tables(
    positions: Tensor, lengths: Tensor, short: Tensor, long: Tensor, original: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The tables of `rope_tables` where a row's frequencies, f32 [R/2], are `long` if lengths[t] > original and else
    `short` (LongRoPE, Ding et al. 2024, arXiv:2402.13753). positions and lengths: int32 or int64 [T].
    """
    inv_freq = torch.where(lengths[:, None] > original, long, short)
    angle = (positions.float()[:, None] * inv_freq).double()
    return angle.cos().float() * scale, angle.sin().float() * scale
