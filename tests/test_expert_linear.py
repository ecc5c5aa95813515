"""expert_linear: every row is quant_linear's with the matrix of its expert, to the bit, whatever the grouping."""

import pytest
import torch
from packed import FLOATS, TYPES, random_rows
from tolerances import GRADIENT

from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.expert_linear import expert_linear, expert_linear_backward
from dasllama_torch.ops.quant_linear import quant_linear, quant_linear_backward

SOME = [row for row in TYPES if row.name in ("F32", "BF16", "Q4_1", "Q8_0", "MXFP4", "NVFP4", "Q4_K", "IQ3_S")]


def by_name(row):
    return row.name


def stack(row, E, N, K, seed=0):
    return random_rows(row, E * N, K, seed).view(E, N, -1)


def width(row):
    return 77 if row.id in FLOATS else 2 * row.block


def choose(T, k, E, seed=0):
    """k different experts for each of T tokens; the first expert is never chosen, some others often."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linspace(0, 1, E).square().expand(T, E)
    return torch.multinomial(weights, k, generator=generator)


def row_by_row(x, w, qtype, ids, bias, native):
    x = x if x.dim() > ids.dim() else x.unsqueeze(-2).expand(*ids.shape, -1)
    rows = [
        quant_linear(row, w[e], qtype, None if bias is None else bias[e], native)
        for row, e in zip(x.flatten(0, -2), ids.flatten().tolist(), strict=True)
    ]
    return torch.stack(rows).view(*ids.shape, -1)


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize("row", TYPES, ids=by_name)
def test_rows_are_those_of_quant_linear(isa, row, native):
    E, N, K = 5, 37, width(row)
    w, bias = stack(row, E, N, K), torch.randn(E, N)
    for T, k in ((1, 1), (1, 3), (40, 2)):  # a row for each expert, and many rows for some
        ids = choose(T, k, E)
        for x in (torch.randn(T, K), torch.randn(T, k, K)):
            registry.reset_report()
            y = expert_linear(x, w, row.id, ids, bias, native)
            assert registry.report() == {"expert_linear": {f"cpu/{isa}": 1}}
            assert torch.equal(y, row_by_row(x, w, row.id, ids, bias, native))
            assert torch.equal(y, expert_linear(x, w, row.id, ids.int(), bias, native))


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_the_reference_agrees(row, native):
    E, N, K = 4, 9, width(row)
    w, ids, x = stack(row, E, N, K), choose(11, 2, E), torch.randn(11, K)
    for bias in (None, torch.randn(E, N)):
        found, wanted = (op(x, w, row.id, ids, bias, native) for op in (expert_linear, expert_linear.reference))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_bits_depend_on_nothing_but_the_row(row, native, threads):
    """Not on other tokens, on how many rows an expert has, on threads or on the instruction set."""
    E, N, K = 6, 150, 3 * width(row)
    w, ids, x = stack(row, E, N, K), choose(130, 3, E), torch.randn(130, K)
    threads(1)
    whole = expert_linear(x, w, row.id, ids, None, native)
    try:
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (1, 2, 5):
                threads(n)
                assert torch.equal(expert_linear(x, w, row.id, ids, None, native), whole)
                for first, last in ((0, 1), (7, 9), (30, 94)):
                    some = expert_linear(x[first:last], w, row.id, ids[first:last], None, native)
                    assert torch.equal(some, whole[first:last])
    finally:
        registry.set_isa(None)


@pytest.mark.parametrize("native", [False, True], ids=["fp32", "native"])
def test_stacks_are_indexed_by_expert(isa, native):
    """Expert e is the constant e: the output shows which matrix a row met."""
    E, N, K = 7, 20, 64
    w = torch.arange(E).float()[:, None, None].expand(E, N, K).contiguous().view(torch.uint8)
    ids = torch.tensor([[[6, 0], [3, 1]], [[5, 5], [2, 4]]])
    y = expert_linear(torch.full((2, 2, K), 1 / K), w, ggml_types.F32, ids, None, native)
    assert torch.equal(y, ids.float().unsqueeze(-1).expand(2, 2, 2, N))


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_views_between_guards(isa, row):
    E, N, K = 3, 10, width(row)
    w, ids, x = stack(row, E, N, K), choose(6, 2, E), torch.randn(6, K)
    around = torch.full((15, K + 7), float("nan"))
    around[1:13:2, 3 : K + 3] = x
    guarded = torch.full((w.numel() + 20,), 0xFF, dtype=torch.uint8)
    guarded[9:-11] = w.flatten()
    wide = torch.full((6, 5), -1)
    wide[:, 1:4:2] = ids
    for native in (False, True):
        found = expert_linear(
            around[1:13:2, 3 : K + 3], guarded[9:-11].view(E, N, -1), row.id, wide[:, 1:4:2], None, native
        )
        assert torch.equal(found, expert_linear(x, w, row.id, ids, None, native))


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_faults_stay_in_their_token(isa, row):
    E, N, K = 3, 10, width(row)
    w, ids, x = stack(row, E, N, K), choose(9, 2, E), torch.randn(9, K)
    bad = x.clone()
    bad[4, 5] = float("nan")
    for native in (False, True):
        found, wanted = (expert_linear(v, w, row.id, ids, None, native) for v in (bad, x))
        assert not found[4].isfinite().any()
        keep = torch.arange(9) != 4
        assert torch.equal(found[keep], wanted[keep])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_activations(isa, dtype):
    row = ggml_types.GGML_TYPES[ggml_types.Q8_0]
    w, ids, x = stack(row, 3, 8, 64), choose(5, 2, 3), torch.randn(5, 64).to(dtype)
    y = expert_linear(x, w, row.id, ids, None, True)
    assert y.dtype == dtype
    assert torch.equal(y, expert_linear(x.float(), w, row.id, ids, None, True).to(dtype))


def test_empty_sizes(isa):
    for qtype, row_bytes in ((ggml_types.Q8_0, 34), (ggml_types.F32, 128)):
        w = torch.zeros(3, 4, row_bytes, dtype=torch.uint8)
        ids = torch.zeros(0, 2, dtype=torch.int64)
        assert expert_linear(torch.zeros(0, 32), w, qtype, ids, None, True).shape == (0, 2, 4)
        assert expert_linear(torch.zeros(5, 32), w[:, :0], qtype, ids.new_zeros(5, 2), None, True).shape == (5, 2, 0)
        assert expert_linear(torch.zeros(5, 32), w, qtype, ids.new_zeros(5, 0), None, True).shape == (5, 0, 4)
        assert expert_linear_backward(torch.zeros(0, 2, 4), w, qtype, ids, True).shape == (0, 32)
        found = expert_linear_backward(torch.zeros(5, 0, 4), w, qtype, ids.new_zeros(5, 0), True)
        assert torch.equal(found, torch.zeros(5, 32))


# ---- the gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", SOME, ids=by_name)
def test_gradients_are_those_of_quant_linear(isa, row, threads):
    E, N, K = 5, 37, width(row)
    w, ids, grad = stack(row, E, N, K), choose(40, 3, E), torch.randn(40, 3, N)
    pairs = zip(grad.flatten(0, 1), ids.flatten().tolist(), strict=True)
    wanted = torch.stack([quant_linear_backward(g, w[e], row.id) for g, e in pairs]).view(40, 3, K)
    total = torch.zeros(40, K)
    for part in wanted.unbind(1):
        total = total + part
    for n in (1, 3):
        threads(n)
        assert torch.equal(expert_linear_backward(grad, w, row.id, ids, False), wanted)
        assert torch.equal(expert_linear_backward(grad, w, row.id, ids, True), total)
    reference = expert_linear_backward.reference(grad, w, row.id, ids, True)
    assert (total - reference).abs().max() <= GRADIENT * reference.std()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("row", SOME[:5], ids=by_name)
def test_autograd_against_dense_layers_in_f64(row, shared):
    E, N, K = 4, 10, width(row)
    w, ids, bias = stack(row, E, N, K), choose(6, 2, E), torch.randn(E, N)
    x = (torch.randn(6, K) if shared else torch.randn(6, 2, K)) / 50
    x32, b32 = x.clone().requires_grad_(), bias.clone().requires_grad_()
    x64, b64 = x.double().requires_grad_(), bias.double().requires_grad_()
    expert_linear(x32, w, row.id, ids, b32, False).sin().sum().backward()
    rows = x64.unsqueeze(1).expand(6, 2, K) if shared else x64
    dense = dequantize(w, row.id).double()
    ((dense[ids] @ rows.unsqueeze(-1)).squeeze(-1) + b64[ids]).sin().sum().backward()
    for found, wanted in ((x32.grad, x64.grad), (b32.grad, b64.grad)):
        assert (found - wanted).abs().max() <= GRADIENT * wanted.std()


# ---- refusals -------------------------------------------------------------------------------------------------------

X, W, IDS = torch.zeros(2, 64), torch.zeros(5, 3, 36, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_beyond_the_stack_are_refused(isa, bad, dtype):
    ids = IDS.to(dtype)
    ids = ids.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(bad, dtype=dtype))
    calls = [
        lambda ids: expert_linear(X, W, ggml_types.Q4_0, ids, None, True),
        lambda ids: expert_linear(X, W, ggml_types.Q4_0, ids, None, False),
        lambda ids: expert_linear.reference(X, W, ggml_types.Q4_0, ids, None, True),
        lambda ids: expert_linear_backward(torch.zeros(2, 4, 3), W, ggml_types.Q4_0, ids, True),
        lambda ids: expert_linear_backward.reference(torch.zeros(2, 4, 3), W, ggml_types.Q4_0, ids, True),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"id {bad} is not one of 5 experts"):
            call(ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(x=X[:1]), "x must be"), (dict(x=X[:, :32]), "x must be"), (dict(x=X.int()), "x must be"),
        (dict(x=torch.zeros(2, 3, 64)), "x must be"), (dict(x=torch.zeros(())), "x must be"),
        (dict(qweight=W[0]), "qweight must be"), (dict(qweight=W[:, :, :35]), "qweight must be"),
        (dict(qweight=W.transpose(0, 1)), "qweight must be"), (dict(qweight=W.to(torch.int8)), "qweight must be"),
        (dict(qtype=ggml_types.Q8_K), "qtype"), (dict(qtype=4), "qtype"),
        (dict(ids=IDS.float()), "ids must be"), (dict(ids=torch.tensor(0)), "ids must be"),
        (dict(ids=IDS[:1]), "x must be"),
        (dict(bias=torch.zeros(5, 4)), "bias must be"), (dict(bias=torch.zeros(5, 3).double()), "bias must be"),
        (dict(bias=torch.zeros(3)), "bias must be"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, named):
    arguments = dict(x=X, qweight=W, qtype=ggml_types.Q4_0, ids=IDS, bias=None, native=True) | change
    for op in (expert_linear, expert_linear.reference):
        with pytest.raises(RuntimeError, match=f"dasllama::expert_linear: {named}"):
            op(**arguments)


@pytest.mark.parametrize(
    "grad", [torch.zeros(2, 3), torch.zeros(2, 4, 4), torch.zeros(1, 4, 3), torch.zeros(2, 4, 3).int()]
)
def test_wrong_gradients_are_refused_by_name(grad):
    for op in (expert_linear_backward, expert_linear_backward.reference):
        with pytest.raises(RuntimeError, match="dasllama::expert_linear_backward: grad must be"):
            op(grad, W, ggml_types.Q4_0, IDS, True)


@pytest.mark.parametrize("row", [r for r in SOME if r.name in ("F32", "Q4_K", "MXFP4")], ids=by_name)
def test_opcheck(row):
    w, ids = stack(row, 3, 6, 256), choose(4, 2, 3)
    for native in (False, True):
        torch.library.opcheck(expert_linear, (torch.randn(4, 256), w, row.id, ids, torch.randn(3, 6), native))
    x = torch.randn(4, 2, 256, requires_grad=True)
    torch.library.opcheck(expert_linear, (x, w, row.id, ids.int(), None, False))
    torch.library.opcheck(expert_linear_backward, (torch.randn(4, 2, 6), w, row.id, ids, True))
