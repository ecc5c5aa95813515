"""Types whose scales are searched for: as good as llama-quantize, on its own data."""

import gguf
import numpy as np
import pytest
import torch

from dasllama_torch.export.searched_types import SEARCHED, pack
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES


def name(qtype):
    return GGML_TYPES[qtype].name


@pytest.mark.parametrize("qtype", SEARCHED, ids=name)
def test_as_llama_quantize(qtype, oracle):
    """The golden files hold one model in every type. Its F16 is off from what llama-quantize was given by a rounding of
    f16, which turns some of its choices."""
    plain = GGUFFile(oracle / "quant" / "llama-f16.gguf").tensors
    packed = GGUFFile(oracle / "quant" / f"llama-{name(qtype).lower()}.gguf").tensors
    same, of_all = 0, 0
    for tensor in plain.values():
        if len(tensor.shape) < 2:
            continue
        wanted = torch.from_numpy(tensor.data.view(np.float16).astype(np.float32))
        theirs = torch.from_numpy(gguf.quants.dequantize(packed[tensor.name].data, gguf.GGMLQuantizationType(qtype)))
        found = pack(wanted, qtype)
        ours = dequantize(found, qtype)
        assert (ours - wanted).square().sum() <= 1.005 * (theirs - wanted).square().sum(), tensor.name
        same += (found == torch.from_numpy(packed[tensor.name].data)).sum().item()
        of_all += found.numel()
    assert same >= 0.9 * of_all


@pytest.mark.parametrize("qtype", SEARCHED, ids=name)
def test_blocks_without_a_scale(qtype):
    """Zeros stay zeros, also beside others; a group of one value, whatever its sign, comes near to it."""
    x = torch.zeros(3, 512)
    x[1, 256:] = torch.randn(256, generator=torch.Generator().manual_seed(0))
    x[2, :256], x[2, 256:] = 3.0, -3.0
    y = dequantize(pack(x, qtype), qtype)
    assert (y[0] == 0).all()
    assert (y[1, :256] == 0).all()
    assert (y[2] / x[2] - 1).abs().max() < 0.1


@pytest.mark.parametrize("qtype", SEARCHED, ids=name)
def test_shapes_and_sizes_of_batches(qtype):
    """Blocks are independent of each other."""
    x = torch.randn(3, 5, 512, generator=torch.Generator().manual_seed(1))
    packed = pack(x, qtype)
    assert packed.shape == (3, 5, GGML_TYPES[qtype].row_bytes(512))
    assert torch.equal(packed[1, 2], pack(x[1, 2], qtype))
    many = torch.randn(1100, 256, generator=torch.Generator().manual_seed(2))
    assert torch.equal(pack(many, qtype)[1090:], pack(many[1090:], qtype))
