"""Decay and correction of a gated delta rule against float64 and transformers' formula."""

import pytest
import torch
from tolerances import DELTA_GATES

from dasllama_torch import ops
from dasllama_torch.ops import registry
from dasllama_torch.ops.delta_gates import delta_gates, delta_gates_backward


def exact(a, b, decay, dt_bias):
    """In float64, in forms that do not cancel."""
    x = a.double() + dt_bias.double()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return decay.double() * softplus, 1 / (1 + torch.exp(-b.double()))


def assert_near(found, wanted):
    error = (found.double() - wanted).abs()
    assert (error <= DELTA_GATES * wanted.abs() + 1e-37).all(), (error / wanted.abs()).max()


def test_accuracy_over_the_whole_range(isa):
    x = torch.cat([torch.linspace(-80, 80, 20011), torch.randn(4000) * 3, torch.zeros(2)])
    decay = -torch.rand(x.shape) * 8 - 0.01
    ops.reset_report()
    found = delta_gates(x, x, decay, torch.zeros_like(x))
    assert ops.report() == {"delta_gates": {f"cpu/{isa}": 1}}
    for a, b in zip(found, exact(x, x, decay, torch.zeros_like(x)), strict=True):
        assert_near(a, b)


def test_against_transformers(isa):
    a, b, A_log, dt_bias = torch.randn(2, 9, 6) * 5, torch.randn(2, 9, 6), torch.randn(6), torch.randn(6)
    wanted = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()
    for found in (delta_gates(a, b, -A_log.exp(), dt_bias), delta_gates.reference(a, b, -A_log.exp(), dt_bias)):
        for x, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, want, rtol=4e-6, atol=1e-6)  # torch's own softplus is rounded more often


def test_extremes(isa):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -3e38, -200.0, 200.0, 3e38, inf, nan])
    g, beta = delta_gates(x, x, torch.full((7,), -2.0), torch.zeros(7))
    assert g[:6].tolist() == [0.0, 0.0, 0.0, -400.0, -inf, -inf]
    assert beta[:6].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert g[6].isnan()
    assert beta[6].isnan()


def test_rows_views_threads_and_instruction_sets(threads):
    """A row's bits do not depend on the rest; slices inside NaN."""
    wide = torch.full((300, 90), float("nan"))
    wide[:, 3:40], wide[:, 41:78] = torch.randn(300, 37) * 4, torch.randn(300, 37) * 4
    a, b, decay, dt_bias = wide[:, 3:40], wide[:, 41:78], -torch.rand(37), torch.randn(37)
    wanted = [delta_gates(a[t].clone(), b[t].clone(), decay, dt_bias) for t in range(300)]
    wanted = [torch.stack(x) for x in zip(*wanted, strict=True)]
    try:
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (1, 3):
                threads(n)
                for found, want in zip(delta_gates(a, b, decay, dt_bias), wanted, strict=True):
                    assert torch.equal(found, want)
    finally:
        registry.set_isa(None)


def test_gradients(isa):
    a, b, decay, dt_bias = torch.randn(7, 45) * 3, torch.randn(7, 45) * 3, -torch.rand(45), torch.randn(45)
    dg, dbeta = torch.randn(7, 45), torch.randn(7, 45)
    pairs = []
    for dtype, op in ((torch.float64, exact), (torch.float32, delta_gates)):
        x = [t.to(dtype).requires_grad_() for t in (a, b)]
        pairs.append(torch.autograd.grad(op(*x, decay, dt_bias), x, [dg.to(dtype), dbeta.to(dtype)]))
    reference = delta_gates_backward.reference(dg, dbeta, a, b, decay, dt_bias)
    for want, found, other in zip(*pairs, reference, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(other.double(), want, rtol=2e-6, atol=2e-6)


def test_errors():
    a, decay = torch.randn(3, 5), torch.randn(5)
    for args, message in [
        ((a.int(), a, decay, decay), "a must be a floating tensor"),
        ((a, a[:2], decay, decay), "a has 3 rows of 5 heads, b has 2 of 5"),
        ((a, a, decay[:4], decay), r"decay must be contiguous f32 \[5\]"),
        ((a, a, decay, decay.double()), r"dt_bias must be contiguous f32 \[5\]"),
    ]:
        with pytest.raises(RuntimeError, match="dasllama::delta_gates: " + message):
            delta_gates(*args)


def test_opcheck():
    a, b = torch.randn(3, 4, 20, requires_grad=True), torch.randn(3, 4, 20, requires_grad=True)
    torch.library.opcheck(delta_gates, (a, b, -torch.rand(20), torch.randn(20)))
    a, b = a.detach(), b.detach()
    torch.library.opcheck(delta_gates_backward, (a, b, a, b, -torch.rand(20), torch.randn(20)))
