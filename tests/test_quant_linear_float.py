"""quant_linear where it multiplies floats: every type with native=False, and F32, F16 and BF16 in both modes.

The oracle is the product in f64 with weights decoded by gguf-py. Beyond closeness, every output must keep its bits
whatever rows, threads, strides or instruction set it is computed with.
"""

import gguf
import numpy as np
import pytest
import tolerances
import torch
from packed import FLOATS, TYPES, assert_same_bits, decode, random_rows

from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.quant_linear import quant_linear

ISAS = registry.isas()
FLOAT_TYPES = [row for row in TYPES if row.id in FLOATS]


def by_name(row):
    return row.name


def width(row: ggml_types.GGMLType) -> int:
    """More columns than the kernel keeps at once, whole blocks, and 16s left over where the type has any."""
    return 1040 if row.block <= 16 else 1056 if row.block == 32 else 1152 if row.block <= 128 else 1280


def assert_close(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """y against x [M, K] times w [N, K] in f64, within what f32 sums and the dtype of y may lose."""
    x = x.double()
    want, magnitude = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.abs().double()
    roundings = w.shape[1] // 16 + 7  # a lane's products, the tree of 16 lanes, the bias
    bound = tolerances.F32_ROUNDOFF * roundings * magnitude
    bound += tolerances.OUTPUT_ROUNDOFF[str(y.dtype).removeprefix("torch.")] * want.abs() + torch.finfo(y.dtype).tiny
    excess = (y.double() - want).abs() / bound
    assert y.shape == want.shape
    assert excess.max() <= 1, f"{excess.max():.3g} times the bound"


@pytest.mark.parametrize("row", TYPES, ids=by_name)
@pytest.mark.parametrize("M", [1, 8])
def test_every_type_against_f64(isa, row, M):
    K, N = width(row), 11
    w, x, bias = random_rows(row, N, K), torch.randn(M, K), torch.randn(N)
    registry.reset_report()
    y = quant_linear(x, w, row.id, bias, False)
    assert registry.report() == {"quant_linear": {f"cpu/{isa}": 1}}
    assert_close(y, x, decode(w, row), bias)
    assert_close(quant_linear(x, w, row.id, None, False), x, decode(w, row))


@pytest.mark.parametrize("row", FLOAT_TYPES, ids=by_name)
@pytest.mark.parametrize("K", [1, 15, 16, 17, 100, 1024, 1025, 2063])
def test_odd_sizes(isa, row, K):
    for M, N in ((1, 1), (1, 6), (2, 3), (5, 7), (6, 4), (13, 50)):
        w, x, bias = random_rows(row, N, K), torch.randn(M, K), torch.randn(N)
        assert_close(quant_linear(x, w, row.id, bias, False), x, decode(w, row), bias)


@pytest.mark.parametrize("row", TYPES, ids=by_name)
def test_bits_are_the_same_on_every_instruction_set(row):
    for K in (width(row), 1029) if row.id in FLOATS else (width(row),):
        w, x, bias = random_rows(row, 9, K), torch.randn(8, K), torch.randn(9)
        results = []
        for name in ISAS:
            registry.set_isa(name)
            results += [quant_linear(x, w, row.id, bias, False), quant_linear(x[:1], w, row.id, bias, False)]
        registry.set_isa(None)
        for y, y1 in zip(results[2::2], results[3::2], strict=True):
            assert_same_bits(y, results[0])
            assert_same_bits(y1, results[1])


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize(
    "row", [r for r in TYPES if r.name in ("F32", "F16", "BF16", "Q4_0", "Q6_K", "NVFP4")], ids=by_name
)
def test_a_row_does_not_depend_on_its_neighbours(row, native, threads):
    if native and row.id not in FLOATS:
        pytest.skip("integer products are another kernel")
    K, N = width(row), 101
    w, x, bias = random_rows(row, N, K), torch.randn(530, K), torch.randn(N)
    threads(1)
    alone = torch.cat([quant_linear(x[m : m + 1], w, row.id, bias, native) for m in range(14)])
    whole = quant_linear(x, w, row.id, bias, native)
    assert_same_bits(whole[:14], alone)
    for M in range(1, 15):
        assert_same_bits(quant_linear(x[:M], w, row.id, bias, native), alone[:M])
    assert_same_bits(quant_linear(x[517:], w, row.id, bias, native), whole[517:])
    for n in (2, 3, 8):
        threads(n)
        assert_same_bits(quant_linear(x, w, row.id, bias, native), whole)
        assert_same_bits(quant_linear(x[:1], w, row.id, bias, native), alone[:1])
    # a fault stays in its row and its column
    x[3, 5] = float("nan")
    y = quant_linear(x, w, row.id, bias, native)
    assert y[3].isnan().all()
    assert_same_bits(y[:3], whole[:3])
    assert_same_bits(y[4:], whole[4:])


@pytest.mark.parametrize("row", [*FLOAT_TYPES, ggml_types.GGML_TYPES[ggml_types.Q5_K]], ids=by_name)
def test_views_between_guards(isa, row):
    """x and the weight are views with offsets into buffers of NaN: nothing outside them may be read into a result."""
    K, N = (1029 if row.id in FLOATS else 1280), 7
    w = random_rows(row, N, K)
    for M in (1, 8):
        x = torch.randn(M, K)
        want = quant_linear(x, w, row.id, None, False)
        around_x = torch.full((2 * M + 3, K + 5), float("nan"))
        around_x[1 : 2 * M + 1 : 2, 3 : K + 3] = x
        around_w = torch.full((w.numel() + 131,), 0xFF, dtype=torch.uint8)  # 0xFF.. is a NaN in every float type
        around_w[65:-66] = w.flatten()  # an odd address
        view_w = around_w[65:-66].view(N, -1)
        assert_same_bits(quant_linear(around_x[1 : 2 * M + 1 : 2, 3 : K + 3], view_w, row.id, None, False), want)
        columns = torch.full((K, M + 1), float("nan"))
        columns[:, :M] = x.T
        assert_same_bits(quant_linear(columns[:, :M].T, view_w, row.id, None, False), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", [*FLOAT_TYPES, ggml_types.GGML_TYPES[ggml_types.Q8_0]], ids=by_name)
def test_half_activations(isa, row, dtype):
    w = random_rows(row, 5, 1056)
    x, bias = torch.randn(2, 3, 1056).to(dtype), torch.randn(5)
    y = quant_linear(x, w, row.id, bias, False)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 5)
    assert_close(y.flatten(0, 1), x.flatten(0, 1), decode(w, row), bias)
    assert_same_bits(quant_linear(x.float(), w, row.id, bias, False).to(dtype).float(), y.float())


@pytest.mark.parametrize("row", FLOAT_TYPES, ids=by_name)
def test_native_rounds_the_activation_to_the_type_of_the_weight(isa, row):
    w = random_rows(row, 5, 77)
    specials = torch.tensor([65504.0, 65519.9, 1e-7, -3e-8, 3e-8, 6e-5, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8])
    for M in (1, 9):
        x = torch.randn(M, 77) * 3
        x[-1, : len(specials)] = specials
        rounded = x.to(FLOATS[row.id]).float()
        y = quant_linear(x, w, row.id, None, True)
        assert_close(y, rounded, decode(w, row))
        assert_same_bits(y, quant_linear(rounded, w, row.id, None, False))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_native_against_ggml(isa, oracle, name):
    """The stored product of ggml's own kernels: last layer's ffn_down of the tiny model of this type."""
    row = ggml_types.by_name(name)
    folder = oracle / "quant"
    golden = np.load(folder / f"llama-{name.lower()}.npz")
    tensors = {t.name: t for t in gguf.GGUFReader(folder / f"llama-{name.lower()}.gguf").tensors}
    last = max((n for n in tensors if n.endswith("ffn_down.weight")), key=lambda n: int(n.split(".")[1]))
    w = torch.from_numpy(np.array(tensors[last].data)).view(torch.uint8).view(len(tensors[last].data), -1)
    y = quant_linear(torch.from_numpy(golden["mm_x"]), w, row.id, None, True)
    want = torch.from_numpy(golden["mm_y"])
    assert (y - want).abs().max() <= tolerances.GGML_PRODUCT * want.abs().max()


def test_empty_sizes(isa):
    F32 = ggml_types.F32
    w = torch.randn(3, 16).view(torch.uint8)
    assert quant_linear(torch.randn(0, 16), w, F32, None, False).shape == (0, 3)
    assert quant_linear(torch.randn(2, 16), w[:0], F32, None, False).shape == (2, 0)
    bias = torch.randn(3)
    for M in (2, 20):
        no_columns = quant_linear(torch.randn(M, 0), torch.empty(3, 0, dtype=torch.uint8), F32, bias, False)
        assert torch.equal(no_columns, bias.expand(M, 3))


X, W = torch.zeros(2, 64), torch.zeros(3, 36, dtype=torch.uint8)  # Q4_0: 18 bytes for 32


@pytest.mark.parametrize(
    ("x", "qweight", "qtype", "bias"),
    [
        (torch.zeros(2, 63), W, ggml_types.Q4_0, None),
        (torch.zeros(()), W, ggml_types.Q4_0, None),
        (X.int(), W, ggml_types.Q4_0, None),
        (X, W[:, :35], ggml_types.Q4_0, None),
        (X, torch.zeros(3, 37, dtype=torch.uint8), ggml_types.Q4_0, None),
        (X, W.to(torch.int8), ggml_types.Q4_0, None),
        (X, W[None], ggml_types.Q4_0, None),
        (X, W, ggml_types.Q8_1, None),
        (X, W, 4, None),
        (X, W, -1, None),
        (X, W, 2**32 + ggml_types.Q4_0, None),
        (X, W, ggml_types.Q4_0, torch.zeros(2)),
        (X, W, ggml_types.Q4_0, torch.zeros(3, 1)),
        (X, W, ggml_types.Q4_0, torch.zeros(3).half()),
    ],
)
def test_wrong_arguments_are_refused_by_name(x, qweight, qtype, bias):
    with pytest.raises(RuntimeError, match="dasllama::quant_linear: (x|qweight|qtype|bias)"):
        quant_linear(x, qweight, qtype, bias, False)


@pytest.mark.parametrize("row", [*FLOAT_TYPES, ggml_types.GGML_TYPES[ggml_types.Q4_K]], ids=by_name)
def test_opcheck(row):
    w, K = random_rows(row, 6, 256), 256
    for x in (torch.randn(3, K), torch.randn(2, 1, K, requires_grad=True), torch.randn(K)):
        torch.library.opcheck(quant_linear, (x, w, row.id, torch.randn(6), False))
    torch.library.opcheck(quant_linear, (torch.randn(2, K), w, row.id, None, row.id in FLOATS))
