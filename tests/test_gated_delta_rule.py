"""The gated delta rule against float64, transformers' two forms, and itself in every cut of the same rows.

T rows, S sequences, G key heads, H value heads, Dk and Dv their dims.
"""

import pytest
import torch
from tolerances import DELTA_RULE, DELTA_RULE_GRADIENT
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from dasllama_torch import ops
from dasllama_torch.errors import KernelError
from dasllama_torch.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_backward, gated_delta_update

SHAPES = [(2, 6, 16, 16), (1, 1, 128, 128), (2, 4, 24, 40), (3, 3, 7, 5), (1, 2, 1, 80), (2, 2, 33, 17)]


def inputs(T, G=2, H=4, Dk=16, Dv=24, S=3, inert=0, seed=0):
    """q, k, v, g, beta, row_seq, state: rows of the sequences mixed, `inert` rows of NaN among them."""
    gen = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    q, k, v = randn(T, G, Dk), randn(T, G, Dk) * 3, randn(T, H, Dv)
    g, beta = -(torch.rand(T, H, generator=gen) ** 4) * 3, torch.rand(T, H, generator=gen)
    row_seq = torch.randint(0, S, (T,), generator=gen, dtype=torch.int32)
    for t in torch.randperm(T, generator=gen)[:inert].tolist():
        row_seq[t] = -1
        for x in (q, k, v, g, beta):
            x[t] = float("nan")
    return q, k, v, g, beta, row_seq, randn(S, H, Dk, Dv) * 0.5


def exact(q, k, v, g, beta, row_seq, state):
    """y and the states in float64, one row and one head at a time; differentiable."""
    T, H, _ = v.shape
    group = H // k.shape[1]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    states = {(s, h): state[s, h].double() for s in range(len(state)) for h in range(H)}
    rows = []
    for t in range(T):
        s, row = int(row_seq[t]), []
        for h in range(H):
            if s < 0:
                row.append(torch.zeros(v.shape[2], dtype=torch.float64))
                continue
            query, key = (x[t, h // group] / (x[t, h // group].square().sum() + 1e-6).sqrt() for x in (q, k))
            M = states[s, h] * g[t, h].exp()
            M = M + torch.outer(key, beta[t, h] * (v[t, h] - key @ M))
            states[s, h] = M
            row.append(query @ M / q.shape[2] ** 0.5)
        rows.append(torch.stack(row))
    final = torch.stack([torch.stack([states[s, h] for h in range(H)]) for s in range(len(state))])
    return torch.stack(rows), final


def assert_near(found, wanted, tolerance=DELTA_RULE):
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance, error


@pytest.mark.parametrize(("G", "H", "Dk", "Dv"), SHAPES)
def test_against_float64(G, H, Dk, Dv, isa):
    args = inputs(80, G, H, Dk, Dv, inert=7)
    before = args[-1].clone()
    ops.reset_report()
    y, state = gated_delta_rule(*args)
    assert ops.report() == {"gated_delta_rule": {f"cpu/{isa}": 1}}
    wanted, wanted_state = exact(*args)
    assert_near(y, wanted)
    assert_near(state, wanted_state)
    assert torch.equal(args[-1], before)
    assert (y[args[5] < 0] == 0).all()
    for found, want in zip(gated_delta_rule.reference(*args), (wanted, wanted_state), strict=True):
        assert_near(found, want)


@pytest.mark.parametrize("form", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_against_transformers(form, isa):
    q, k, v, g, beta, _, state = inputs(150, S=1)
    wanted, wanted_state = form(
        q[None], k[None], v[None], g[None], beta[None],
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    y, found = gated_delta_rule(q, k, v, g, beta, torch.zeros(150, dtype=torch.int32), state)
    assert_near(y, wanted[0], 2 * DELTA_RULE)
    assert_near(found, wanted_state, 2 * DELTA_RULE)


@pytest.mark.parametrize(("G", "H", "Dk", "Dv"), SHAPES)
def test_the_cut_does_not_matter(G, H, Dk, Dv, isa):
    """Whole, token by token, in chunks of 3, 32, 33 and 64, each sequence alone: bit for bit, the states too."""
    *rows, row_seq, state = inputs(140, G, H, Dk, Dv, inert=5)
    whole, after = gated_delta_rule(*rows, row_seq, state)
    for size in (1, 3, 32, 33, 64):
        cache = state.clone()
        cuts = range(0, 140, size)
        parts = [
            gated_delta_update(*(x[i : i + size] for x in rows), cache, row_seq[i : i + size].contiguous())
            for i in cuts
        ]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(cache, after)
    for s in range(3):
        own, slots = row_seq == s, torch.full((140,), 7, dtype=torch.int32)
        cache = torch.full((9, H, Dk, Dv), float("nan"))
        cache[7] = state[s]
        assert torch.equal(gated_delta_update(*(x[own] for x in rows), cache, slots[own]), whole[own])
        assert torch.equal(cache[7], after[s])
        assert cache[[0, 1, 2, 3, 4, 5, 6, 8]].isnan().all()


def test_instruction_sets_and_threads_agree(everywhere):
    args = inputs(90, 4, 8, 64, 80, inert=3)
    first, *others = everywhere(
        lambda: (*gated_delta_rule(*args), *gated_delta_rule_backward(args[2].nan_to_num(), *args))
    )
    for other in others:
        for found, wanted in zip(other, first, strict=True):
            assert torch.equal(found, wanted)


def test_inert_rows_leave_the_state_alone(isa):
    *rows, _, state = inputs(6, inert=0)
    cache = state.clone()
    y = gated_delta_update(*rows, cache, torch.full((6,), -1, dtype=torch.int32))
    assert (y == 0).all()
    assert torch.equal(cache, state)


def test_a_fade_beyond_f32_forgets_everything(isa):
    q, k, v, g, beta, row_seq, state = inputs(1, S=1)
    found, after = gated_delta_rule(q, k, v, torch.full_like(g, -200.0), beta, row_seq, state)
    wanted, wanted_after = gated_delta_rule(q, k, v, g, beta, row_seq, torch.zeros_like(state))
    assert torch.equal(found, wanted)
    assert torch.equal(after, wanted_after)


def test_views(isa):
    """Slices of one fused projection inside NaN, more leading dims, heads in another order of strides."""
    q, k, v, g, beta, row_seq, state = inputs(12)
    wanted = gated_delta_rule(q, k, v, g, beta, row_seq, state)
    fused = torch.full((12, 3 + 32 + 32 + 96 + 5), float("nan"))
    for x, at in ((q, 3), (k, 35), (v, 67)):
        fused[:, at : at + x[0].numel()] = x.flatten(1)
    slices = fused[:, 3:35].unflatten(1, (2, 16)), fused[:, 35:67].unflatten(1, (2, 16))
    for found, want in zip(
        gated_delta_rule(*slices, fused[:, 67:163].unflatten(1, (4, 24)), g, beta, row_seq, state), wanted, strict=True
    ):
        assert torch.equal(found, want)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, g, beta)]
    assert torch.equal(gated_delta_rule(*turned, row_seq, state)[0], wanted[0])
    deeper = [x.unflatten(0, (3, 4)) for x in (q, k, v, g, beta)]
    assert torch.equal(gated_delta_rule(*deeper, row_seq, state)[0], wanted[0].unflatten(0, (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    *rows, row_seq, state = inputs(20)
    rows = [x.to(dtype) for x in rows]
    y, after = gated_delta_rule(*rows, row_seq, state)
    wanted, wanted_after = gated_delta_rule(*(x.float() for x in rows), row_seq, state)
    assert torch.equal(y, wanted.to(dtype))
    assert torch.equal(after, wanted_after)


def test_no_rows():
    *rows, row_seq, state = inputs(5)
    y, after = gated_delta_rule(*(x[:0] for x in rows), row_seq[:0], state)
    assert y.shape == (0, 4, 24)
    assert torch.equal(after, state)


@pytest.mark.parametrize("T", [1, 2, 37, 100])
def test_gradients(T, isa):
    *rows, row_seq, state = inputs(T, 2, 4, 20, 18, S=2)
    grad = torch.randn(T, 4, 18, generator=torch.Generator().manual_seed(9))
    x64 = [x.double().requires_grad_() for x in rows]
    wanted = torch.autograd.grad((exact(*x64, row_seq, state)[0] * grad).sum(), x64)
    x32 = [x.clone().requires_grad_() for x in rows]
    y, after = gated_delta_rule(*x32, row_seq, state)
    assert not after.requires_grad  # a constant
    found = torch.autograd.grad((y * grad).sum(), x32)
    reference = gated_delta_rule_backward.reference(grad, *rows, row_seq, state)
    for a, b, want in zip(found, reference, wanted, strict=True):
        assert_near(a, want, DELTA_RULE_GRADIENT * want.abs().max())
        assert_near(b, want, DELTA_RULE_GRADIENT * want.abs().max())


def test_gradients_of_inert_rows_are_zero(isa):
    args = inputs(30, inert=6)
    grad = torch.randn_like(args[2])
    dead = args[5] < 0
    for found in gated_delta_rule_backward(grad, *args):
        assert (found[dead] == 0).all()
        assert torch.isfinite(found).all()
        assert (found[~dead] != 0).any()


def test_an_input_that_requires_grad_is_refused_with_a_cache():
    q, *rest, row_seq, state = inputs(4)
    with pytest.raises(KernelError, match="gated_delta_update: q requires grad.*gated_delta_rule"):
        gated_delta_update(q.requires_grad_(), *rest, state, row_seq)
    with torch.no_grad():
        gated_delta_update(q, *rest, state, row_seq)


def test_errors():
    names = [argument.name for argument in gated_delta_update._schema.arguments]
    *rows, row_seq, state = inputs(6)
    good = dict(zip(names, (*rows, state, row_seq), strict=True))
    for change, message in [
        ({"q": good["q"].int()}, "q must be a floating tensor"),
        ({"q": good["q"][:, :1]}, "q has 1 heads of 16, k has 2 of 16"),
        ({"k": good["k"][:5]}, "q has 6 rows, k 5 and v 6"),
        ({"v": good["v"][:, :3], "g": good["g"][:, :3]}, "v has 3 heads, wanted a multiple of k's 2"),
        ({"g": good["g"][:, :2]}, r"g must be a floating tensor \[..., 4\] of 6 rows"),
        ({"beta": good["beta"][:3]}, r"beta must be a floating tensor \[..., 4\] of 6 rows"),
        ({"state": state.double()}, r"state must be contiguous f32 \[sequences, 4, 16, 24\]"),
        ({"state": state.transpose(2, 3)}, r"state must be contiguous f32 \[sequences, 4, 16, 24\]"),
        ({"slots": row_seq.long()}, r"slots must be contiguous int32 \[6\]"),
        ({"slots": row_seq[:5]}, r"slots must be contiguous int32 \[6\]"),
        ({"slots": torch.tensor([0, 1, 3, 0, 0, 0], dtype=torch.int32)}, r"slots\[2\] is 3, wanted -1 \(inert\) to 2"),
        ({"slots": torch.tensor([0, -2, 0, 0, 0, 0], dtype=torch.int32)}, r"slots\[1\] is -2, wanted -1"),
    ]:
        before = state.clone()
        with pytest.raises(RuntimeError, match="dasllama::gated_delta_.*" + message):
            gated_delta_update(**(good | change))
        assert torch.equal(state, before)
    with pytest.raises(RuntimeError, match=r"gated_delta_rule: row_seq\[0\] is 9"):
        gated_delta_rule(*rows, row_seq + 9 - row_seq[0], state)


def test_opcheck():
    *rows, row_seq, state = inputs(5, inert=0)
    torch.library.opcheck(gated_delta_update, (*rows, state, row_seq))
    torch.library.opcheck(gated_delta_rule, (*(x.requires_grad_() for x in rows), row_seq, state))
    rows = [x.detach() for x in rows]
    torch.library.opcheck(gated_delta_rule_backward, (torch.randn_like(rows[2]), *rows, row_seq, state))
