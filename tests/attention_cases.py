"""Ragged batches over shuffled, NaN-littered pages, and attention in float64 written down independently of the ops.

T rows, H query heads, G kv heads, D and Dv head dims, P pages of R rows.
"""

import math
from dataclasses import dataclass, field

import kv_formulas
import numpy as np
import torch
from torch import Tensor

from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.kv_write import kv_write

NO_TIE = 2e-4  # steps of a rounded query: its rotation in f32 is off by less


def blank(codec, pages: int, size: int, before: int, after: int) -> Tensor:
    """[pages, size] of the codec's dtype with other elements between pages; all bytes are ones, which is NaN."""
    memory = torch.full((pages, (before + size + after) * codec.dtype.itemsize), 255, dtype=torch.uint8)
    return memory.view(codec.dtype)[:, before : before + size]


@dataclass
class Batch:
    """Sequences of (keys before, new rows); every key is standard normal, everything else in the caches is NaN.

    codec, v_codec: of keys and values; v_codec None: the same. No element of q is near to where it is rounded to
    another integer.

    spans: (sequence, first, end): rows at positions [first, end) see all keys before `end`.
    inert: how many inert rows to strew in.
    """

    sequences: list[tuple[int, int]]
    H: int = 4
    G: int = 2
    D: int = 64
    Dv: int | None = None
    R: int = 64
    codec: str = "f32"
    v_codec: str | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    inert: int = 0

    def __post_init__(self):
        self.Dv = self.Dv or self.D
        G, D, Dv, R = self.G, self.D, self.Dv, self.R
        lengths = [past + new for past, new in self.sequences]
        used = [-(-n // R) for n in lengths]
        P = sum(used) + 3
        pages = torch.randperm(P).tolist()
        self.codecs = KV_CODECS[self.codec], KV_CODECS[self.v_codec or self.codec]
        keys, values = self.codecs
        # Pages with something else between them, as in a pool.
        self.k_cache = blank(keys, P, G * R * keys.row(D), 16, 0).unflatten(1, (G, R, keys.row(D)))
        self.v_cache = blank(values, P, G * R * values.row(Dv), 0, 5).unflatten(1, (G, R, values.row(Dv)))
        self.block_table = torch.full((len(lengths), max(used) + 2), -1, dtype=torch.int32)
        self.block_table[:, max(used) + 1] = 2**31 - 1
        self.keys, self.values = [], []  # what a cache holds of each sequence, float64 [n, G, W] and [n, G, Dv]
        for s, n in enumerate(lengths):
            for b in range(used[s]):
                self.block_table[s, b] = pages.pop()
            at = torch.arange(n)
            page = self.block_table[s, at // R].long()
            k, v, slots = torch.randn(n, G, D), torch.randn(n, G, Dv), page * R + at % R
            kv_write(k, v, self.k_cache, self.v_cache, slots, keys.id, values.id)
            k_rows, v_rows = (cache[page, :, at % R].numpy() for cache in (self.k_cache, self.v_cache))
            self.keys.append(torch.from_numpy(kv_formulas.values(keys.name, k_rows)))
            self.values.append(torch.from_numpy(kv_formulas.heads(values.name, v_rows, Dv)))
        rows = []  # (sequence, position, end)
        for s, (past, new) in enumerate(self.sequences):
            for pos in range(past, past + new):
                ends = [end for of, first, end in self.spans if of == s and first <= pos < end]
                rows.append((s, pos, ends[0] if ends else pos + 1))
        for i in range(self.inert):
            rows.insert((7 * i) % (len(rows) + 1), (-1, 3, 4))
        self.row_seq, self.row_pos, self.row_end = (
            torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in range(3)
        )
        self.q = torch.stack([self._query() for _ in range(len(rows) * self.H)]).view(-1, self.H, D)

    def _query(self) -> Tensor:
        while True:
            q = torch.randn(self.D)
            if kv_formulas.query(self.codec, q.numpy())[1] > NO_TIE:
                return q

    def args(self, rows=slice(None)) -> tuple:
        """Arguments of `paged_attention` for some of the rows."""
        return (
            self.q[rows], self.k_cache, self.v_cache, self.block_table,
            self.row_seq[rows].contiguous(), self.row_pos[rows].contiguous(), self.row_end[rows].contiguous(),
            self.D**-0.5, self.window, self.softcap, self.sinks, *(codec.id for codec in self.codecs), self.Dv,
        )  # fmt: skip

    def wanted(self) -> Tensor:
        """float64 [T, H, Dv], one row at a time."""
        out = np.zeros((len(self.q), self.H, self.Dv))
        queries = kv_formulas.query(self.codec, self.q.numpy())[0]
        queries = queries.reshape(len(queries), self.G, self.H // self.G, -1)
        rows = zip(self.row_seq.tolist(), self.row_pos.tolist(), self.row_end.tolist(), strict=True)
        for t, (s, pos, end) in enumerate(rows):
            seen = [j for j in range(end) if s >= 0 and (not self.window or j > pos - self.window)]
            if not seen:
                continue
            score = np.einsum("gid,jgd->gij", queries[t], self.keys[s].numpy()[seen]) / math.sqrt(self.D)
            if self.softcap:
                score = self.softcap * np.tanh(score / self.softcap)
            weight = np.exp(score)  # no shift: the scores are small, and the ops' shift is under test
            total = weight.sum(2)
            if self.sinks is not None:
                total += np.exp(self.sinks.double().view(self.G, -1).numpy())
            out[t] = np.einsum("gij,jgd->gid", weight / total[..., None], self.values[s].numpy()[seen]).reshape(
                self.H, -1
            )
        return torch.from_numpy(out)
