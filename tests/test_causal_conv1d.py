"""The causal convolution against torch's conv1d, and itself in every cut of the same rows. C channels, K taps."""

import pytest
import torch
from tolerances import F32_ROUNDOFF

from dasllama_torch import ops
from dasllama_torch.errors import KernelError
from dasllama_torch.ops.causal_conv1d import causal_conv1d, causal_conv1d_backward, causal_conv1d_update

SHAPES = [(160, 4), (16, 1), (37, 3), (5, 2), (700, 4), (64, 7)]


def inputs(T, C=48, K=4, S=3, inert=0, seed=0):
    """x, weight, row_seq, state: rows of the sequences mixed, `inert` rows of NaN among them."""
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(T, C, generator=gen), torch.randn(C, K, generator=gen)
    row_seq = torch.randint(0, S, (T,), generator=gen, dtype=torch.int32)
    for t in torch.randperm(T, generator=gen)[:inert].tolist():
        row_seq[t], x[t] = -1, float("nan")
    return x, weight, row_seq, torch.randn(S, K - 1, C, generator=gen)


def exact(x, weight, row_seq, state):
    """y and the states in float64, by torch's own convolution; differentiable."""
    y, after = torch.zeros_like(x, dtype=torch.float64), state.double().clone()
    C, K = weight.shape
    for s in range(len(state)):
        own = row_seq == s
        rows = torch.cat([state[s].double(), x[own].double()])
        z = torch.nn.functional.conv1d(rows.T[None], weight.double()[:, None], groups=C)[0].T
        y = y.index_put((own.nonzero()[:, 0],), torch.nn.functional.silu(z))
        after[s] = rows[len(rows) - K + 1 :]
    return y, after


def bound(x, weight, state):
    """K products, each as large as the largest input, then SiLU."""
    return 8 * F32_ROUNDOFF * weight.shape[1] * max(x.nan_to_num().abs().max(), 1.0) * weight.abs().max() * 2


@pytest.mark.parametrize(("C", "K"), SHAPES)
def test_against_float64(C, K, isa):
    args = inputs(50, C, K, inert=4)
    x, weight, row_seq, state = args
    before = state.clone()
    ops.reset_report()
    y, after = causal_conv1d(*args)
    assert ops.report() == {"causal_conv1d": {f"cpu/{isa}": 1}}
    wanted, wanted_after = exact(*args)
    for found, found_after in ((y, after), causal_conv1d.reference(*args)):
        assert (found.double() - wanted).abs().max() <= bound(x, weight, state)
        assert torch.equal(found_after.double(), wanted_after)
    assert torch.equal(state, before)
    assert (y[row_seq < 0] == 0).all()


@pytest.mark.parametrize(("C", "K"), SHAPES)
def test_the_cut_does_not_matter(C, K, isa):
    """Whole, token by token, in chunks, each sequence alone: bit for bit, the states too."""
    x, weight, row_seq, state = inputs(70, C, K, inert=5)
    whole, after = causal_conv1d(x, weight, row_seq, state)
    for size in (1, 2, 3, 64):
        cache = state.clone()
        parts = [
            causal_conv1d_update(x[i : i + size], weight, cache, row_seq[i : i + size].contiguous())
            for i in range(0, 70, size)
        ]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(cache, after)
    for s in range(3):
        own = row_seq == s
        cache = torch.full((5, K - 1, C), float("nan"))
        cache[4] = state[s]
        slots = torch.full((int(own.sum()),), 4, dtype=torch.int32)
        assert torch.equal(causal_conv1d_update(x[own], weight, cache, slots), whole[own])
        assert torch.equal(cache[4], after[s])
        assert cache[:4].isnan().all()


def test_instruction_sets_and_threads_agree(everywhere):
    args, grad = inputs(90, 900, inert=3), torch.randn(90, 900)
    first, *others = everywhere(lambda: (*causal_conv1d(*args), causal_conv1d_backward(grad, *args)))
    for other in others:
        for found, wanted in zip(other, first, strict=True):
            assert torch.equal(found, wanted)


def test_views_and_dtypes(isa):
    x, weight, row_seq, state = inputs(12)
    wanted = causal_conv1d(x, weight, row_seq, state)[0]
    wide = torch.full((12, 60), float("nan"))
    wide[:, 5:53] = x
    assert torch.equal(causal_conv1d(wide[:, 5:53], weight, row_seq, state)[0], wanted)
    assert torch.equal(causal_conv1d(x.t().contiguous().t(), weight, row_seq, state)[0], wanted)
    deeper = causal_conv1d(x.unflatten(0, (3, 4)), weight, row_seq, state)[0]
    assert torch.equal(deeper, wanted.unflatten(0, (3, 4)))
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        found = causal_conv1d(half, weight, row_seq, state)[0]
        assert torch.equal(found, causal_conv1d(half.float(), weight, row_seq, state)[0].to(dtype))
    assert causal_conv1d(x[:0], weight, row_seq[:0], state)[0].shape == (0, 48)


@pytest.mark.parametrize(("C", "K"), SHAPES)
def test_gradients(C, K, isa):
    x, weight, row_seq, state = inputs(40, C, K, inert=0)
    grad = torch.randn(40, C)
    x64 = x.double().requires_grad_()
    (exact(x64, weight, row_seq, state)[0] * grad).sum().backward()
    x32 = x.clone().requires_grad_()
    y, after = causal_conv1d(x32, weight, row_seq, state)
    assert not after.requires_grad  # a constant
    (y * grad).sum().backward()
    reference = causal_conv1d_backward.reference(grad, x, weight, row_seq, state)
    for found in (x32.grad, reference):
        assert (found.double() - x64.grad).abs().max() <= bound(grad, weight, state) * 8


def test_gradients_of_inert_rows_are_zero(isa):
    args = inputs(30, inert=6)
    found = causal_conv1d_backward(torch.randn(30, 48), *args)
    assert (found[args[2] < 0] == 0).all()
    assert torch.isfinite(found).all()


def test_an_input_that_requires_grad_is_refused_with_a_cache():
    x, weight, row_seq, state = inputs(4)
    with pytest.raises(KernelError, match="causal_conv1d_update: x requires grad.*causal_conv1d leaves"):
        causal_conv1d_update(x.requires_grad_(), weight, state, row_seq)


def test_errors():
    x, weight, row_seq, state = inputs(6)
    good = {"x": x, "weight": weight, "state": state, "slots": row_seq}
    for change, message in [
        ({"x": x.int()}, "x must be a floating tensor"),
        ({"x": x[:, :40]}, r"weight must be contiguous f32 \[40, taps\]"),
        ({"weight": weight.double()}, r"weight must be contiguous f32 \[48, taps\]"),
        ({"weight": weight[:, :0]}, r"weight must be contiguous f32 \[48, taps\]"),
        ({"weight": weight[:, :3].contiguous()}, r"state must be contiguous f32 \[sequences, 2, 48\]"),
        ({"state": state.half()}, r"state must be contiguous f32 \[sequences, 3, 48\]"),
        ({"slots": row_seq.long()}, r"slots must be contiguous int32 \[6\]"),
        ({"slots": torch.tensor([0, 0, 0, 0, 0, 3], dtype=torch.int32)}, r"slots\[5\] is 3, wanted -1 \(inert\) to 2"),
    ]:
        before = state.clone()
        with pytest.raises(RuntimeError, match="dasllama::causal_conv1d.*" + message):
            causal_conv1d_update(**(good | change))
        assert torch.equal(state, before)


def test_opcheck():
    x, weight, row_seq, state = inputs(5, C=20)
    torch.library.opcheck(causal_conv1d_update, (x, weight, state, row_seq))
    torch.library.opcheck(causal_conv1d, (x.clone().requires_grad_(), weight, row_seq, state))
    torch.library.opcheck(causal_conv1d_backward, (torch.randn_like(x), x, weight, row_seq, state))
