"""Attention over what the Step says: a paged cache, or the rows of this forward alone."""

from torch import Tensor

from dasllama_torch.modules.base import Module
from dasllama_torch.ops.attention import attention
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.paged_attention import paged_attention
from dasllama_torch.step import Step


class PagedAttention(Module):
    """Writes k and v to the cache of `layer` and attends over it; without a cache it is a function of q, k and v.

    q [..., H, D], k and v [..., G, D] of this forward's rows -> [..., H, D]. Query head h reads kv head h // (H / G).
    window: keys seen, self included; 0: all. sinks: f32 [H], see ops/paged_attention.py.
    """

    def __init__(self, layer: int, scale: float, window: int = 0):
        super().__init__()
        self.layer, self.scale, self.window = layer, scale, window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Step, sinks: Tensor | None = None) -> Tensor:
        if step.cache is None:
            # The rows are their own keys. This form has a gradient; a cache does not.
            return attention(
                q, k, v, step.row_seq, step.row_pos, step.row_end, step.row_seq, step.row_pos,
                self.scale, self.window, 0.0, sinks,
            )  # fmt: skip
        cache = step.cache[self.layer]
        table = step.tables[cache.group]
        kv_write(k, v, cache.k, cache.v, table.slots)
        return paged_attention(
            q, cache.k, cache.v, table.block_table, step.row_seq, step.row_pos, step.row_end,
            self.scale, self.window, 0.0, sinks,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"layer={self.layer}, scale={self.scale:g}" + (f", window={self.window}" if self.window else "")
