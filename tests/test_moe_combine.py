"""moe_combine: the weighted sum over a token's experts, in one order, and its gradients."""

import pytest
import torch
from tolerances import GRADIENT

from dasllama_torch.ops import registry
from dasllama_torch.ops.moe_combine import moe_combine, moe_combine_backward


@pytest.mark.parametrize("C", [1, 15, 16, 17, 100])
def test_bits_are_those_of_the_reference(isa, C):
    y, weights = torch.randn(3, 5, 4, C), torch.rand(3, 5, 4)
    registry.reset_report()
    found = moe_combine(y, weights)
    assert registry.report() == {"moe_combine": {f"cpu/{isa}": 1}}
    assert found.shape == (3, 5, C)
    assert torch.equal(found, moe_combine.reference(y, weights))
    torch.testing.assert_close(found, (y * weights.unsqueeze(-1)).sum(-2))


@pytest.mark.parametrize("C", [1, 15, 16, 33])
def test_gradients(isa, C):
    y, weights, grad = torch.randn(6, 3, C), torch.rand(6, 3), torch.randn(6, C)
    y32, w32 = y.clone().requires_grad_(), weights.clone().requires_grad_()
    y64, w64 = y.double().requires_grad_(), weights.double().requires_grad_()
    moe_combine(y32, w32).backward(grad)
    (y64 * w64.unsqueeze(-1)).sum(-2).backward(grad.double())
    for found, wanted in ((y32.grad, y64.grad), (w32.grad, w64.grad)):
        assert (found - wanted).abs().max() <= GRADIENT * wanted.std()
    for found, wanted in zip(moe_combine_backward.reference(grad, y, weights), (y64.grad, w64.grad), strict=True):
        assert (found - wanted).abs().max() <= GRADIENT * wanted.std()


def test_bits_depend_on_nothing_but_the_row(threads):
    y, weights, grad = torch.randn(300, 8, 70), torch.rand(300, 8), torch.randn(300, 70)
    whole, gradients = moe_combine(y, weights), moe_combine_backward(grad, y, weights)
    try:
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (1, 3):
                threads(n)
                for part in (slice(0, 300), slice(5, 6), slice(40, 131)):
                    assert torch.equal(moe_combine(y[part], weights[part]), whole[part])
                    found = moe_combine_backward(grad[part], y[part], weights[part])
                    for one, other in zip(found, gradients, strict=True):
                        assert torch.equal(one, other[part])
    finally:
        registry.set_isa(None)


def test_views_and_faults(isa):
    y, weights = torch.randn(4, 2, 20), torch.rand(4, 2)
    around = torch.full((9, 4, 30), float("nan"))
    around[1:9:2, 1:3, 5:25] = y
    wide = torch.full((4, 5), float("nan"))
    wide[:, 1:4:2] = weights
    wanted = moe_combine(y, weights)
    assert torch.equal(moe_combine(around[1:9:2, 1:3, 5:25], wide[:, 1:4:2]), wanted)
    y[1, 0, 3] = float("inf")
    found = moe_combine(y, weights)
    assert found[1, 3].isinf()
    found[1, 3] = wanted[1, 3]
    assert torch.equal(found, wanted)


def test_dtypes_and_empty_sizes(isa):
    y, weights = torch.randn(3, 2, 20), torch.rand(3, 2)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(moe_combine(y.to(dtype), weights), moe_combine(y.to(dtype).float(), weights).to(dtype))
    assert moe_combine(y[:0], weights[:0]).shape == (0, 20)
    assert moe_combine(y[..., :0], weights).shape == (3, 0)
    assert torch.equal(moe_combine(y[:, :0], weights[:, :0]), torch.zeros(3, 20))


def test_wrong_arguments_are_refused_by_name():
    y, weights = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    bad = [(y.int(), weights), (y[0, 0], weights), (y, weights[:2]), (y, weights[0]), (y, weights.double())]
    for arguments in bad:
        for op in (moe_combine, moe_combine.reference):
            with pytest.raises(RuntimeError, match="dasllama::moe_combine: y must be"):
                op(*arguments)
        with pytest.raises(RuntimeError, match="dasllama::moe_combine_backward: y must be"):
            moe_combine_backward(torch.zeros(3, 4), *arguments)
    for grad in (torch.zeros(3, 5), torch.zeros(2, 4), torch.zeros(4)):
        with pytest.raises(RuntimeError, match="dasllama::moe_combine_backward: grad must be"):
            moe_combine_backward(grad, y, weights)


def test_opcheck():
    y, weights = torch.randn(3, 2, 20, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(moe_combine, (y, weights))
    torch.library.opcheck(moe_combine_backward, (torch.randn(3, 20), y.detach(), weights.detach()))
