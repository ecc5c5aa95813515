"""The reference of quant_linear: ggml's own products and f64 are its oracles, since kernels are held to its bits."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from tolerances import F32_ROUNDOFF, GGML_PRODUCT

from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops import blocks, ggml_types
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES, Q4_0, Q8_1, WEIGHT_TYPES
from dasllama_torch.ops.lattices import quantize_activation, unpack_activation
from dasllama_torch.ops.quant_linear import _fma, quant_linear, quant_linear_backward
from dasllama_torch.ops.registry import use_reference

PACKED = [qtype for qtype in WEIGHT_TYPES if not GGML_TYPES[qtype].is_float]


def name(value) -> str:
    return GGML_TYPES[value].name if value in GGML_TYPES else str(value)


def random_matrix(qtype: int, N: int, K: int) -> torch.Tensor:
    """u8 [N, row_bytes]: random bytes, without the blocks whose random scales make elements huge, infinite or NaN."""
    row, generator = GGML_TYPES[qtype], torch.Generator().manual_seed(qtype)
    good = torch.empty(0, row.bytes, dtype=torch.uint8)
    while len(good) < N * K // row.block:
        fresh = torch.randint(0, 256, (4096, row.bytes), dtype=torch.uint8, generator=generator)
        top = dequantize.reference(fresh, qtype).abs().amax(1)
        good = torch.cat([good, fresh[(top > 1e-2) & (top < 1e2)]])
    return good[: N * K // row.block].view(N, row.row_bytes(K))


@pytest.mark.parametrize("qtype", WEIGHT_TYPES[1:], ids=name)  # there is no golden file of F32
def test_golden_products(qtype, oracle):
    path = oracle / "quant" / f"llama-{name(qtype).lower()}.gguf"
    data, case = np.load(path.with_suffix(".npz")), json.loads((path.parent / "index.json").read_text())
    qweight = GGUFFile(path).tensors[case["models"][name(qtype)]["matmul"]["tensor"]].data
    x, wanted = torch.from_numpy(data["mm_x"]), torch.from_numpy(data["mm_y"])
    y = quant_linear.reference(x, torch.from_numpy(qweight.copy()), qtype, None, True)
    assert (y - wanted).abs().max() <= GGML_PRODUCT * wanted.abs().max()


@pytest.mark.parametrize("qtype", PACKED, ids=name)
def test_native_products_are_those_of_the_rounded_factors(qtype):
    """In f64: dequantized weights times dequantized activations; on Q8_1 the offset goes with the stored sum."""
    row, K = GGML_TYPES[qtype], 512
    qweight, x = random_matrix(qtype, 9, K), torch.randn(5, K)
    a = unpack_activation(row.lattice, quantize_activation.reference(x, row.lattice))
    w, rounded = dequantize.reference(qweight, qtype).double(), (a.q * a.d[..., None]).double().flatten(1)
    wanted = rounded @ w.T
    if row.lattice == Q8_1:
        m = blocks.unpack_blocks(qtype, qweight.view(-1, row.bytes)).m.double().view(9, -1)
        wanted = wanted + (a.s.double() - (a.q.sum(-1) * a.d).double()) @ m.T
    y = quant_linear.reference(x, qweight, qtype, None, True).double()
    # Products and minima of a unit are folded one after the other, so that a part may exceed the sum of its elements.
    parts = rounded.abs() @ (w.abs() + w.abs().amax(1, keepdim=True)).T
    assert ((y - wanted).abs() <= 2 * K // 16 * F32_ROUNDOFF * parts).all()


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=name)
def test_dequantizing_products_and_bias(qtype):
    qweight, x, bias = random_matrix(qtype, 9, 512), torch.randn(2, 3, 512), torch.randn(9)
    w = dequantize.reference(qweight, qtype).double()
    for native in (False, True) if qtype == ggml_types.F32 else (False,):
        y = quant_linear.reference(x, qweight, qtype, bias, native).double()
        assert y.shape == (2, 3, 9)
        bound = 513 * F32_ROUNDOFF * (x.double().abs() @ w.abs().T + bias.abs())
        assert ((y - (x.double() @ w.T + bias)).abs() <= bound).all()


def test_native_bias_is_one_last_addition():
    qweight, x, bias = random_matrix(Q4_0, 9, 64), torch.randn(4, 64), torch.randn(9)
    plain = quant_linear.reference(x, qweight, Q4_0, None, True)
    assert torch.equal(quant_linear.reference(x, qweight, Q4_0, bias, True), plain + bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_activations_are_widened_first(dtype):
    qweight, x = random_matrix(Q4_0, 9, 64), torch.randn(4, 64).to(dtype)
    for native in (False, True):
        y = quant_linear.reference(x, qweight, Q4_0, None, native)
        assert torch.equal(y, quant_linear.reference(x.float(), qweight, Q4_0, None, native).to(dtype))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("qtype", [ggml_types.Q4_1, ggml_types.Q6_K, ggml_types.F16, ggml_types.NVFP4], ids=name)
def test_gradients_are_those_of_the_dequantized_matrix(qtype, native):
    qweight = random_matrix(qtype, 9, 256)
    x = torch.randn(2, 3, 256, requires_grad=True)
    bias, grad = torch.randn(9, requires_grad=True), torch.randn(2, 3, 9)
    with use_reference():
        quant_linear(x, qweight, qtype, bias, native).backward(grad)
    twin, twin_bias = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(twin, dequantize.reference(qweight, qtype), twin_bias).backward(grad)
    bound = 9 * F32_ROUNDOFF * (grad.abs() @ dequantize.reference(qweight, qtype).abs())
    assert ((x.grad - twin.grad).abs() <= 2 * bound).all()
    assert ((bias.grad - twin_bias.grad).abs() <= 2 * 6 * F32_ROUNDOFF * grad.abs().sum((0, 1))).all()


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=name)
def test_empty_batches_and_matrices(qtype):
    some, none = random_matrix(qtype, 3, 256), torch.zeros(0, GGML_TYPES[qtype].row_bytes(256), dtype=torch.uint8)
    for native in (False, True):
        assert quant_linear.reference(torch.zeros(0, 256), some, qtype, None, native).shape == (0, 3)
        assert quant_linear.reference(torch.zeros(2, 256), none, qtype, None, native).shape == (2, 0)


def rounded_once(a: float, b: float, c: float) -> np.float32:
    """a * b + c as the nearest f32, ties to even, by exact fractions."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_fma_rounds_once():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-(2**24), 2**24, (3000,), generator=generator).float()
    b = torch.randn(3000, generator=generator)
    c = torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-6, 12, (3000,), generator=generator)
    # (1 + e)(1 - e) 2^-24 is 2^-70 less than half a unit of c: an f64 sum falls on the middle and would round astray.
    a[:1000], b[:1000] = 1 + 2.0**-23, 1 - 2.0**-23
    b[:1000] *= 2.0**-24 * (2.0 * torch.randint(0, 2, (1000,), generator=generator) - 1)
    c[:1000] = 1 + torch.randint(0, 2**23, (1000,), generator=generator) * 2.0**-23
    wanted = [rounded_once(*values) for values in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert np.array_equal(_fma(a, b, c).numpy(), np.array(wanted))


def test_fma_of_what_is_no_number():
    inf, nan = float("inf"), float("nan")
    a, b, c = torch.tensor([[inf, 1, 1.0], [1.0, nan, 0], [1.0, 1.0, -inf], [inf, 0, 1]]).T
    assert _fma(a, b, c).nan_to_num(nan=7.0, posinf=8.0, neginf=9.0).tolist() == [8, 7, 9, 7]


X, QWEIGHT, BIAS = torch.zeros(2, 64), torch.zeros(3, 36, dtype=torch.uint8), torch.zeros(3)
WRONG = [
    (X[:, :32], QWEIGHT, Q4_0, None, r"x must be f32, f16 or bf16 \[\.\.\., 64\]"),
    (X.double(), QWEIGHT, Q4_0, None, "x must be f32"),
    (X.to("meta"), QWEIGHT, Q4_0, None, "x must be f32"),
    (X, QWEIGHT.to("meta"), Q4_0, None, "x must be f32"),
    (X, QWEIGHT[:, :35], Q4_0, None, "a multiple of 18"),
    (X, torch.zeros(6, 36, dtype=torch.uint8)[::2], Q4_0, None, "strided"),
    (X, QWEIGHT, Q4_0, BIAS[:2], r"bias must be f32 \[3\]"),
    (X, QWEIGHT, Q4_0, BIAS.half(), "bias must be f32"),
    (X, QWEIGHT, Q4_0, BIAS.to("meta"), "bias must be f32"),
    (X, QWEIGHT, ggml_types.Q8_K, None, "Q8_K"),
]


@pytest.mark.parametrize(("x", "qweight", "qtype", "bias", "text"), WRONG)
def test_wrong_input_is_refused(x, qweight, qtype, bias, text):
    with pytest.raises(RuntimeError, match=f"dasllama::quant_linear: .*{text}"):
        quant_linear.reference(x, qweight, qtype, bias, True)


def test_a_gradient_of_the_wrong_width_is_refused():
    with pytest.raises(RuntimeError, match=r"dasllama::quant_linear_backward: grad must be .* \[\.\.\., 3\]"):
        quant_linear_backward.reference(torch.zeros(2, 4), QWEIGHT, Q4_0)


@pytest.mark.parametrize("native", [True, False])
def test_opcheck(native):
    qweight, bias = random_matrix(Q4_0, 9, 64), torch.randn(9)
    torch.library.opcheck(quant_linear, (torch.randn(2, 3, 64, requires_grad=True), qweight, Q4_0, bias, native))
    torch.library.opcheck(quant_linear_backward, (torch.randn(3, 9), qweight, Q4_0))
