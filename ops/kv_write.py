"""Writing keys and values into a paged cache."""

from torch import Tensor

from dasllama_torch.ops.kv_codecs import CODECS
from dasllama_torch.ops.registry import Cost, define, refuse_gradient


def check_slots(op: str, slots: Tensor, pages: int, rows: int) -> None:
    """Each slot must be -1 or in one of the pages."""
    if ((slots < -1) | (slots >= pages * rows)).any():
        raise ValueError(
            f"dasllama::{op}: slots must be -1 (skip) or less than {pages * rows} ({pages} pages of {rows} rows)"
        )


def _cost(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_codec: int, v_codec: int
) -> Cost:  # fmt: skip
    heads = slots.numel() * k_cache.shape[1]
    written = sum(heads * cache.shape[3] * cache.element_size() for cache in (k_cache, v_cache))
    return Cost(k.nbytes + v.nbytes + written, 0, " x ".join(map(str, k.shape)))


@define(
    fake=lambda k, v, k_cache, v_cache, slots, k_codec, v_codec: None,
    mutates=("k_cache", "v_cache"),
    cost=_cost,
    touches=lambda args: args["slots"].div(args["k_cache"].shape[2], rounding_mode="floor"),
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_codec: int, v_codec: int) -> None:
    """Write row t of k [..., G, D] and v [..., G, Dv] into k_cache [P, G, R, row of D], v_cache [P, G, R, row of Dv].

    k_codec, v_codec: ids of `kv_codecs.KV_CODECS`, which say the caches' dtypes and rows, and how values are rounded.
    slots int64 [T], T the product of the leading dims: page * R + row, or -1 for a row that is not written. The others
    must differ from each other. A slot outside of the cache raises and writes nothing.
    """
    P, _, R, _ = k_cache.shape
    check_slots("kv_write", slots, P, R)
    live = slots >= 0
    page, row = slots[live] // R, slots[live] % R
    for x, cache, codec in ((k, k_cache, k_codec), (v, v_cache, v_codec)):
        cache[page, :, row] = CODECS[codec].store(x.reshape(slots.shape[0], *x.shape[-2:])[live])


refuse_gradient(kv_write, "dasllama::attention takes keys and values directly and has a gradient")
