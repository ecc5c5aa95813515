"""Requantizing: gguf-py's packing is the oracle."""

import gguf
import numpy as np
import pytest
import torch

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import BF16, F16, F32, GGML_TYPES, Q4_0, Q8_0
from dasllama_torch.ops.quantize import quantize

TYPES = (F32, F16, BF16, Q4_0, Q8_0)


def name(value) -> str:
    return GGML_TYPES[value].name if value in GGML_TYPES else str(value)


def weights() -> torch.Tensor:
    """f32 [40, 512]: many magnitudes, zeros, ties of magnitude, halves between two integers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 512, generator=generator) * 10.0 ** torch.linspace(-9, 4, 40)[:, None]
    x[0] = 0
    x[1, ::2], x[1, 1::2] = -3.0, 3.0
    x[2, ::2], x[2, 1::2] = 3.0, -3.0
    x[3] = torch.arange(512) % 255 / 2 - 63.5
    x[3, ::32] = 127
    return x


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_bytes_are_those_of_gguf_py(qtype, isa):
    x = weights()
    wanted = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType(qtype)).view(np.uint8)
    assert np.array_equal(quantize(x, qtype).numpy(), wanted)
    assert np.array_equal(quantize.reference(x, qtype).numpy(), wanted)


def test_bf16_nan_and_overflow_are_those_of_gguf_py(isa):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-40, -0.0]])
    wanted = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.BF16).view(np.uint8)
    assert np.array_equal(quantize(x, BF16).numpy(), wanted)
    assert np.array_equal(quantize.reference(x, BF16).numpy(), wanted)


@pytest.mark.parametrize("qtype", [Q4_0, Q8_0], ids=name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e-45])
def test_what_has_no_scale_is_defined(qtype, bad, isa):
    """Undefined in gguf-py; here kernel and reference agree, and a NaN or infinity does not vanish."""
    x = torch.zeros(2, 64)
    x[0, 5] = bad
    y = dequantize(quantize(x, qtype), qtype)
    wanted = dequantize.reference(quantize.reference(x, qtype), qtype)
    assert torch.equal(y.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    assert y[0, 5].isfinite() == (bad == 1e-45)
    assert (y[1] == 0).all()
    assert (y[0, 32:] == 0).all()


@pytest.mark.parametrize("qtype", TYPES, ids=name)
def test_shapes_and_views(qtype, isa):
    x = torch.randn(3, 5, 96)
    wanted = quantize.reference(x, qtype)
    assert wanted.shape == (3, 5, GGML_TYPES[qtype].row_bytes(96))
    for view in (lambda t: t, lambda t: t[:, ::2], lambda t: t.transpose(0, 1), lambda t: t[0, 0], lambda t: t[:0]):
        assert torch.equal(quantize(view(x), qtype), view(wanted))
    assert quantize(x, qtype).data_ptr() != x.data_ptr()


WRONG = [
    (torch.zeros(2, 40), Q8_0, "a multiple of 32"),
    (torch.zeros(2, 32, dtype=torch.float16), Q8_0, "float32"),
    (torch.zeros(()), F32, "float32"),
    (torch.zeros(2, 256), ggml_types.Q4_K, "Q4_K"),
    (torch.zeros(2, 256), ggml_types.IQ2_XS, "IQ2_XS.*possible: F32, F16, BF16, Q4_0, Q8_0"),
    (torch.zeros(2, 256), ggml_types.I32, "I32"),
    (torch.zeros(2, 256), 99, "99"),
]


@pytest.mark.parametrize(("x", "qtype", "text"), WRONG)
def test_wrong_input_is_refused_everywhere_alike(x, qtype, text):
    for op in (quantize, quantize.reference):
        with pytest.raises(RuntimeError, match=f"dasllama::quantize: .*{text}"):
            op(x, qtype)
    with pytest.raises(RuntimeError, match="dasllama::quantize"):
        quantize(x.to("meta"), qtype)


@pytest.mark.parametrize("qtype", [F16, Q4_0], ids=name)
def test_opcheck(qtype):
    torch.library.opcheck(quantize, (torch.randn(2, 3, 64), qtype))
    torch.library.opcheck(quantize, (torch.randn(4, 64)[::2], qtype))
