"""Routers, experts and their sums in Triton, against the references and, where halves are multiplied, float64."""

import pytest
import tolerances
import torch
from packed import FLOATS, TYPES, decode, random_rows
from triton_device import DEVICE, cases, guarded, ragged

from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.expert_linear import expert_linear as expert_linear_op
from dasllama_torch.ops.expert_linear import expert_linear_backward as expert_linear_backward_op
from dasllama_torch.ops.moe_combine import moe_combine as moe_combine_op
from dasllama_torch.ops.moe_router import SIGMOID, SOFTMAX
from dasllama_torch.ops.moe_router import moe_router as moe_router_op
from dasllama_torch.triton_kernels import expert_linear as module
from dasllama_torch.triton_kernels import few_rows_experts, grouped_rows
from dasllama_torch.triton_kernels.expert_linear import expert_linear, expert_linear_backward
from dasllama_torch.triton_kernels.moe_combine import moe_combine
from dasllama_torch.triton_kernels.moe_router import moe_router

PACKED = [row for row in TYPES if row.name in ("Q4_K", "Q5_0", "MXFP4")]
TOGETHER = [
    ("Q4_K", 768),
    ("Q5_K", 768),
    ("Q6_K", 512),
    ("Q8_0", 288),
    ("IQ4_NL", 288),
    ("IQ4_XS", 768),
    ("MXFP4", 288),
]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def here(*tensors):
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in tensors]


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize(("gate", "renormalize"), [(g, r) for g in (SOFTMAX, SIGMOID) for r in (False, True)])
@pytest.mark.parametrize(("E", "k"), cases([(1, 1), (61, 6), (128, 128)], (1, 1), (61, 6)))
def test_router(E, k, gate, renormalize):
    logits, bias = torch.randn(7, E) * 3, torch.randn(E) if gate == SIGMOID else None
    logits[1] = -logits[1].abs() - 1
    logits[1, : E // 2] = 0.0
    logits[1, 1 : E // 2 : 2] = -0.0  # ties with zeros of the other sign
    logits[2, E // 3] = INF
    logits[3, E // 2 :] = -INF
    logits[4, E // 4] = NAN
    logits[5, :] = 2.5
    weights, ids = moe_router(ragged(logits), *here(bias), k, gate, renormalize, 1.7)
    wanted, wanted_ids = moe_router_op.reference(logits, bias, k, gate, renormalize, 1.7)
    assert torch.equal(ids.cpu(), wanted_ids)
    torch.testing.assert_close(weights.cpu(), wanted, rtol=2e-6, atol=1e-30, equal_nan=True)
    assert ids.dtype == torch.int64


def test_combine():
    y, weights = torch.randn(3, 5, 4, 700), torch.rand(3, 5, 4)
    assert_near(moe_combine(ragged(y), weights.to(DEVICE)), moe_combine_op.reference(y, weights), 1e-6)
    assert moe_combine(y[:0].to(DEVICE), weights[:0].to(DEVICE)).shape == (0, 5, 700)


def stack(row, E, N, K):
    return random_rows(row, E * N, K).view(E, N, -1)


def choose(T, k, E):
    return torch.stack([torch.randperm(E)[:k] for _ in range(T)])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("row", cases(PACKED, "Q4_K", "Q5_0"), ids=lambda row: row.name)
def test_few_tokens(row, native):
    E, N, K = 5, 3, 2 * row.block
    w, bias = stack(row, E, N, K), torch.randn(E, N)
    for T, k, each in ((1, 1, False), (3, 2, False), (3, 2, True)):
        ids = choose(T, k, E)
        x = torch.randn(T, k, K) if each else torch.randn(T, K)
        found = expert_linear(ragged(x), guarded(w), row.id, ids.to(DEVICE), bias.to(DEVICE), native)
        assert_near(found, expert_linear_op.reference(x, w, row.id, ids, bias, native), tolerances.TRITON_PRODUCT)


@pytest.mark.parametrize("case", cases(TOGETHER, TOGETHER[-1]), ids=str)
def test_rows_of_an_expert_share_its_matrix(case, monkeypatch):
    """Experts that have no row, one and more than a tile's; ids that are none. Rows are the same in other batches,
    whose tiles are of other sizes."""
    monkeypatch.setattr(module, "_least", lambda _: 0)
    monkeypatch.setattr(few_rows_experts, "CELLS", 512)  # entries come to the plan in several pieces
    name, K = case
    row, (E, N, T) = ggml_types.by_name(name), (19, 21, 34)
    w, bias, x = stack(row, E, N, K), torch.randn(E, N), torch.randn(T, K)
    ids = torch.stack([torch.full((T,), E - 1), torch.randint(0, 7, (T,))], 1)
    ids[3, 1], ids[5, 1] = E, -1
    placed = guarded(w)

    def call(at: slice) -> torch.Tensor:
        return expert_linear(ragged(x[at]), placed, row.id, ids[at].to(DEVICE), bias.to(DEVICE), True).cpu()

    registry.reset_report()
    found = call(slice(None))
    assert list(registry.report()["expert_linear"]) == ["triton/few_rows_experts"]
    known = (ids >= 0) & (ids < E)
    wanted = expert_linear_op.reference(x, w, row.id, ids.clamp(0, E - 1), bias, True)
    assert found[~known].isnan().all()
    assert_near(found[known], wanted[known], tolerances.TRITON_PRODUCT)
    for at in cases([slice(2, 4), slice(0, 11), slice(9, 34)], slice(2, 4)):
        assert torch.equal(call(at).view(torch.int32), found[at].view(torch.int32))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", cases(["F32", "F16", "Q4_K", "Q5_0"], "F16", "Q5_0"))
def test_many_tokens(name, native, monkeypatch):
    """Rows by expert, some of which have none and some more than a tile's, and matrices that are decoded three at a
    time; f16, as the interpreter cuts bf16 off."""
    monkeypatch.setattr(module, "FEW", 0)
    row, (E, N, T) = ggml_types.by_name(name), (7, 70, 75)
    K = 50 if row.id in FLOATS else 3 * row.block
    monkeypatch.setattr(grouped_rows, "SCRATCH", 3 * N * K * (2 if native else 4))
    w, bias, x = stack(row, E, N, K), torch.randn(E, N), torch.randn(T, K).half()
    ids = torch.stack([torch.full((T,), E - 1), torch.randint(0, 3, (T,))], 1)
    found = expert_linear(ragged(x), guarded(w), row.id, ids.to(DEVICE), bias.to(DEVICE), native).cpu()
    w64 = w.view(torch.float32 if row.id == ggml_types.F32 else torch.float16).double() if row.id in FLOATS else (
        decode(w.view(E * N, -1), row).view(E, N, K)
    )  # fmt: skip
    if native and row.id not in FLOATS:
        w64 = w64.half().double()
    wanted = torch.einsum("tk,tank->tan", x.double(), w64[ids]) + bias[ids]
    size = torch.einsum("tk,tank->tan", x.double().abs(), w64[ids].abs()) + bias[ids].abs()
    rounding = tolerances.OUTPUT_ROUNDOFF["float16"] * wanted.abs()
    assert ((found.double() - wanted).abs() <= rounding + tolerances.TRITON_HALF_PRODUCT * size).all()


def test_rows_of_their_own_and_grouped_are_alike(monkeypatch):
    monkeypatch.setattr(module, "FEW", 0)
    row = ggml_types.by_name("Q4_K")
    w, x, ids = stack(row, 3, 5, 256), torch.randn(4, 2, 256), choose(4, 2, 3).int()
    found = expert_linear(x.to(DEVICE), w.to(DEVICE), row.id, ids.to(DEVICE), None, False)
    assert_near(found, expert_linear_op.reference(x, w, row.id, ids, None, False), tolerances.TRITON_PRODUCT)


@pytest.mark.parametrize("few", [16, 0])
def test_ids_that_no_expert_has_give_nan(few, monkeypatch):
    monkeypatch.setattr(module, "FEW", few)
    row = ggml_types.by_name("Q4_K")
    w, x, ids = stack(row, 3, 5, 256), torch.randn(2, 256), torch.tensor([[0, 3], [-1, 2]])
    found = expert_linear(x.to(DEVICE), w.to(DEVICE), row.id, ids.to(DEVICE), None, False).cpu()
    assert found[0, 1].isnan().all()
    assert found[1, 0].isnan().all()
    for at in ((0, 0), (1, 1)):
        wanted = expert_linear_op.reference(x[at[0]][None], w, row.id, ids[at][None, None], None, False)[0, 0]
        assert_near(found[at], wanted, tolerances.TRITON_PRODUCT)


def test_nothing():
    row = ggml_types.by_name("Q4_K")
    w, ids = stack(row, 3, 5, 256).to(DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    assert expert_linear(torch.zeros(0, 256, device=DEVICE), w, row.id, ids, None, True).shape == (0, 2, 5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["F16", "Q5_1"])
def test_gradient_of_experts(name, shared):
    row = ggml_types.by_name(name)
    w, grad, ids = stack(row, 4, 6, 64), torch.randn(5, 2, 6), choose(5, 2, 4)
    found = expert_linear_backward(*here(grad, w), row.id, ids.to(DEVICE), shared)
    assert_near(found, expert_linear_backward_op.reference(grad, w, row.id, ids, shared), tolerances.TRITON_PRODUCT)
