"""Products with packed weights in Triton: ggml's own products, the CPU's reference, and float64."""

import json

import numpy as np
import pytest
import tolerances
import torch
from packed import FLOATS, TYPES, decode, random_rows
from triton_device import DEVICE, cases, guarded, ragged

from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.lattices import quantize_activation as lattice_op
from dasllama_torch.ops.lattices import unpack_activation
from dasllama_torch.ops.quant_linear import quant_linear as op
from dasllama_torch.ops.quant_linear import quant_linear_backward as op_backward
from dasllama_torch.triton_kernels import few_rows, few_rows_mma
from dasllama_torch.triton_kernels.few_rows import few_rows_together
from dasllama_torch.triton_kernels.quant_linear import quant_linear, quant_linear_backward
from dasllama_torch.triton_kernels.quantize_activation import quantize_activation, rounded


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


ROWS = 24 if DEVICE == "cuda" else 4  # of the weights
PACKED = [row for row in TYPES if row.id not in FLOATS]


def by_name(row) -> str:
    return row.name


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


def sizes(x: torch.Tensor, w: torch.Tensor, row, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of the products' magnitudes, f64 [..., N]."""
    return x.double().abs() @ decode(w, row).abs().T + (0 if bias is None else bias.abs())


@pytest.mark.parametrize("lattice", [ggml_types.Q8_0, ggml_types.Q8_1, ggml_types.Q8_K])
def test_rounded_activations(lattice):
    x = torch.randn(5, 768) * torch.logspace(-3, 3, 5)[:, None]
    x[0, :256] = 0
    x[1, 1], x[1, 3] = x[1].abs().max(), -x[1].abs().max()  # a tie for the largest
    x[2, 7] = x[2, 8] = 2.5 / 127 * x[2].abs().max()
    x[3, 300], x[4, 301] = float("nan"), float("inf")
    for dtype in (torch.float32, torch.float16):
        found = quantize_activation(ragged(x.to(dtype)), lattice).cpu()
        wanted = lattice_op.reference(x.to(dtype), lattice)
        assert torch.equal(found[:3], wanted[:3])
        for got, want in zip(unpack_activation(lattice, found), unpack_activation(lattice, wanted), strict=True):
            assert want is None or torch.equal(got.nan_to_num(), want.nan_to_num())  # NaN has many bits


@pytest.mark.parametrize("row", cases(PACKED, "Q4_K", "Q6_K", "Q4_1", "IQ2_S"), ids=by_name)
def test_ggml_products(oracle, row):
    """The stored products of ggml's own kernels: last layer's ffn_down of the tiny model of this type."""
    path = oracle / "quant" / f"llama-{row.name.lower()}.gguf"
    golden, index = np.load(path.with_suffix(".npz")), json.loads((path.parent / "index.json").read_text())
    w = torch.from_numpy(GGUFFile(path).tensors[index["models"][row.name]["matmul"]["tensor"]].data.copy())[:ROWS]
    x, want = torch.from_numpy(golden["mm_x"])[:2], torch.from_numpy(golden["mm_y"])[:2, :ROWS]
    assert_near(quant_linear(x.to(DEVICE), w.to(DEVICE), row.id, None, True), want, tolerances.GGML_PRODUCT)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("row", cases(TYPES, "F16", "Q4_K", "Q6_K", "Q5_0", "MXFP4"), ids=by_name)
def test_few_rows(row, native):
    K = row.block * 3 if row.block > 1 else 50
    w, bias = random_rows(row, 5, K), torch.randn(5)
    for M in (1, 3):
        x = torch.randn(M, K)
        found = quant_linear(ragged(x), guarded(w), row.id, bias.to(DEVICE), native)
        error = (found.cpu() - op.reference(x, w, row.id, bias, native)).abs()
        assert (error <= tolerances.TRITON_PRODUCT * sizes(x, w, row, bias)).all()


@pytest.mark.parametrize("M", cases([2, 5, 9, 16], 5, 9))
def test_counts_of_rows_and_leading_dims(M):
    row = ggml_types.by_name("Q4_K")
    w, x = random_rows(row, 9, 512), torch.randn(1, M, 512)
    for native in (True, False):
        found = quant_linear(x.to(DEVICE), w.to(DEVICE), row.id, None, native)
        error = (found.cpu() - op.reference(x, w, row.id, None, native)).abs()
        assert (error <= tolerances.TRITON_PRODUCT * sizes(x, w, row)).all()
    assert quant_linear(x[:, :0].to(DEVICE), w.to(DEVICE), row.id, None, True).shape == (1, 0, 9)
    assert quant_linear(x.to(DEVICE), w[:0].to(DEVICE), row.id, None, True).shape == (1, M, 0)


@pytest.mark.parametrize("name", cases(["Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"], "Q4_K", "MXFP4"))
def test_a_row_is_the_same_in_every_batch(name):
    """On the tensor cores, from two rows on, also where matrices share a launch: more of K than its warps take at once,
    and rows of W beyond a tile."""
    row = ggml_types.by_name(name)
    w, x = random_rows(row, 19, 2304).to(DEVICE), torch.randn(16, 2304, device=DEVICE)
    whole = quant_linear(x, w, row.id, None, True)
    error = (whole.cpu() - op.reference(x.cpu(), w.cpu(), row.id, None, True)).abs()
    assert (error <= tolerances.TRITON_PRODUCT * sizes(x.cpu(), w.cpu(), row)).all()
    for M in cases([2, 8, 9], 9):
        parts = [torch.empty(M, 3, device=DEVICE), torch.empty(M, 16, device=DEVICE)]
        few_rows_together(rounded(x[:M], row.lattice), [w[:3].clone(), w[3:].clone()], row.id, parts)
        assert torch.equal(torch.cat(parts, 1), whole[:M])


WIDTHS = [("Q4_K", 768), ("Q5_K", 1024), ("Q6_K", 768), ("Q8_0", 800), ("IQ4_NL", 800), ("IQ4_XS", 768), ("MXFP4", 800)]
SHAPES = [(1, 1, 4), (1, 2, 5), (1, 4, 2), (2, 1, 3), (2, 2, 2), (4, 1, 4)]


@pytest.mark.parametrize("shape", cases(SHAPES, (2, 2, 2)), ids=str)
@pytest.mark.parametrize("case", cases(WIDTHS, ("Q8_0", 800), ("MXFP4", 800)), ids=str)
def test_shapes_of_programs(case, shape, monkeypatch):
    """On the tensor cores: sets of rows of W, warps that share K evenly and not, slots for what is on its way, and rows
    that begin in the middle of what memory gives."""
    name, K = case
    row = ggml_types.by_name(name)
    monkeypatch.setattr(few_rows_mma, "shape", lambda *_: shape)
    w, x = random_rows(row, 37, K), torch.randn(9, K)
    placed = guarded(w, before=1)  # to a multiple of 2 bytes, or of 16, or of none
    found = quant_linear(x.to(DEVICE), placed, row.id, None, True)
    error = (found.cpu() - op.reference(x, w, row.id, None, True)).abs()
    assert (error <= tolerances.TRITON_PRODUCT * sizes(x, w, row)).all()
    monkeypatch.setattr(few_rows_mma, "shape", lambda *_: (1, *shape[1:]))
    assert torch.equal(quant_linear(x.to(DEVICE), placed, row.id, None, True), found)
    monkeypatch.setattr(few_rows_mma, "reads_ahead", lambda *_: True)
    assert torch.equal(quant_linear(x.to(DEVICE), placed, row.id, None, True), found)


@pytest.mark.parametrize("name", cases(["Q4_K", "Q6_K", "Q8_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4"], "Q6_K"))
def test_one_long_row(name):
    """Several warps share K, and their last steps have less to do."""
    row = ggml_types.by_name(name)
    w, x = random_rows(row, 5, 8448), torch.randn(1, 8448)
    found = quant_linear(x.to(DEVICE), w.to(DEVICE), row.id, None, True)
    error = (found.cpu() - op.reference(x, w, row.id, None, True)).abs()
    assert (error <= tolerances.TRITON_PRODUCT * sizes(x, w, row)).all()


def test_w_is_copied_before_x_is_rounded(monkeypatch):
    """Products may read W while the launch before them ends, which must not be a copy to there."""
    order = []
    for name in ("aligned", "rounded"):
        call = getattr(few_rows, name)
        monkeypatch.setattr(few_rows, name, lambda *args, name=name, call=call: (order.append(name), call(*args))[1])
    row = ggml_types.by_name("Q8_0")
    w, x = random_rows(row, 3, 64), torch.randn(2, 64)
    placed = torch.empty(w.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(w.shape).copy_(w)  # an odd address
    wanted = op.reference(x, w, row.id, None, True)
    assert_near(quant_linear(x.to(DEVICE), placed, row.id, None, True), wanted, tolerances.TRITON_PRODUCT)
    assert order == ["aligned", "rounded"]


# Where a GPU rounds to bf16, the interpreter cuts off.
HALVES = [torch.float16, torch.bfloat16, torch.float32] if DEVICE == "cuda" else [torch.float16]


@pytest.mark.parametrize("M", cases([17, 300], 17))
@pytest.mark.parametrize(
    ("native", "dtype"),
    [*((True, half) for half in HALVES), *((False, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))],
)
def test_many_rows(native, dtype, M):
    """x and W rounded to f16 or bf16 if native, which f32 sums of exact products follow; f32 otherwise."""
    row = ggml_types.by_name("Q4_K")
    w, x, bias = random_rows(row, 7, 512), torch.randn(M, 512).to(dtype), torch.randn(7)
    half = dtype if dtype != torch.float32 else torch.bfloat16
    w64, x64 = decode(w, row), x.double()
    if native:
        w64, x64 = w64.to(half).double(), x.to(half).double()
    found = quant_linear(ragged(x), w.to(DEVICE), row.id, bias.to(DEVICE), native).cpu()
    assert found.dtype == dtype
    wanted, magnitudes = x64 @ w64.T + bias, x64.abs() @ w64.abs().T + bias.abs()
    rounding = tolerances.OUTPUT_ROUNDOFF[str(dtype).removeprefix("torch.")] * wanted.abs()
    assert ((found.double() - wanted).abs() <= rounding + tolerances.TRITON_HALF_PRODUCT * magnitudes).all()


@pytest.mark.parametrize("name", ["F16", "Q5_1", "Q6_K"])
def test_gradient(name):
    row = ggml_types.by_name(name)
    w, grad = random_rows(row, 6, 256), torch.randn(2, 3, 6)
    found = quant_linear_backward(grad.to(DEVICE), w.to(DEVICE), row.id)
    assert_near(found, op_backward.reference(grad, w, row.id), tolerances.TRITON_PRODUCT)


def test_wrong_input_is_refused():
    x, w, Q4_0 = (
        torch.zeros(2, 64, device=DEVICE),
        torch.zeros(4, 36, dtype=torch.uint8, device=DEVICE),
        ggml_types.Q4_0,
    )
    for args, text in (
        ((x[:, :63], w, Q4_0, None, True), r"x must be f32, f16 or bf16 \[\.\.\., 64\]"),
        ((x, w[:, :35], Q4_0, None, True), "a multiple of 18"),
        ((x, w[::2], Q4_0, None, True), "strided"),
        ((x, w, Q4_0, torch.zeros(5, device=DEVICE), True), r"bias must be f32 \[4\]"),
        ((x, w, ggml_types.Q8_1, None, True), "Q8_1"),
    ):
        with pytest.raises(RuntimeError, match=f"dasllama::quant_linear: .*{text}"):
            quant_linear(*args)


@pytest.mark.skipif(DEVICE != "cuda", reason="what an op dispatches to needs a GPU")
def test_ops_reach_these_kernels():
    row = ggml_types.by_name("Q4_K")
    w = random_rows(row, 64, 512).cuda()
    registry.reset_report()
    with registry.strict():
        for M in (1, 16, 17, 1000):
            op(torch.randn(M, 512, device="cuda"), w, row.id, None, True)
        op(torch.randn(2, 512, device="cuda"), w, row.id, None, False)
    assert sum(registry.report()["quant_linear"].values()) == 5
    assert all(name.startswith("triton/") for name in registry.report()["quant_linear"])
