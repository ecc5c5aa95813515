"""What the KV codecs keep and what attention makes of it, in float64, written down independently of the ops.

n elements of a head, W with what pads them. Layouts and rules: ops/kv_codecs.py.
"""

import functools

import numpy as np

BLOCK_BYTES = {"q8_0": 34, "tq4": 18}


def width(codec: str, n: int) -> int:
    """W of a head of n elements."""
    if codec == "q8_0":
        return (n + 31) // 32 * 32
    return max(32, 2 ** int(np.ceil(np.log2(n)))) if codec == "tq4" else n


def row_bytes(codec: str, n: int) -> int:
    """Of a head of n elements."""
    if codec in BLOCK_BYTES:
        return width(codec, n) // 32 * BLOCK_BYTES[codec]
    return n * {"f32": 4, "f16": 2}[codec]


@functools.cache
def rotation(W: int) -> np.ndarray:
    """[W, W], orthogonal: x @ rotation(W) is what tq4 keeps of a head x."""
    seed, signs = 0xC0FFEE, []
    for _ in range(W):
        seed = (seed * 1664525 + 1013904223) % 2**32
        signs.append(-1 if seed // 2**16 % 2 else 1)
    hadamard = np.ones((1, 1))
    while len(hadamard) < W:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.array(signs)[:, None] * hadamard / np.sqrt(W)


def kept(codec: str, x: np.ndarray) -> np.ndarray:
    """Heads [..., n] -> [..., W], padded and, under tq4, rotated: what is cut into blocks."""
    W = width(codec, x.shape[-1])
    x = np.concatenate([np.float64(x), np.zeros((*x.shape[:-1], W - x.shape[-1]))], -1)
    return x @ rotation(W) if codec == "tq4" else x


def unpack(codec: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes u8 [..., row] -> codes as integers [..., W / 32, 32] and scales float64 [..., W / 32, 1]."""
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK_BYTES[codec])
    d = np.float64(np.ascontiguousarray(blocks[..., :2]).view(np.float16))
    if codec == "q8_0":
        return np.int64(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)), d
    codes = np.empty((*blocks.shape[:-1], 32), np.int64)
    codes[..., 0::2] = blocks[..., 2:] % 16
    codes[..., 1::2] = blocks[..., 2:] // 16
    return codes - 8, d


def values(codec: str, rows: np.ndarray) -> np.ndarray:
    """Rows of a cache in its dtype -> float64 [..., W], still padded and rotated."""
    if codec not in BLOCK_BYTES:
        return np.float64(rows)
    codes, d = unpack(codec, rows)
    return (codes * d).reshape(*rows.shape[:-1], -1)


def heads(codec: str, rows: np.ndarray, n: int) -> np.ndarray:
    """Rows of a cache -> heads float64 [..., n]."""
    x = values(codec, rows)
    return (x @ rotation(x.shape[-1]).T if codec == "tq4" else x)[..., :n]


def query(codec: str, q: np.ndarray) -> tuple[np.ndarray, float]:
    """Query heads [..., n] -> what meets keys of the codec, float64 [..., W], and how far the nearest of its elements
    is from being rounded to another integer."""
    x = kept(codec, q)
    if codec not in BLOCK_BYTES:
        return x, 0.5
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(-1, keepdims=True) / 127
    steps = blocks / np.where(d == 0, 1, d)
    margin = 0.5 - np.abs(steps - np.rint(steps)).max()
    return (np.rint(steps) * d).reshape(x.shape), margin
