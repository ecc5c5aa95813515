"""Tables of the rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from torch import Tensor

from dasllama_torch.ops.registry import define


def _fake(positions, inv_freq, scale):
    shape = (positions.shape[0], inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@define(fake=_fake)
def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of positions int32 or int64 [T] times inv_freq f32 [R/2], times scale -> two f32 [T, R/2].

    scale is YaRN's attention factor, 1.0 without. The angle is an f32 product of f32(position) and the frequency, as in
    transformers; cosine and sine of it are exact before they are rounded to f32, also at large positions.
    """
    angle = (positions.float()[:, None] * inv_freq).double()
    return angle.cos().float() * scale, angle.sin().float() * scale
