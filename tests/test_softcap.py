"""Soft capping against float64 formulas."""

import pytest
import torch
from tolerances import ACTIVATION

from dasllama_torch import ops
from dasllama_torch.ops import registry
from dasllama_torch.ops.softcap import softcap, softcap_backward


@pytest.mark.parametrize("cap", [0.5, 2.5, 30.0, 50.0])
def test_accuracy(cap, isa):
    x = torch.cat([torch.linspace(-9 * cap, 9 * cap, 20001), torch.randn(999), torch.randn(999) * 1e-3])
    ops.reset_report()
    found = softcap(x, cap)
    assert ops.report() == {"softcap": {f"cpu/{isa}": 1}}
    wanted = cap * torch.tanh(x.double() / cap)
    torch.testing.assert_close(found.double(), wanted, rtol=ACTIVATION, atol=0)
    torch.testing.assert_close(softcap.reference(x, cap).double(), wanted, rtol=ACTIVATION, atol=0)


def test_values_of_published_models():
    found = [softcap(torch.tensor([x]), cap).item() for x, cap in ((100.0, 50.0), (40.0, 30.0))]
    assert found == pytest.approx([48.2014, 26.1018], abs=1e-4)


def test_extremes(isa):
    inf, nan = float("inf"), float("nan")
    found = softcap(torch.tensor([inf, -inf, 3e38, -3e38, 0.0, -0.0, nan]), 30.0)
    assert found[:6].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0, 0.0]
    assert found[6].isnan()


def test_every_length_and_every_instruction_set_gives_the_same_bits():
    x, grad = torch.randn(3, 77) * 40, torch.randn(3, 77)
    try:
        registry.set_isa("scalar")
        whole = softcap(x, 30.0)
        slope = softcap_backward(grad, whole, 30.0)
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (0, 1, 15, 16, 17, 33, 77):
                assert torch.equal(softcap(x[:, :n], 30.0), whole[:, :n])
                assert torch.equal(softcap_backward(grad[:, :n], whole[:, :n], 30.0), slope[:, :n])
    finally:
        registry.set_isa(None)


def test_results_do_not_depend_on_threads(threads):
    x = torch.randn(30, 9999) * 40
    threads(1)
    alone = softcap(x, 30.0)
    for n in (2, 5):
        threads(n)
        assert torch.equal(softcap(x, 30.0), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_capped_in_f32_and_rounded_once(dtype, isa):
    x = (torch.randn(5, 40) * 40).to(dtype)
    found = softcap(x, 30.0)
    assert found.dtype == dtype
    assert torch.equal(found, softcap(x.float(), 30.0).to(dtype))


def test_gradient(isa):
    x, grad = torch.randn(7, 45) * 40, torch.randn(7, 45)
    twin = x.double().requires_grad_()
    (30.0 * torch.tanh(twin / 30.0)).backward(grad.double())
    ours = x.clone().requires_grad_()
    softcap(ours, 30.0).backward(grad)
    torch.testing.assert_close(ours.grad.double(), twin.grad, rtol=0, atol=2e-6)  # 1 - tanh^2 cancels near the cap


def test_errors():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="softcap: x must be a floating tensor"):
        softcap(x.int(), 30.0)
    with pytest.raises(RuntimeError, match="softcap: cap must be above 0, found -1"):
        softcap(x, -1.0)
    with pytest.raises(RuntimeError, match="softcap_backward: grad must have y's shape, found size 3"):
        softcap_backward(x.t(), x, 30.0)
    with pytest.raises(RuntimeError, match="softcap_backward: grad and y must be floating tensors of one shape"):
        softcap_backward(x[0], x, 30.0)


def test_opcheck():
    torch.library.opcheck(softcap, (torch.randn(2, 3, 20, requires_grad=True), 30.0))
    torch.library.opcheck(softcap, (torch.randn(9, 4).t(), 2.5))
    torch.library.opcheck(softcap_backward, (torch.randn(4, 9), torch.randn(4, 9), 30.0))
