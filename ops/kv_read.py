"""Reading keys or values back out of a paged cache, whatever its codec: to look at them."""

import torch
from torch import Tensor

from dasllama_torch.ops.kv_codecs import CODECS
from dasllama_torch.ops.kv_write import check_slots
from dasllama_torch.ops.registry import define


def _fake(cache, slots, codec, dim):
    return cache.new_empty((slots.shape[0], cache.shape[1], dim), dtype=torch.float32)


@define(fake=_fake)
def kv_read(cache: Tensor, slots: Tensor, codec: int, dim: int) -> Tensor:
    """Heads of `dim` elements at slots int64 [T] of a cache [P, G, R, row] -> f32 [T, G, dim].

    codec: id of `kv_codecs.KV_CODECS`. A slot is page * R + row as in `kv_write`; -1 yields zeros. Attention does not
    use this: it reads the codes. A slot outside of the cache raises.
    """
    P, _, R, _ = cache.shape
    check_slots("kv_read", slots, P, R)
    live = slots >= 0
    heads = CODECS[codec].load(cache[slots[live] // R, :, slots[live] % R], dim)
    out = heads.new_zeros((slots.shape[0], *heads.shape[1:]))
    out[live] = heads
    return out
