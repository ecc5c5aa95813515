"""Random packed weights of every type and what they mean, for tests of ops on packed weights, and equality of bits."""

from functools import cache

import gguf
import numpy as np
import torch

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize

FLOATS = {ggml_types.F32: torch.float32, ggml_types.F16: torch.float16, ggml_types.BF16: torch.bfloat16}
TYPES = [row for row in ggml_types.GGML_TYPES.values() if row.is_weight]
# Types that gguf-py cannot decode; for them the op's own reference, which test_dequantize holds against ggml's output.
UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")


def decode(qweight: torch.Tensor, row: ggml_types.GGMLType) -> torch.Tensor:
    """u8 [N, row_bytes] -> f64 [N, K], by gguf-py where it has the type."""
    if row.name in UNKNOWN_TO_GGUF:
        return dequantize.reference(qweight, row.id).double()
    kind = gguf.GGMLQuantizationType[row.name]
    return torch.from_numpy(np.array(gguf.quants.dequantize(qweight.contiguous().numpy(), kind))).double()


def random_rows(row: ggml_types.GGMLType, N: int, K: int, seed: int = 0) -> torch.Tensor:
    """u8 [N, row_bytes]: floats from a normal distribution, or blocks of random bytes with moderate elements."""
    return _random_rows(row.id, N, K, seed).clone()


@cache  # each instruction set is given the same ones
def _random_rows(qtype: int, N: int, K: int, seed: int) -> torch.Tensor:
    row = ggml_types.GGML_TYPES[qtype]
    generator = torch.Generator().manual_seed(seed)
    if row.id in FLOATS:
        return torch.randn(N, K, generator=generator).to(FLOATS[row.id]).view(torch.uint8)
    blocks = torch.empty(N * K // row.block, row.bytes, dtype=torch.uint8)
    bad = torch.ones(len(blocks), dtype=torch.bool)
    while bad.any():  # a random f16 scale is often huge, infinite or NaN
        fresh = torch.randint(0, 256, (int(bad.sum()), row.bytes), dtype=torch.uint8, generator=generator)
        blocks[bad] = fresh
        bad[bad.clone()] = ~(decode(fresh, row).abs().amax(1) < 100)
    return blocks.view(N, -1)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """f32, signs of zeros and NaNs included."""
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
