"""quant_linear with native=True on packed types: integer products, folded in one order.

Three oracles: ggml's stored products, the reference (which test_quant_linear_reference holds against f64), and the rule
that an output's bits depend on nothing but its own row of x and of the weight: not on instruction set, tile or threads.
"""

import json
from functools import cache

import numpy as np
import pytest
import tolerances
import torch
from conftest import ROOT
from packed import FLOATS, TYPES, assert_same_bits, random_rows

from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.quant_linear import quant_linear, shared_activations

ISAS = registry.isas()
PACKED = [row for row in TYPES if row.id not in FLOATS]
SOME = [row for row in PACKED if row.name in ("Q4_1", "Q5_0", "Q8_0", "NVFP4", "Q2_K", "Q4_K", "Q6_K", "IQ3_S")]


def by_name(row):
    return row.name


def widths(row: ggml_types.GGMLType) -> list[int]:
    """One block, and counts of blocks that no vector of blocks divides."""
    return [row.block * n for n in ((1, 2, 3) if row.block == 256 else (1, 2, 5, 18, 19))]


def random_x(M: int, K: int, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, with an outlier, ties for the largest magnitude and a block of zeros among them."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, M)[:, None]
    x[:, 7] *= 30
    x[M // 2, :32] = 0
    x[-1, 1], x[-1, 3] = x[-1].abs().max(), -x[-1].abs().max()
    return x


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_ggml_products(isa, oracle, row):
    """The stored products of ggml's own kernels: last layer's ffn_down of the tiny model of this type."""
    path = oracle / "quant" / f"llama-{row.name.lower()}.gguf"
    golden, index = np.load(path.with_suffix(".npz")), json.loads((path.parent / "index.json").read_text())
    w = torch.from_numpy(GGUFFile(path).tensors[index["models"][row.name]["matmul"]["tensor"]].data.copy())
    want = torch.from_numpy(golden["mm_y"])
    y = quant_linear(torch.from_numpy(golden["mm_x"]), w, row.id, None, True)
    assert (y - want).abs().max() <= tolerances.GGML_PRODUCT * want.abs().max()


@cache  # one for all instruction sets
def referred(qtype, M, N, K):
    """x, the weight, a bias, and what the reference makes of them with the bias and without."""
    w, x, bias = random_rows(ggml_types.GGML_TYPES[qtype], N, K), random_x(M, K), torch.randn(N)
    return x, w, bias, *(quant_linear.reference(x, w, qtype, b, True) for b in (bias, None))


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_bits_are_those_of_the_reference(isa, row):
    for K in widths(row):
        for M, N in ((1, 1), (3, 37), (7, 37), (13, 16)):
            x, w, bias, with_bias, without = referred(row.id, M, N, K)
            registry.reset_report()
            y = quant_linear(x, w, row.id, bias, True)
            assert registry.report() == {"quant_linear": {f"cpu/{isa}": 1}}
            assert_same_bits(y, with_bias)
            assert_same_bits(quant_linear(x, w, row.id, None, True), without)


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_a_row_does_not_depend_on_its_neighbours(isa, row, threads):
    K, N = widths(row)[-1], 130
    w, x, bias = random_rows(row, N, K), random_x(65, K), torch.randn(N)
    threads(1)
    whole = quant_linear(x, w, row.id, bias, True)
    for m in (0, 31, 32, 64):
        assert_same_bits(quant_linear(x[m], w, row.id, bias, True), whole[m])
    for M in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 33):
        assert_same_bits(quant_linear(x[65 - M :], w, row.id, bias, True), whole[65 - M :])
    for first, last in ((0, 1), (1, 16), (3, 40), (129, 130)):
        some = quant_linear(x, w[first:last], row.id, bias[first:last], True)
        assert_same_bits(some, whole[:, first:last].contiguous())
    for n in (2, 3, 8):
        threads(n)
        assert_same_bits(quant_linear(x, w, row.id, bias, True), whole)
        assert_same_bits(quant_linear(x[:2], w, row.id, bias, True), whole[:2])


def test_shared_activations(isa):
    """One rounding serves all weights of a lattice, for as long as the context; another x or lattice is none of it."""
    q4_0, q4_k = (next(row for row in PACKED if row.name == name) for name in ("Q4_0", "Q4_K"))
    x, later = random_x(9, 512), random_x(9, 512)
    w4, k4 = (random_rows(row, 21, 512) for row in (q4_0, q4_k))
    of_x, of_later = (quant_linear(values, w4, q4_0.id, None, True) for values in (x, later))
    of_k4 = quant_linear(later, k4, q4_k.id, None, True)
    with shared_activations():
        quant_linear(x, w4, q4_0.id, None, True)
        x.copy_(later)  # what the caller promises not to do: it shows which rounding is used
        assert_same_bits(quant_linear(x, w4, q4_0.id, None, True), of_x)
        assert_same_bits(quant_linear(x.clone(), w4, q4_0.id, None, True), of_later)
        assert_same_bits(quant_linear(x, k4, q4_k.id, None, True), of_k4)
        assert_same_bits(quant_linear(x[:5], w4, q4_0.id, None, True), of_later[:5])
    assert_same_bits(quant_linear(x, w4, q4_0.id, None, True), of_later)


@pytest.mark.parametrize(
    "names", [("Q4_0", "Q8_0"), ("Q8_0", "Q5_0"), ("Q4_K", "Q6_K"), ("Q6_K", "IQ4_XS")], ids=" ".join
)
def test_shared_activations_of_two_types(isa, names):
    """Types of one lattice may want its sums by other groups or with another bias."""
    rows = [next(row for row in PACKED if row.name == name) for name in names]
    x, weights = random_x(9, 512), [random_rows(row, 21, 512) for row in rows]
    alone = [quant_linear(x, w, row.id, None, True) for w, row in zip(weights, rows, strict=True)]
    with shared_activations():
        for _ in range(2):
            for w, row, want in zip(weights, rows, alone, strict=True):
                assert_same_bits(quant_linear(x, w, row.id, None, True), want)
        del x  # its memory may go to the next tensor only if nothing holds its rounding
        other = random_x(9, 512, seed=1)
        found = quant_linear(other, weights[0], rows[0].id, None, True)
    assert_same_bits(found, quant_linear(other, weights[0], rows[0].id, None, True))


def assert_sets_agree(row: ggml_types.GGMLType, M: int, N: int, K: int) -> None:
    w, x = random_rows(row, N, K), random_x(M, K)
    registry.set_isa("scalar")
    want = quant_linear(x, w, row.id, None, True)
    for name in ISAS[1:]:
        registry.set_isa(name)
        assert_same_bits(quant_linear(x, w, row.id, None, True), want)
    registry.set_isa(None)


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_instruction_sets_agree_on_large_matrices(row):
    """Sizes at which rows are cut into windows and tasks: more than 8 MiB of activations, and few weight rows."""
    K = 2048 if row.block == 256 else 2016 if row.block == 32 else 2048
    for M, N in ((300, 40), (4200, 3)):
        assert_sets_agree(row, M, N, K)


@pytest.mark.parametrize("row", [row for row in PACKED if row.block == 256], ids=by_name)
def test_instruction_sets_agree_on_few_long_rows(row):
    """While few rows of x are short, weights are taken row after row; beyond that, a block of each row in turn."""
    for M, K in ((1, 8192), (1, 8448), (2, 4096), (3, 2816), (4, 2048), (4, 2304)):
        assert_sets_agree(row, M, 37, K)


def with_scales_of_one(blocks, row):
    """Blocks u8 [n, bytes] of any bytes, with d, m and dmin of one, whatever the integers and their scales."""
    one = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # f16
    for at in F16_FIELDS.get(row.name, [0]):
        blocks[:, at : at + 2] = one
    if row.name == "MXFP4":
        blocks[:, 0] = 128
    if row.name == "NVFP4":
        blocks[:, :4] = 0x38
    if row.name == "IQ1_M":  # the f16 lies in the top nibbles of four words
        for i, nibble in enumerate((0x0, 0x0, 0xC, 0x3)):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 0x0F | nibble << 4
    return blocks


F16_FIELDS = {
    "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208],
    "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "NVFP4": [], "IQ1_M": [],
}  # fmt: skip


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_extreme_integers_do_not_saturate(isa, row):
    """Weights of one repeated byte, which holds every type's extremes, times activations of +-127 in few patterns: the
    largest sums that there are, in 16 bits on AVX2."""
    K = 512
    fills = torch.tensor([0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x88, 0x77, 0x55, 0xAA], dtype=torch.uint8)
    blocks = fills[:, None, None].expand(-1, K // row.block, row.bytes).reshape(-1, row.bytes)
    w = with_scales_of_one(blocks.clone(), row).view(len(fills), -1)
    signs = torch.stack([torch.ones(K), -torch.ones(K), torch.tensor([1.0, -1.0]).repeat(K // 2)])
    for M in (1, 4, 9):
        x = 127 * signs.repeat(3, 1)[:M]
        y, want = (f(x, w, row.id, None, True) for f in (quant_linear, quant_linear.reference))
        assert want.isfinite().all()
        assert (want[0] != 0).sum() > 1
        assert_same_bits(y, want)


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_views_between_guards(isa, row):
    """x and the weight are views with offsets into buffers of NaN: nothing outside them may get into a result."""
    K, N = widths(row)[2], 21
    w = random_rows(row, N, K)
    for M in (1, 4, 9):
        x = random_x(M, K)
        want = quant_linear(x, w, row.id, None, True)
        around_x = torch.full((2 * M + 3, K + 5), float("nan"))
        around_x[1 : 2 * M + 1 : 2, 3 : K + 3] = x
        around_w = torch.full((w.numel() + 131,), 0xFF, dtype=torch.uint8)
        around_w[65:-66] = w.flatten()  # an odd address
        got = quant_linear(around_x[1 : 2 * M + 1 : 2, 3 : K + 3], around_w[65:-66].view(N, -1), row.id, None, True)
        assert_same_bits(got, want)


@pytest.mark.parametrize("row", PACKED, ids=by_name)
def test_reads_end_with_the_weight(isa, row, tmp_path):
    """The last byte of the weight is the last of a mapped file: a longer read would meet the end of the mapping."""
    page = 4096
    for K in widths(row):
        row_bytes = row.row_bytes(K)
        N = 17 * page // row_bytes + 1
        w = random_rows(row, 1, K).expand(N, -1).contiguous()
        path = tmp_path / f"{K}"
        path.write_bytes(bytes(-w.numel() % page) + w.numpy().tobytes())
        mapped = torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(path.stat().st_size,)))
        tail = mapped[mapped.numel() - w.numel() :].view(N, row_bytes)
        for M in (1, 6):
            x = random_x(M, K)
            assert_same_bits(quant_linear(x, tail, row.id, None, True), quant_linear(x, w, row.id, None, True))


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_faults_stay_in_their_row(isa, row):
    K, N = widths(row)[-1], 20
    w, x = random_rows(row, N, K), random_x(9, K)
    want = quant_linear(x, w, row.id, None, True)
    for fault in (float("nan"), float("inf"), float("-inf")):
        for M in (2, 9):
            bad = x[:M].clone()
            bad[1, K // 2] = fault
            y = quant_linear(bad, w, row.id, None, True)
            assert not y[1].isfinite().any()
            assert_same_bits(y[0], want[0])
            assert_same_bits(y[2:], want[2:M])


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_extreme_activations(isa, row):
    """Zeros give the bias; subnormals and f16's and f32's ends give what the reference gives."""
    K, N = widths(row)[1], 20
    w, bias = random_rows(row, N, K), torch.randn(N)
    assert torch.equal(quant_linear(torch.zeros(5, K), w, row.id, bias, True), bias.expand(5, N))
    for scale in (1e-45, 1e-40, 3e-38, 1e-10, 7e4, 8e6, 1e30, 3e38):
        x = torch.linspace(-1, 1, K).repeat(5, 1) * scale
        y, want = quant_linear(x, w, row.id, None, True), quant_linear.reference(x, w, row.id, None, True)
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_half_activations(isa, row, dtype):
    K = widths(row)[1]
    w, bias = random_rows(row, 5, K), torch.randn(5)
    x = torch.randn(2, 3, K).to(dtype)
    y = quant_linear(x, w, row.id, bias, True)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 5)
    assert torch.equal(quant_linear(x.float(), w, row.id, bias, True).to(dtype), y)


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_empty_sizes(isa, row):
    K = row.block
    w = random_rows(row, 3, K)
    assert quant_linear(torch.randn(0, K), w, row.id, None, True).shape == (0, 3)
    assert quant_linear(torch.randn(2, 0, K), w, row.id, None, True).shape == (2, 0, 3)
    assert quant_linear(torch.randn(2, K), w[:0], row.id, None, True).shape == (2, 0)
    bias = torch.randn(3)
    for M in (2, 20):
        y = quant_linear(torch.randn(M, 0), torch.empty(3, 0, dtype=torch.uint8), row.id, bias, True)
        assert torch.equal(y, bias.expand(M, 3))


X, W = torch.zeros(2, 64), torch.zeros(3, 36, dtype=torch.uint8)  # Q4_0: 18 bytes for 32


@pytest.mark.parametrize(
    ("x", "qweight", "qtype", "bias", "wanted"),
    [
        (torch.zeros(2, 32), W, ggml_types.Q4_0, None, "64"),
        (torch.zeros(()), W, ggml_types.Q4_0, None, "x must be"),
        (X.int(), W, ggml_types.Q4_0, None, "x must be"),
        (X, W[:, :35].contiguous(), ggml_types.Q4_0, None, "18"),
        (X, W[:, ::2], ggml_types.Q4_0, None, "contiguous"),
        (X, W[0], ggml_types.Q4_0, None, "qweight"),
        (X, W.view(torch.int8), ggml_types.Q4_0, None, "uint8"),
        (X, W, 4, None, "4"),
        (X, W, ggml_types.Q8_K, None, "15|Q8_K"),
        (X, W, -1, None, "-1"),
        (X, W, ggml_types.Q4_0, torch.zeros(2), "bias"),
        (X, W, ggml_types.Q4_0, torch.zeros(3).half(), "bias"),
        (X, W, ggml_types.Q4_0, torch.zeros(6)[::2], "bias"),
    ],
)
def test_wrong_arguments_are_refused(isa, x, qweight, qtype, bias, wanted):
    with pytest.raises(RuntimeError, match=wanted) as caught:
        quant_linear(x, qweight, qtype, bias, True)
    assert str(ROOT) not in str(caught.value)  # where the kernels were compiled


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_opcheck(row):
    w, x = random_rows(row, 3, row.block), torch.randn(2, row.block)
    torch.library.opcheck(torch.ops.dasllama.quant_linear.default, (x, w, row.id, torch.randn(3), True))
    torch.library.opcheck(torch.ops.dasllama.quant_linear.default, (x.requires_grad_(), w, row.id, None, True))
