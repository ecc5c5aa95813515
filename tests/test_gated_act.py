"""Gated activations against float64 formulas and transformers' activation functions."""

import math
from types import SimpleNamespace

import pytest
import torch
from tolerances import ACTIVATION, ACTIVATION_TAIL
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from dasllama_torch import ops
from dasllama_torch.ops import registry
from dasllama_torch.ops.gated_act import GELU_TANH, SIGMOID, SILU, SWIGLU_OAI, gated_act, gated_act_backward

ACTS = [SILU, GELU_TANH, SIGMOID, SWIGLU_OAI]


def exact(gate: torch.Tensor, up: torch.Tensor, act: int) -> torch.Tensor:
    """act(gate) * up in float64, in a form that does not cancel."""
    x, up = gate.double(), up.double()
    if act == SWIGLU_OAI:
        x, up = x.clamp(max=7), up.clamp(-7, 7) + 1
    z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if act == GELU_TANH else x
    z = 1.702 * x if act == SWIGLU_OAI else z
    return (1 if act == SIGMOID else x) / (1 + torch.exp(-z)) * up


def assert_near(found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> None:
    error = (found.double() - wanted).abs()
    assert (error <= ACTIVATION * wanted.abs() + ACTIVATION_TAIL * size).all(), error.max()


@pytest.mark.parametrize("act", ACTS)
def test_accuracy_over_the_whole_range(act, isa):
    gate = torch.cat([torch.linspace(-80, 80, 40001), torch.randn(5000) * 3, torch.randn(1000) * 1e-3, torch.zeros(2)])
    up = torch.randn(gate.shape)
    ops.reset_report()
    found = gated_act(gate, up, act)
    assert ops.report() == {"gated_act": {f"cpu/{isa}": 1}}
    assert_near(found, exact(gate, up, act), (gate * (up.abs() + (act == SWIGLU_OAI))).abs())


def of_transformers(gate: torch.Tensor, up: torch.Tensor, act: int) -> torch.Tensor:
    if act == SWIGLU_OAI:
        experts = SimpleNamespace(alpha=1.702, limit=7.0)
        return GptOssExperts._apply_gate(experts, torch.stack([gate, up], -1).flatten(-2))
    return ACT2FN[{SILU: "silu", GELU_TANH: "gelu_pytorch_tanh", SIGMOID: "sigmoid"}[act]](gate) * up


@pytest.mark.parametrize("act", ACTS)
def test_agrees_with_transformers_and_the_reference(act, isa):
    gate, up = torch.randn(3, 5, 70) * 4, torch.randn(3, 5, 70) * 4
    wanted = of_transformers(gate, up, act)
    for found in (gated_act(gate, up, act), gated_act.reference(gate, up, act)):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)  # torch's own form cancels below zero


@pytest.mark.parametrize("act", [SILU, GELU_TANH])
def test_extremes(act, isa):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, 1e30, 3e38, -3e38, -1e30, -200.0, -0.0, 0.0, nan, 1e-40])
    found = gated_act(gate, torch.ones(10), act)
    assert found[:3].tolist() == gate[:3].tolist()
    assert found[3:8].tolist() == [0.0] * 5
    assert found[8].isnan()
    assert abs(found[9].item()) <= 1e-40
    grads = gated_act_backward(torch.ones(10), gate, torch.ones(10), act)
    assert grads[0][1:8].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert grads[0][8].isnan()


def test_extremes_of_the_sigmoid(isa):
    gate = torch.tensor([float("inf"), 3e38, 200.0, 0.0, -0.0, -200.0, -3e38, -float("inf"), float("nan")])
    found = gated_act(gate, torch.full((9,), 3.0), SIGMOID)
    slopes, _ = gated_act_backward(torch.ones(9), gate, torch.ones(9), SIGMOID)
    assert found[:8].tolist() == [3.0, 3.0, 3.0, 1.5, 1.5, 0.0, 0.0, 0.0]
    assert slopes[:8].tolist() == [0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0]
    assert found[8].isnan()
    assert slopes[8].isnan()


def test_clamped_swiglu(isa):
    """The gate is clamped above, `up` on both sides, then 1 is added; beyond a clamp there is no gradient."""
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([1.0, 10, 10, -10, 7, inf, 1, 1, nan, 1])
    up = torch.tensor([0.0, 10, -10, 1, 7, 0, inf, -inf, 0, nan])
    found = gated_act(gate, up, SWIGLU_OAI)
    wanted = torch.tensor([0.845796, 55.9996, -41.9997, -8.1e-7, 55.9996, 6.99995, 6.76637, -5.07478])
    torch.testing.assert_close(found[:8], wanted, rtol=1e-5, atol=1e-8)
    assert found[8:].isnan().all()
    to_gate, to_up = gated_act_backward(torch.ones(10), gate, up, SWIGLU_OAI)
    assert (to_gate[:8] != 0).tolist() == [True, False, False, True, True, False, True, True]
    assert (to_up[:8] != 0).tolist() == [True, False, False, True, True, True, False, False]


@pytest.mark.parametrize("act", ACTS)
def test_every_length_and_every_instruction_set_gives_the_same_bits(act):
    gate, up, grad = torch.randn(3, 77) * 5, torch.randn(3, 77), torch.randn(3, 77)
    try:
        registry.set_isa("scalar")
        whole, gradients = gated_act(gate, up, act), gated_act_backward(grad, gate, up, act)
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (0, 1, 15, 16, 17, 33, 77):
                g, u, d = gate[:, :n], up[:, :n], grad[:, :n]
                assert torch.equal(gated_act(g, u, act), whole[:, :n])
                for found, wanted in zip(gated_act_backward(d, g, u, act), gradients, strict=True):
                    assert torch.equal(found, wanted[:, :n])
    finally:
        registry.set_isa(None)


def test_halves_of_a_fused_projection(isa):
    fused = torch.full((4, 6, 100), float("nan"))
    fused[..., 3:73] = torch.randn(4, 6, 70)
    gate, up = fused[..., 3:38], fused[..., 38:73]
    found = gated_act(gate, up, SILU)
    assert found.is_contiguous()
    assert torch.equal(found, gated_act(gate.contiguous(), up.contiguous(), SILU))
    assert not found.isnan().any()
    turned = gate.transpose(0, 1)
    assert torch.equal(gated_act(turned, up.transpose(0, 1), SILU), found.transpose(0, 1))
    assert torch.equal(gated_act(gate.transpose(1, 2), up.transpose(1, 2), SILU), found.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_f32_and_rounded_once(dtype, isa):
    gate, up = torch.randn(5, 40).to(dtype), torch.randn(5, 40).to(dtype)
    found = gated_act(gate, up, GELU_TANH)
    assert found.dtype == dtype
    assert torch.equal(found, gated_act(gate.float(), up.float(), GELU_TANH).to(dtype))
    for found in gated_act_backward(gate, gate, up, GELU_TANH):
        assert found.dtype == dtype


@pytest.mark.parametrize("act", ACTS)
def test_gradients(act, isa):
    gate, up, grad = torch.randn(7, 45) * 4, torch.randn(7, 45) * 4, torch.randn(7, 45)
    g64, u64 = gate.double().requires_grad_(), up.double().requires_grad_()
    exact(g64, u64, act).backward(grad.double())
    g32, u32 = gate.clone().requires_grad_(), up.clone().requires_grad_()
    gated_act(g32, u32, act).backward(grad)
    # act' passes through zero, where its error is that of its terms.
    torch.testing.assert_close(g32.grad.double(), g64.grad, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(u32.grad.double(), u64.grad, rtol=2e-6, atol=2e-6)
    for found, wanted in zip(gated_act_backward.reference(grad, gate, up, act), (g64.grad, u64.grad), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)


def test_results_do_not_depend_on_threads(threads):
    gate, up = torch.randn(300, 1536), torch.randn(300, 1536)
    threads(1)
    alone = gated_act(gate, up, SILU), *gated_act_backward(up, gate, up, SILU)
    for n in (2, 5):
        threads(n)
        for found, wanted in zip(
            (gated_act(gate, up, SILU), *gated_act_backward(up, gate, up, SILU)), alone, strict=True
        ):
            assert torch.equal(found, wanted)


def test_errors():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"gated_act: act must be 0 .*, found 4"):
        gated_act(x, x, 4)
    with pytest.raises(
        RuntimeError, match="gated_act: up must have gate's shape, found size 3 of dimension 0, wanted 2"
    ):
        gated_act(x, x.t().contiguous(), SILU)
    with pytest.raises(RuntimeError, match="gated_act: up must be a floating tensor of gate's shape"):
        gated_act(x, x[0], SILU)
    with pytest.raises(RuntimeError, match="gated_act: gate must be a floating tensor"):
        gated_act(x.int(), x, SILU)
    with pytest.raises(RuntimeError, match="gated_act_backward: grad must be a floating tensor of gate's shape"):
        gated_act_backward(x[0], x, x, SILU)


def test_opcheck():
    for act in ACTS:
        args = torch.randn(2, 3, 20, requires_grad=True), torch.randn(2, 3, 20, requires_grad=True), act
        torch.library.opcheck(gated_act, args)
        torch.library.opcheck(gated_act_backward, (torch.randn(4, 9), torch.randn(4, 9), torch.randn(4, 9), act))
    torch.library.opcheck(gated_act, (torch.randn(3, 50)[:, 5:25], torch.randn(3, 20), SILU))
