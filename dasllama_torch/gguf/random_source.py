"""Random weights of any type and shape: for tests, and for measuring a model's speed without its file."""

import fnmatch
import hashlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.source import FLOAT_TYPES, PackedTensor, TensorSource
from dasllama_torch.ops import ggml_types as t

# Blocks of random bytes are valid codes of every type; only the scales must be set. Per type: byte offset -> value of
# the f16 fields that give weights of RMS 1 and, as far as the type can, mean 0 (the RMS of random codes with scale 1,
# measured with gguf-py and for Q1_0 and Q2_0 counted by hand).
_SCALES: dict[int, dict[int, float]] = {
    t.Q4_0: {0: 1 / 4.64},
    t.Q4_1: {0: 1 / 4.61, 2: -7.5 / 4.61},
    t.Q5_0: {0: 1 / 9.25},
    t.Q5_1: {0: 1 / 9.23, 2: -15.5 / 9.23},
    t.Q8_0: {0: 1 / 73.9},
    t.Q2_K: {80: 1 / 13.9, 82: 1.5 / 13.9},
    t.Q3_K: {108: 1 / 43.3},
    t.Q4_K: {0: 1 / 259, 2: 7.5 / 259},
    t.Q5_K: {0: 1 / 524, 2: 15.5 / 524},
    t.Q6_K: {208: 1 / 1364},
    t.IQ1_S: {0: 1 / 7.17},
    t.IQ2_XXS: {0: 1 / 53.5},
    t.IQ2_XS: {0: 1 / 56.0},
    t.IQ2_S: {0: 1 / 56.5},
    t.IQ3_XXS: {0: 1 / 142},
    t.IQ3_S: {0: 1 / 140},
    t.IQ4_NL: {0: 1 / 67.4},
    t.IQ4_XS: {0: 1 / 1243},
    t.TQ1_0: {52: 1 / 0.818},
    t.TQ2_0: {64: 1 / 1.22},
    t.Q1_0: {0: 1.0},
    t.Q2_0: {0: 1 / 1.22},
}
_IQ1_M_SCALE = (
    1 / 7.18
)  # an f16 as well, of which the last four u16 of a block hold a nibble each, on top, lowest first
_MXFP4_SCALE = 1 / 2.92  # a power of two, in byte 0 as exponent + 127
_NVFP4_SCALE = 1 / 2.92  # four e4m3 without sign, in bytes 0 to 3


class RandomSource(TensorSource):
    """Tensors made when they are asked for, the same for the same seed, name, shape and type.

    Matrices of K columns have RMS 1/sqrt(K); vectors are F32, 1 + 0.1 n for names that end in `norm.weight` and 0.1 n
    for others, n normal. qtype: of the matrices, or a function of full name and shape that gives it. optional:
    patterns (`blk.*.attn_q.bias`) of the tensors for which `has` says yes. Constructors ask `has` only about what a
    model may lack, so by default it lacks all of that.
    """

    def __init__(
        self, seed: int = 0, qtype: int | Callable[[str, tuple[int, ...]], int] = t.F32, optional: Collection[str] = ()
    ):
        super().__init__(f"random source {seed}")
        self.seed = seed
        self._qtype = qtype if callable(qtype) else lambda name, shape: qtype
        self._optional = tuple(optional)

    def names(self) -> Collection[str]:
        return ()

    def has(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(self.prefix + name, pattern) for pattern in self._optional)

    def f32(self, name: str, *shape: int) -> Tensor:
        return self._floats(self.prefix + name, shape)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        qtype = self._qtype(name, shape) if len(shape) > 1 else t.F32
        if qtype in FLOAT_TYPES:
            data = self._floats(name, shape).reshape(shape or (1,)).to(FLOAT_TYPES[qtype]).view(torch.uint8)
        else:
            data = self._blocks(name, shape, qtype)
        return PackedTensor(name, shape, qtype, data)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def _floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        n = torch.randn(shape, generator=self._generator(name))
        if len(shape) > 1:
            return n * shape[-1] ** -0.5
        return 0.1 * n + 1 if name.endswith("norm.weight") else 0.1 * n

    def _blocks(self, name: str, shape: tuple[int, ...], qtype: int) -> Tensor:
        """uint8 [*shape[:-1], row_bytes]; each block's scale is off by a factor of 0.5 to 1.5, so that no two blocks
        are alike."""
        kind = t.weight_type(qtype)
        if shape[-1] % kind.block:
            wanted = f"a multiple of {kind.block} for type {kind.name}"
            raise UnsupportedModel(f"{self.origin}: tensor {name!r} has rows of {shape[-1]} elements, wanted {wanted}")
        generator = self._generator(name)
        grid = (*shape[:-1], shape[-1] // kind.block)
        blocks = torch.randint(0, 256, (*grid, kind.bytes), dtype=torch.uint8, generator=generator)
        scale = (0.5 + torch.rand(*grid, 1, generator=generator)) * shape[-1] ** -0.5
        if qtype == t.MXFP4:
            blocks[..., :1] = (torch.log2(scale * _MXFP4_SCALE).round() + 127).to(torch.uint8)
        elif qtype == t.NVFP4:
            blocks[..., :4] = (scale * _NVFP4_SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
        elif qtype == t.IQ1_M:
            half = (scale * _IQ1_M_SCALE).half().view(torch.uint8).int()
            nibbles = torch.cat([half & 15, half >> 4], -1)[..., [0, 2, 1, 3]]
            blocks[..., 49::2] = (blocks[..., 49::2] & 15) | (nibbles << 4).to(torch.uint8)
        else:
            for offset, value in _SCALES[qtype].items():
                blocks[..., offset : offset + 2] = (scale * value).half().view(torch.uint8)
        return blocks.flatten(-2)
