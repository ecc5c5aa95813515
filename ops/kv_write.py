"""Writing keys and values into a paged cache."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import Cost, define, refuse_gradient


def _cost(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Cost:
    written = k.numel() * k_cache.element_size() + v.numel() * v_cache.element_size()
    return Cost(k.nbytes + v.nbytes + written, 0, " x ".join(map(str, k.shape)))


@define(
    fake=lambda k, v, k_cache, v_cache, slots: None,
    mutates=("k_cache", "v_cache"),
    cost=_cost,
    touches=lambda args: args["slots"].div(args["k_cache"].shape[2], rounding_mode="floor"),
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write row t of k [..., G, D] and v [..., G, Dv] into k_cache [P, G, R, D] and v_cache [P, G, R, Dv], f32 or f16.

    slots int64 [T], T the product of the leading dims: page * R + row, or -1 for a row that is not written. The others
    must differ from each other. An f16 cache takes values beyond its range as +-65504. A slot outside of the cache
    raises and writes nothing.
    """
    P, _, R, _ = k_cache.shape
    if ((slots < -1) | (slots >= P * R)).any():
        raise ValueError(f"dasllama::kv_write: slots must be -1 (skip) or less than {P * R} ({P} pages of {R} rows)")
    live = slots >= 0
    page, row = slots[live] // R, slots[live] % R
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = x.reshape(slots.shape[0], *x.shape[-2:])[live]
        if cache.dtype == torch.float16:
            rows = rows.float().clamp(-65504, 65504)
        cache[page, :, row] = rows.to(cache.dtype)


refuse_gradient(kv_write, "dasllama::attention takes keys and values directly and has a gradient")
