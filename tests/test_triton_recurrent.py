"""The convolution, the gates and the rule of gated delta nets in Triton, against float64 and the references."""

import pytest
import test_causal_conv1d as conv_cases
import test_gated_delta_rule as rule_cases
import tolerances
import torch
from triton_device import DEVICE, cases, ragged

from dasllama_torch.ops.causal_conv1d import causal_conv1d_update as conv_op
from dasllama_torch.ops.delta_gates import delta_gates as delta_gates_op
from dasllama_torch.ops.gated_delta_rule import gated_delta_update as rule_op
from dasllama_torch.triton_kernels import delta_chunks
from dasllama_torch.triton_kernels import gated_delta_rule as module
from dasllama_torch.triton_kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from dasllama_torch.triton_kernels.delta_gates import delta_gates
from dasllama_torch.triton_kernels.gated_delta_rule import gated_delta_rule, gated_delta_update


def here(*tensors):
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize(("C", "K", "T"), [(160, 4, 50), (16, 1, 20), (5, 2, 9), (300, 7, 20)])
def test_convolution(C, K, T):
    x, weight, row_seq, state = conv_cases.inputs(T, C, K, inert=min(4, T - 1))
    y, after = causal_conv1d(ragged(x), *here(weight, row_seq, state))
    wanted, wanted_after = conv_cases.exact(x, weight, row_seq, state)
    assert (y.cpu().double() - wanted).abs().max() <= conv_cases.bound(x, weight, state)
    assert torch.equal(after.cpu().double(), wanted_after)


def test_convolution_token_by_token_and_in_place():
    x, weight, slots, state = conv_cases.inputs(12, C=20, K=4, S=3)
    found, wanted = state.clone().to(DEVICE), state.clone()
    whole = conv_op.reference(x, weight, wanted, slots)
    for t in range(len(x)):
        y = causal_conv1d_update(*here(x[t : t + 1], weight), found, slots[t : t + 1].to(DEVICE))
        assert (y.cpu() - whole[t]).abs().max() <= conv_cases.bound(x, weight, state)
    assert torch.equal(found.cpu(), wanted)


def test_slots_out_of_range_give_nan_and_change_nothing():
    x, weight, slots, state = conv_cases.inputs(4, C=20, K=4, S=3)
    slots = torch.tensor([1, 3, -1, 99], dtype=torch.int32)
    found = state.clone().to(DEVICE)
    y = causal_conv1d_update(*here(x, weight), found, slots.to(DEVICE)).cpu()
    assert y[[1, 3]].isnan().all()
    assert (y[2] == 0).all()
    assert torch.equal(found.cpu()[[0, 2]], state[[0, 2]])
    q, k, v, g, beta, _, state = rule_cases.inputs(4)
    found = state.clone().to(DEVICE)
    y = gated_delta_update(*here(q, k, v, g, beta), found, slots.to(DEVICE)).cpu()
    assert y[[1, 3]].isnan().all()
    assert (y[2] == 0).all()
    assert torch.equal(found.cpu()[[0, 2]], state[[0, 2]])


def test_gates():
    a, b = torch.randn(5, 3, 33) * 20, torch.randn(5, 3, 33) * 5
    a[0, 0, :4] = torch.tensor([-80.0, -30.0, 90.0, float("nan")])
    decay, dt_bias = -torch.rand(33), torch.randn(33)
    found = delta_gates(ragged(a), ragged(b), *here(decay, dt_bias))
    wanted = delta_gates_op.reference(a.double(), b.double(), decay.double(), dt_bias.double())
    exact = decay.double() * torch.logaddexp((a + dt_bias).double(), torch.zeros((), dtype=torch.float64))
    for got, want in zip(found, (exact, wanted[1]), strict=True):
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=tolerances.DELTA_GATES, atol=1e-37,
                                   equal_nan=True)  # fmt: skip


@pytest.mark.parametrize(("G", "H", "Dk", "Dv"), [(2, 4, 24, 40), (3, 3, 7, 5), (1, 2, 1, 30), (1, 1, 128, 17)])
def test_delta_rule(G, H, Dk, Dv):
    q, k, v, g, beta, row_seq, state = rule_cases.inputs(15, G, H, Dk, Dv, inert=3)
    y, after = gated_delta_rule(*(ragged(t) for t in (q, k, v, g, beta)), *here(row_seq, state))
    wanted, wanted_after = rule_cases.exact(q, k, v, g, beta, row_seq, state)
    rule_cases.assert_near(y.cpu(), wanted)
    rule_cases.assert_near(after.cpu(), wanted_after)
    assert (y.cpu()[row_seq < 0] == 0).all()


def test_delta_rule_token_by_token_and_in_place():
    *rows, slots, state = rule_cases.inputs(6)
    found, wanted = state.clone().to(DEVICE), state.clone()
    whole = rule_op.reference(*rows, wanted, slots)
    for t in range(len(slots)):
        y = gated_delta_update(*here(*(r[t : t + 1] for r in rows)), found, slots[t : t + 1].to(DEVICE))
        rule_cases.assert_near(y.cpu()[0], whole[t].double())
    rule_cases.assert_near(found.cpu(), wanted.double())


@pytest.fixture
def chunks(monkeypatch):
    """The form in chunks for any number of rows, with fewer programs than there are tiles and sequences."""
    monkeypatch.setattr(module, "STEPS", 0)
    monkeypatch.setattr(delta_chunks, "PROGRAMS", 2)
    monkeypatch.setattr(delta_chunks, "CHUNK", 64)


@pytest.mark.parametrize(
    ("G", "H", "Dk", "Dv"),
    cases([(1, 2, 24, 20), (3, 3, 7, 5), (1, 2, 1, 30), (16, 32, 128, 128)], (1, 2, 24, 20)),
)
def test_delta_rule_in_chunks(G, H, Dk, Dv, chunks):
    """Three sequences of odd lengths, whose rows stand among each other, and one of a single row."""
    q, k, v, g, beta, row_seq, state = rule_cases.inputs(217, G, H, Dk, Dv, S=4, inert=5)
    row_seq[torch.nonzero(row_seq == 3)[1:]] = 0
    y, after = gated_delta_rule(*(ragged(t) for t in (q, k, v, g, beta)), *here(row_seq, state))
    wanted, wanted_after = rule_cases.exact(q, k, v, g, beta, row_seq, state)
    rule_cases.assert_near(y.cpu(), wanted)
    rule_cases.assert_near(after.cpu(), wanted_after)
    assert (y.cpu()[row_seq < 0] == 0).all()


def test_delta_rule_cut_into_pieces(chunks):
    """From the state that the piece before has left, in chunks and, between them, step by step."""
    *rows, slots, state = rule_cases.inputs(150, 1, 1, Dv=10, S=2)
    found = state.clone().to(DEVICE)
    wanted, wanted_after = rule_cases.exact(*rows, slots, state)
    for begin, end in ((0, 67), (67, 70), (70, 150)):
        module.STEPS = 0 if end - begin > 3 else 3
        y = gated_delta_update(*here(*(r[begin:end] for r in rows)), found, slots[begin:end].to(DEVICE))
        rule_cases.assert_near(y.cpu(), wanted[begin:end])
    rule_cases.assert_near(found.cpu(), wanted_after)


def test_delta_rule_of_equal_keys(chunks):
    """What makes (1 + A)^-1 hard: every row has the same key, takes everything in and forgets nothing."""
    q, k, v, g, beta, row_seq, state = rule_cases.inputs(130, 1, 1, S=1)
    k, g, beta = k[:1].expand_as(k), torch.zeros_like(g), torch.ones_like(beta)
    y, after = gated_delta_rule(*here(q, k, v, g, beta, row_seq, state))
    wanted, wanted_after = rule_cases.exact(q, k, v, g, beta, row_seq, state)
    rule_cases.assert_near(y.cpu(), wanted)
    rule_cases.assert_near(after.cpu(), wanted_after)


@pytest.mark.parametrize("fade", [-200.0, -float("inf")])
def test_delta_rule_in_chunks_forgets_everything(fade, chunks):
    q, k, v, g, beta, row_seq, state = rule_cases.inputs(70, 1, 1, S=1)
    g[[3, 40, 41]] = fade
    y, after = gated_delta_rule(*here(q, k, v, g, beta, row_seq, state))
    wanted, wanted_after = rule_cases.exact(q, k, v, g, beta, row_seq, state)
    rule_cases.assert_near(y.cpu(), wanted)
    rule_cases.assert_near(after.cpu(), wanted_after)


def test_delta_rule_in_chunks_of_wrong_slots_and_numbers(chunks):
    """A slot out of range gives NaN, and what is NaN in a sequence stays in it."""
    q, k, v, g, beta, row_seq, state = rule_cases.inputs(90, 1, 1)
    for t in (q, k, v, g, beta):
        t[torch.nonzero(row_seq == 1)[4]] = float("nan")
    slots = torch.where(row_seq == 2, 99, row_seq).int()
    found = state.clone().to(DEVICE)
    y = gated_delta_update(*here(q, k, v, g, beta), found, slots.to(DEVICE)).cpu()
    own = row_seq == 0
    wanted, wanted_after = rule_cases.exact(*(t[own] for t in (q, k, v, g, beta)), row_seq[own], state)
    rule_cases.assert_near(y[own], wanted)
    rule_cases.assert_near(found.cpu()[[0, 2]], torch.stack([wanted_after[0], state[2].double()]))
    assert y[row_seq == 2].isnan().all()
    assert found[1].isnan().all()


def test_wrong_input_is_refused():
    x, weight, slots, state = here(*conv_cases.inputs(4, C=20, K=4, S=3))
    for args, text in (
        ((x, weight[:3], state, slots), "weight must be torch.float32"),
        ((x, weight, state[:, :2], slots), "state must be torch.float32"),
        ((x, weight, state, slots.long()), "slots must be int32"),
    ):
        with pytest.raises(RuntimeError, match=f"dasllama::causal_conv1d_update: {text}"):
            causal_conv1d_update(*args)
    q, k, v, g, beta, slots, state = here(*rule_cases.inputs(4))
    for args, text in (
        ((q, k[:, :1], v, g, beta, state, slots), "q must be"),
        ((q, k, v, g[:3], beta, state, slots), "g must be"),
        ((q, k, v, g, beta, state[..., :3], slots), "state must be"),
    ):
        with pytest.raises(RuntimeError, match=f"dasllama::gated_delta_update: {text}"):
            gated_delta_update(*args)
