"""quant_linear_backward: the gradient of a packed product with respect to its input, against f64, and its bits."""

import pytest
import tolerances
import torch
from packed import FLOATS, TYPES, assert_same_bits, decode, random_rows

from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.quant_linear import quant_linear, quant_linear_backward

ISAS = registry.isas()


def by_name(row):
    return row.name


def assert_close(dx: torch.Tensor, grad: torch.Tensor, w: torch.Tensor) -> None:
    """dx against grad [M, N] times w [N, K] in f64, within what a running f32 sum and the dtype of dx may lose."""
    grad = grad.double()
    want = grad @ w
    bound = tolerances.F32_ROUNDOFF * w.shape[0] * (grad.abs() @ w.abs())
    bound += tolerances.OUTPUT_ROUNDOFF[str(dx.dtype).removeprefix("torch.")] * want.abs() + torch.finfo(dx.dtype).tiny
    excess = (dx.double() - want).abs() / bound
    assert dx.shape == want.shape
    assert excess.max() <= 1, f"{excess.max():.3g} times the bound"


@pytest.mark.parametrize("row", TYPES, ids=by_name)
def test_every_type_against_f64(isa, row):
    K = 77 if row.id in FLOATS else max(2 * row.block, 288 // row.block * row.block)
    for M, N in ((1, 1), (1, 131), (7, 130)):
        w, grad = random_rows(row, N, K), torch.randn(M, N)
        registry.reset_report()
        dx = quant_linear_backward(grad, w, row.id)
        assert registry.report() == {"quant_linear_backward": {f"cpu/{isa}": 1}}
        assert_close(dx, grad, decode(w, row))


@pytest.mark.parametrize("K", [1, 15, 16, 33, 255, 256, 257, 600])
def test_odd_sizes(isa, K):
    row = ggml_types.GGML_TYPES[ggml_types.F16]
    for M, N in ((1, 5), (2, 128), (5, 129), (13, 3)):
        w, grad = random_rows(row, N, K), torch.randn(M, N)
        assert_close(quant_linear_backward(grad, w, row.id), grad, decode(w, row))


@pytest.mark.parametrize("row", [r for r in TYPES if r.name in ("F32", "BF16", "Q5_0", "Q3_K", "Q1_0")], ids=by_name)
def test_bits_depend_on_nothing_but_the_row(row):
    K, N = (301 if row.id in FLOATS else 1280), 140
    w, grad = random_rows(row, N, K), torch.randn(15, N)
    before = torch.get_num_threads()
    want = quant_linear_backward(grad, w, row.id)
    try:
        for name in ISAS:
            registry.set_isa(name)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same_bits(quant_linear_backward(grad, w, row.id), want)
                for M in range(1, 15):
                    assert_same_bits(quant_linear_backward(grad[:M], w, row.id), want[:M])
    finally:
        registry.set_isa(None)
        torch.set_num_threads(before)


@pytest.mark.parametrize("row", [ggml_types.GGML_TYPES[i] for i in (ggml_types.F32, ggml_types.Q4_1)], ids=by_name)
def test_views_between_guards(isa, row):
    w = random_rows(row, 6, 96)
    grad = torch.randn(5, 6)
    want = quant_linear_backward(grad, w, row.id)
    around = torch.full((13, 11), float("nan"))
    around[1:11:2, 3:9] = grad
    guarded = torch.full((w.numel() + 20,), 0xFF, dtype=torch.uint8)
    guarded[9:-11] = w.flatten()
    assert_same_bits(quant_linear_backward(around[1:11:2, 3:9], guarded[9:-11].view(6, -1), row.id), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients(isa, dtype):
    row = ggml_types.GGML_TYPES[ggml_types.Q8_0]
    w, grad = random_rows(row, 9, 64), torch.randn(2, 3, 9).to(dtype)
    dx = quant_linear_backward(grad, w, row.id)
    assert dx.dtype == dtype
    assert dx.shape == (2, 3, 64)
    assert_close(dx.flatten(0, 1), grad.flatten(0, 1), decode(w, row))


def test_empty_sizes(isa):
    w = torch.randn(3, 16).view(torch.uint8)
    assert quant_linear_backward(torch.randn(0, 3), w, ggml_types.F32).shape == (0, 16)
    assert torch.equal(quant_linear_backward(torch.randn(2, 0), w[:0], ggml_types.F32), torch.zeros(2, 16))


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize("row", [r for r in TYPES if r.name in ("F32", "F16", "Q4_K", "IQ4_XS")], ids=by_name)
def test_autograd_against_a_dense_layer_in_f64(row, native):
    """A loss that is not linear in the product, so that the gradient that arrives differs in every element."""
    if native and row.id not in FLOATS:
        pytest.skip("the gradient has no mode; integer products are another kernel")
    w, x, bias = random_rows(row, 10, 512), torch.randn(2, 4, 512) / 50, torch.randn(10)
    if native:
        x = x.to(FLOATS[row.id]).float()
    x32, b32 = x.clone().requires_grad_(), bias.clone().requires_grad_()
    x64, b64 = x.double().requires_grad_(), bias.double().requires_grad_()
    quant_linear(x32, w, row.id, b32, native).sin().square().sum().backward()
    torch.nn.functional.linear(x64, decode(w, row), b64).sin().square().sum().backward()
    for got, want in ((x32.grad, x64.grad), (b32.grad, b64.grad)):
        assert (got - want).abs().max() <= tolerances.GRADIENT * want.std()


G, W = torch.zeros(2, 3), torch.zeros(3, 36, dtype=torch.uint8)  # Q4_0: 18 bytes for 32


@pytest.mark.parametrize(
    ("grad", "qweight", "qtype"),
    [
        (torch.zeros(2, 4), W, ggml_types.Q4_0),
        (torch.zeros(()), W, ggml_types.Q4_0),
        (G.long(), W, ggml_types.Q4_0),
        (G, torch.zeros(3, 37, dtype=torch.uint8), ggml_types.Q4_0),
        (G, W[:, :35], ggml_types.Q4_0),
        (G, W.to(torch.int8), ggml_types.Q4_0),
        (G, W[0], ggml_types.Q4_0),
        (G, W, ggml_types.Q8_K),
        (G, W, 4),
        (G, W, 2**32 + ggml_types.Q4_0),
    ],
)
def test_wrong_arguments_are_refused_by_name(grad, qweight, qtype):
    with pytest.raises(RuntimeError, match="dasllama::quant_linear_backward: (grad|qweight|qtype)"):
        quant_linear_backward(grad, qweight, qtype)


@pytest.mark.parametrize("row", [r for r in TYPES if r.name in ("F32", "BF16", "Q6_K")], ids=by_name)
def test_opcheck(row):
    w = random_rows(row, 6, 256)
    for grad in (torch.randn(3, 6), torch.randn(2, 1, 6), torch.randn(6)):
        torch.library.opcheck(quant_linear_backward, (grad, w, row.id))
