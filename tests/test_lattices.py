"""Activations on ggml's lattices: golden bytes, a scalar transcription of ggml's rules, and what is no number."""

from functools import cache

import numpy as np
import pytest
import torch

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.ggml_types import BF16, F16, F32, GGML_TYPES, Q8_0, Q8_1, Q8_K
from dasllama_torch.ops.lattices import quantize_activation, unpack_activation

BLOCKS = (Q8_0, Q8_1, Q8_K)
FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
QUANT_FILES = [GGML_TYPES[qtype].name for qtype in ggml_types.WEIGHT_TYPES if qtype != F32]


def name(value) -> str:
    return GGML_TYPES[value].name if value in GGML_TYPES else str(value)


def by_ggml(x: np.ndarray, lattice: int) -> bytes:
    """One block by the text of quantize_row_q8_0 and _q8_1 (AVX2) and quantize_row_q8_K_ref, one step at a time."""
    f = np.float32
    top = f(0)
    for v in x:
        if abs(v) > abs(top):
            top = v
    if lattice == Q8_K:
        inverse = f(-127) / top if top else f(0)
        q = np.array([min(127, int(np.rint(inverse * v))) for v in x], dtype=np.int8)
        d = f(1) / inverse if top else f(0)
        return d.tobytes() + q.tobytes() + q.reshape(16, 16).sum(1, dtype=np.int16).tobytes()
    d, inverse = abs(top) / f(127), f(127) / abs(top) if top else f(0)
    q = np.array([int(np.rint(v * inverse)) for v in x], dtype=np.int8)
    s = np.float16(d * f(q.sum(dtype=np.int32))).tobytes() if lattice == Q8_1 else b""
    return np.float16(d).tobytes() + s + q.tobytes()


def activations() -> torch.Tensor:
    """f32 [24, 512]: many magnitudes, zeros, ties of magnitude, halves between two integers, one lone element."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 512, generator=generator) * 10.0 ** torch.linspace(-6, 3, 24)[:, None]
    x[0] = 0
    x[1, ::2], x[1, 1::2] = -3.0, 3.0
    x[2, ::2], x[2, 1::2] = 3.0, -3.0
    x[3] = torch.arange(512) % 255 / 2 - 63.5
    x[3, ::32] = 127
    x[4] = 0
    x[4, 100] = -1e-3
    x[5] *= 1e-30
    return x


@cache  # one for all instruction sets
def golden(lattice: int) -> bytes:
    """`activations` by ggml's rules; the reference agrees."""
    x = activations()
    wanted = b"".join(by_ggml(part, lattice) for part in x.numpy().reshape(-1, GGML_TYPES[lattice].block))
    assert quantize_activation.reference(x, lattice).numpy().tobytes() == wanted
    return wanted


@pytest.mark.parametrize("lattice", BLOCKS, ids=name)
def test_bytes_are_those_of_ggml(lattice, isa):
    assert quantize_activation(activations(), lattice).numpy().tobytes() == golden(lattice)


@pytest.mark.parametrize("kind", QUANT_FILES)
def test_golden_activations(kind, isa, oracle):
    data = np.load(oracle / "quant" / f"llama-{kind.lower()}.npz")
    found = quantize_activation(torch.from_numpy(data["mm_x"]), ggml_types.by_name(kind).lattice)
    assert found.view(torch.uint8).numpy().tobytes() == data["mm_xq"].tobytes()


@pytest.mark.parametrize("lattice", BLOCKS, ids=name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_shows_in_its_block_only(lattice, bad, isa):
    x = torch.randn(3, 512)
    clean = quantize_activation(x, lattice)
    x[1, 300] = bad
    found, wanted = quantize_activation(x, lattice), quantize_activation.reference(x, lattice)
    at = 300 // GGML_TYPES[lattice].block
    for rows in (found, wanted):
        parts = unpack_activation(lattice, rows)
        assert not parts.d[1, at].isfinite()
        assert (parts.q[1, at] == 0).all()
        size = GGML_TYPES[lattice].bytes
        others = torch.ones_like(rows, dtype=torch.bool)
        others[1, at * size : (at + 1) * size] = False
        assert torch.equal(rows[others], clean[others])


@pytest.mark.parametrize("lattice", BLOCKS, ids=name)
def test_subnormal_blocks_are_defined(lattice, isa):
    """1 / d overflows below about 1e-37: such a block becomes zeros or what ggml makes of it, never garbage."""
    x = torch.tensor([1e-45, 3e-42, 1e-39, 2e-38]).repeat_interleave(256)[None] * torch.randn(1, 1024).sign()
    assert torch.equal(quantize_activation(x, lattice), quantize_activation.reference(x, lattice))
    assert unpack_activation(lattice, quantize_activation(x, lattice)).q.abs().max() <= 127


@pytest.mark.parametrize("lattice", [*BLOCKS, *FLOATS], ids=name)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_shapes_views_and_dtypes(lattice, dtype, isa):
    x = torch.randn(2, 5, 7, 768).to(dtype)
    whole = quantize_activation.reference(x, lattice)
    assert whole.dtype == FLOATS.get(lattice, torch.uint8)
    for view in (lambda t: t, lambda t: t[:, 1::2], lambda t: t.transpose(0, 1), lambda t: t[0, 0, 0], lambda t: t[:0]):
        found = quantize_activation(view(x), lattice)
        assert torch.equal(found, view(whole))
        assert found.is_contiguous()
    part = quantize_activation(x[..., 256:512], lattice)  # rows with others before and after
    assert torch.equal(part, quantize_activation.reference(x[..., 256:512].contiguous(), lattice))


def test_a_float_lattice_never_returns_its_input(isa):
    x = torch.randn(4, 8)
    assert quantize_activation(x, F32).data_ptr() != x.data_ptr()


WRONG = [
    (torch.zeros(2, 48), Q8_0, "a multiple of 32"),
    (torch.zeros(2, 128), Q8_K, "a multiple of 256"),
    (torch.zeros(2, 32, dtype=torch.float64), Q8_0, "f32, f16 or bf16"),
    (torch.zeros(2, 32, dtype=torch.int32), F16, "f32, f16 or bf16"),
    (torch.zeros(()), F32, "found|rank"),
    (torch.zeros(2, 256), ggml_types.Q4_K, "type 12 is not a lattice"),
    (torch.zeros(2, 256), 99, "type 99 is not a lattice"),
]


@pytest.mark.parametrize(("x", "lattice", "text"), WRONG)
def test_wrong_input_is_refused_everywhere_alike(x, lattice, text):
    for op in (quantize_activation, quantize_activation.reference):
        with pytest.raises(RuntimeError, match=f"dasllama::quantize_activation: .*({text})"):
            op(x, lattice)
    with pytest.raises(RuntimeError, match="dasllama::quantize_activation"):
        quantize_activation(x.to("meta"), lattice)


@pytest.mark.parametrize("lattice", [Q8_K, F16], ids=name)
def test_opcheck(lattice):
    torch.library.opcheck(quantize_activation, (torch.randn(2, 3, 256), lattice))
    torch.library.opcheck(quantize_activation, (torch.randn(4, 512, dtype=torch.bfloat16)[::2], lattice))
