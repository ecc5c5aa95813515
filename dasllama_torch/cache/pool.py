"""KVPool: the keys and values of all layers, in pages that sessions take on demand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.cache.memory import reserve
from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.config import CacheSpec

KV_DTYPES = {"f32": torch.float32, "f16": torch.float16}


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache. k [P, G, R, Dk], v [P, G, R, Dv]: within a page, the rows of a head lie together."""

    k: Tensor
    v: Tensor


class KVPool:
    """Pages of `page_rows` tokens. A page number stands for that page of every layer, K and V.

    layers: what each layer keeps, None for nothing. kv_dtype: "f16" (stores clamp to +-65504) or "f32". n_pages: the
    most it may hold; on the CPU a page costs memory only once it has been written. `pool[i]` is the cache of layer i.
    Not thread-safe.
    """

    def __init__(self, layers: list[CacheSpec | None], kv_dtype: str, n_pages: int, device, page_rows: int = 64):
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {kv_dtype!r} is unknown, wanted one of {', '.join(KV_DTYPES)}")
        self.kv_dtype, self.page_rows, self.device = kv_dtype, page_rows, torch.device(device)
        self.pages = PageAllocator(n_pages)
        # Caches must not be inference tensors, whatever mode the caller is in: a gradient may read them later.
        with torch.inference_mode(False):
            self._layers = [spec and self._make(spec, n_pages) for spec in layers]

    @classmethod
    def sized(
        cls, layers: list[CacheSpec | None], kv_dtype: str, max_bytes: int, device, page_rows: int = 64
    ) -> "KVPool":
        """The pool with as many pages as fit in max_bytes. On the CPU that reserves address space, not memory."""
        probe = cls(layers, kv_dtype, 1, device, page_rows)
        return cls(layers, kv_dtype, max(1, max_bytes // probe.page_bytes), device, page_rows)

    def _make(self, spec: CacheSpec, n_pages: int) -> PagedKV:
        def tensor(dim: int) -> Tensor:
            shape = (n_pages, spec.n_kv_heads, self.page_rows, dim)
            dtype = KV_DTYPES[self.kv_dtype]
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=self.device)
            return reserve(n_pages * spec.n_kv_heads * self.page_rows * dim * dtype.itemsize).view(dtype).view(shape)

        return PagedKV(tensor(spec.k_dim), tensor(spec.v_dim))

    def __getitem__(self, layer: int) -> PagedKV | None:
        return self._layers[layer]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum((c.k[0].numel() + c.v[0].numel()) * c.k.element_size() for c in self._layers if c)
