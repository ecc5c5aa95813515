"""How a cache keeps the keys or values of a head: one row per codec, and its arithmetic in plain PyTorch.

    f32   as they are
    f16   rounded to nearest even
    q8_0  blocks of 32 elements, 34 bytes: f16 d, int8 q[32]; d = max|x| / 127, q = x times the unrounded 1 / d, halves
          away from zero; x ~ d * q. The layout is ggml's.
    tq4   blocks of 32 elements of the rotated head, 18 bytes: f16 d, then 16 bytes of which byte i holds the codes of
          elements 2 i (lower four bits) and 2 i + 1; d = (the element of largest magnitude) / -8, code = min(15, int(x
          times the unrounded 1 / d + 8.5)); x ~ d * (code - 8)

The rotation of tq4 is a vector of signs, the same for all heads, and then the orthonormal Walsh-Hadamard transform. It
leaves dot products as they are and spreads what is large over the whole head, which 4 bits then hold better than they
hold the head itself. A head that the codec's unit does not divide is padded with zeros, under tq4 to a power of two.
All codecs but f32 take values beyond f16's range as +-65504.

The C++ twin of the table is csrc/kv_codecs.h; ops name a codec by its id.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.ops.quantize import pack_q8_0, round_to_nibbles

BLOCK, MOST_ROTATED, F16_MAX = 32, 1024, 65504.0


@dataclass(frozen=True)
class KVCodec:
    """id: as ops take it. dtype: of the cache, where blocks are bytes. block_bytes: of 32 elements, 0: no blocks.
    rotated: whether heads are stored rotated."""

    id: int
    name: str
    dtype: torch.dtype
    block_bytes: int = 0
    rotated: bool = False

    def width(self, dim: int) -> int:
        """Elements that are kept of a head of dim elements: those that pad it too."""
        if not self.block_bytes:
            return dim
        if not self.rotated:
            return -(-dim // BLOCK) * BLOCK
        if dim > MOST_ROTATED:
            raise ValueError(f"{self.name} rotates heads of at most {MOST_ROTATED} elements, found {dim}")
        return max(BLOCK, 1 << (dim - 1).bit_length())

    def row(self, dim: int) -> int:
        """Size of a cache's last dimension, in elements of its dtype."""
        return self.width(dim) // BLOCK * self.block_bytes if self.block_bytes else dim

    def row_bytes(self, dim: int) -> int:
        """Bytes that a head of dim elements takes."""
        return self.row(dim) * self.dtype.itemsize

    # ---- the reference ----------------------------------------------------------------------------------------------

    def store(self, x: Tensor) -> Tensor:
        """Heads, floating [..., dim] -> [..., row] in the cache's dtype."""
        if not self.block_bytes:
            return x.to(self.dtype) if self.dtype == torch.float32 else _clamp(x.float(), F16_MAX).to(self.dtype)
        blocks = self.rotate(_clamp(x.float(), F16_MAX)).reshape(-1, BLOCK)
        return (_pack_tq4(blocks) if self.rotated else pack_q8_0(blocks)).view(*x.shape[:-1], self.row(x.shape[-1]))

    def codes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks u8 [..., row] -> their integers, f32 [..., n, 32], and scales d, f32 [..., n]."""
        blocks = rows.unflatten(-1, (-1, self.block_bytes))
        d = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
        packed = blocks[..., 2:]
        if self.rotated:
            return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() - 8, d
        return packed.contiguous().view(torch.int8).float(), d

    def load(self, rows: Tensor, dim: int) -> Tensor:
        """[..., row] -> heads f32 [..., dim]."""
        if not self.block_bytes:
            return rows.float()
        q, d = self.codes(rows)
        x = (q * d[..., None]).flatten(-2)
        return (_hadamard(x) * _signs(x) if self.rotated else x)[..., :dim]

    def rotate(self, x: Tensor) -> Tensor:
        """Heads f32 [..., dim] -> [..., width], in which blocks are cut: padded, and rotated if the codec does so."""
        x = torch.nn.functional.pad(x, (0, self.width(x.shape[-1]) - x.shape[-1]))
        return _hadamard(x * _signs(x)) if self.rotated else x

    def dot(self, q: Tensor, rows: Tensor) -> Tensor:
        """Query heads f32 [..., H, dim] times keys [n, G, row] -> f32 [..., H, n]; head h meets key head h // (H / G).

        A query that meets codes is rounded to blocks of 32 int8 with an f32 scale, halves to even.
        """
        G = rows.shape[1]
        if not self.block_bytes:
            return torch.einsum("...grd,ngd->...grn", q.unflatten(-2, (G, -1)), rows.float()).flatten(-3, -2)
        x = self.rotate(q).unflatten(-1, (-1, BLOCK)).unflatten(-3, (G, -1))  # [..., G, H / G, b, 32]
        top = x.abs().amax(-1)
        x = torch.where(top == 0, 0.0, 127.0 / top)[..., None].mul(x).round()
        codes, d = self.codes(rows)  # [n, G, b, 32], [n, G, b]
        dots = torch.zeros((), device=q.device)
        for b in range(d.shape[-1]):  # one by one: all at once would be b times as large as what is asked for
            integers = torch.einsum("...gre,nge->...grn", x[..., b, :], codes[:, :, b])  # exact: below 2^24
            dots = dots + integers * (top[..., b, None] / 127.0) * d[:, :, b].T[:, None]
        return dots.flatten(-3, -2)


KV_CODECS = {
    codec.name: codec
    for codec in (
        KVCodec(0, "f32", torch.float32),
        KVCodec(1, "f16", torch.float16),
        KVCodec(2, "q8_0", torch.uint8, block_bytes=34),
        KVCodec(3, "tq4", torch.uint8, block_bytes=18, rotated=True),
    )
}
CODECS = list(KV_CODECS.values())  # by id
assert [codec.id for codec in CODECS] == list(range(len(CODECS)))


def codec_pair(kv_dtype: str | tuple[str, str]) -> tuple[KVCodec, KVCodec]:
    """The codecs of keys and of values: `kv_dtype` names one for both, or one each. ValueError for an unknown name."""
    names = tuple(kv_dtype) if isinstance(kv_dtype, tuple | list) else (kv_dtype, kv_dtype)
    if len(names) != 2:
        raise ValueError(f"kv_dtype is {kv_dtype!r}, wanted a name or a pair of names: for keys and for values")
    for name in names:
        if name == "q4_0":
            raise ValueError(f"kv_dtype {name!r} is not offered, wanted 'tq4': as many bytes, and less is lost")
        if name not in KV_CODECS:
            raise ValueError(f"kv_dtype {name!r} is unknown, wanted one of {', '.join(KV_CODECS)}")
    return KV_CODECS[names[0]], KV_CODECS[names[1]]


def pair_name(codecs: tuple[KVCodec, KVCodec]) -> str | tuple[str, str]:
    """The shortest `kv_dtype` of a pair."""
    keys, values = (codec.name for codec in codecs)
    return keys if keys == values else (keys, values)


def _clamp(x: Tensor, most: float) -> Tensor:
    return x.clamp(-most, most)


def _pack_tq4(blocks: Tensor) -> Tensor:
    q, d = round_to_nibbles(_clamp(blocks, 8 * F16_MAX))  # what the scale can hold
    return torch.cat([d, q[:, ::2] | q[:, 1::2] << 4], 1)


def _signs(x: Tensor) -> Tensor:
    """+-1 for each element of the last dimension, f32; a shorter head has the first of them."""
    s, signs = 0xC0FFEE, []
    for _ in range(x.shape[-1]):
        s = (s * 1664525 + 1013904223) & 0xFFFFFFFF
        signs.append(-1.0 if s & 0x10000 else 1.0)
    return torch.tensor(signs, device=x.device)


def _hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, stage by stage from neighbours on."""
    n = x.shape[-1]
    distance = 1
    while distance < n:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        distance *= 2
    return x * (1 / math.sqrt(n))
