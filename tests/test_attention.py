"""Functional attention: bit for bit the paged form, and its gradient against float64 autograd of a dense formula."""

import pytest
import torch
from attention_cases import Batch
from tolerances import ATTENTION, ATTENTION_GRADIENT

from dasllama_torch import ops
from dasllama_torch.ops.attention import attention, attention_backward
from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.paged_attention import paged_attention

F32 = KV_CODECS["f32"].id


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sequences(*spans: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position of rows: (sequence, first position, end) each."""
    seq = torch.cat([torch.full((end - first,), s, dtype=torch.int32) for s, first, end in spans])
    return seq, torch.cat([torch.arange(first, end, dtype=torch.int32) for _, first, end in spans])


def dense(q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, scale, window, softcap, sinks) -> torch.Tensor:
    """One masked softmax over everything, in q's dtype and differentiable. Empty rows are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = (q_seq[:, None] == k_seq) & (k_seq >= 0) & (k_pos < q_end[:, None])
    if window:
        seen = seen & (k_pos > q_pos[:, None] - window)
    score = torch.einsum("thd,shd->hts", q, k) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    weight = torch.where(seen, torch.exp(score), 0)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.to(q.dtype).exp()[:, None, None]
    weight = torch.where(seen.any(1)[:, None], weight / total.clamp(min=1e-300), 0)
    return torch.einsum("hts,shd->thd", weight, v)


def example(H=4, G=2, D=32, Dv=None, window=0, softcap=0.0, sinks=False, causal=True):
    """Three sequences, one that starts late, with padding rows between and one sequence without any query."""
    q_seq, q_pos = sequences((0, 0, 17), (-1, 17, 20), (5, 300, 311))
    k_seq, k_pos = sequences((0, 0, 17), (-1, 17, 20), (5, 290, 311), (7, 0, 4))
    q_end = q_pos + 1 if causal else torch.where(q_pos < 10, 10, q_pos + 1).to(torch.int32)
    T, S = len(q_seq), len(k_seq)
    q, k, v = torch.randn(T, H, D), torch.randn(S, G, D), torch.randn(S, G, Dv or D)
    return (
        q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, D**-0.5, window, softcap, torch.randn(H) if sinks else None,
    )  # fmt: skip


OPTIONS = [
    {},
    {"H": 6, "G": 3, "D": 80, "Dv": 24},
    {"H": 3, "G": 1, "D": 20, "window": 4},
    {"softcap": 0.7, "sinks": True},
    {"window": 6, "softcap": 2.0, "sinks": True, "causal": False},
]


def doubled(args):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, isa):
    args = example(**options)
    wanted = dense(*doubled(args))
    ops.reset_report()
    found = attention(*args)
    assert ops.report() == {"attention": {f"cpu/{isa}": 1}}
    assert found.shape == wanted.shape
    for result in (found, attention.reference(*args)):
        torch.testing.assert_close(result.double(), wanted, rtol=0, atol=ATTENTION)
    assert (found[17:20] == 0).all()


@pytest.mark.parametrize("form", [{}, {"window": 70, "softcap": 3.0}, {"D": 40, "Dv": 24, "H": 6, "G": 3}])
def test_bits_of_the_paged_form(form, isa):
    """The same keys in an f32 cache; whole sequences, and the tail of one whose first keys are gone."""
    batch = Batch([(0, 90), (300, 20), (0, 1)], spans=[(0, 3, 9)], sinks=torch.randn(form.get("H", 4)), **form)
    k = torch.cat(batch.keys).float()
    v = torch.cat(batch.values).float()
    k_seq, k_pos = sequences((0, 0, 90), (1, 0, 320), (2, 0, 1))
    rest = batch.args()[7:11]
    wanted = paged_attention(*batch.args())
    rows = batch.row_seq, batch.row_pos, batch.row_end
    assert torch.equal(attention(batch.q, k, v, *rows, k_seq, k_pos, *rest), wanted)
    if batch.window:
        kept = (k_seq != 1) | (k_pos >= 300 - 70)
        late = attention(batch.q, k[kept], v[kept], *rows, k_seq[kept], k_pos[kept], *rest)
        assert torch.equal(late, wanted)


def test_bits_of_writing_and_reading_a_cache(isa):
    T, H, G, D = 150, 4, 2, 64
    q, k, v = torch.randn(T, H, D), torch.randn(T, G, D), torch.randn(T, G, D)
    seq, pos = sequences((0, 0, T))
    k_cache, v_cache = torch.full((4, G, 64, D), float("nan")), torch.full((4, G, 64, D), float("nan"))
    table = int32(2, 0, 3)[None]
    kv_write(k, v, k_cache, v_cache, table[0, pos // 64].long() * 64 + pos % 64, F32, F32)
    paged = paged_attention(q, k_cache, v_cache, table, seq, pos, pos + 1, 0.125, 0, 0.0, None, F32, F32, D)
    assert torch.equal(attention(q, k, v, seq, pos, pos + 1, seq, pos, 0.125, 0, 0.0, None), paged)


def test_order_of_the_keys_does_not_matter(isa):
    """Sorted, shuffled, sequences interleaved: bit for bit, as the positions say where a key belongs."""
    q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, *rest = example(window=9)
    wanted = attention(q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, *rest)
    for order in (torch.randperm(len(k)), torch.arange(len(k)).flip(0)):
        keys = k[order], v[order], q_seq, q_pos, q_end, k_seq[order], k_pos[order]
        assert torch.equal(attention(q, *keys, *rest), wanted)


@pytest.mark.parametrize("window", [0, 6])
def test_gaps_repeats_and_negative_positions(window, isa):
    q_seq, k_seq = torch.zeros(6, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    q_pos, k_pos = int32(0, 3, 5, 9, 500, -1), int32(3, 3, -2, 7, 9, 0, 400, 498, 500)
    args = torch.randn(6, 2, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 16), q_seq, q_pos, q_pos + 1, k_seq, k_pos
    args = (*args, 0.25, window, 0.0, None)
    torch.testing.assert_close(attention(*args).double(), dense(*doubled(args)), rtol=0, atol=ATTENTION)


def test_leading_dims_and_views(isa):
    q, k, v, *rest = example()
    wanted = attention(q, k, v, *rest)
    fused = torch.full((len(k), 3 + 4 * 32), float("nan"))
    fused[:, 3:] = torch.cat([k.flatten(1), v.flatten(1)], 1)
    keys, values = fused[:, 3:67].unflatten(-1, (2, 32)), fused[:, 67:].unflatten(-1, (2, 32))
    assert torch.equal(attention(q, keys, values, *rest), wanted)
    found = attention(q[None], k[None], v.unflatten(0, (5, 9)), *rest)
    assert torch.equal(found, wanted[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    q, k, v, *rest = example()
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    found = attention(q, k, v, *rest)
    assert found.dtype == dtype
    assert torch.equal(found, attention(q.float(), k.float(), v.float(), *rest).to(dtype))
    grads = attention_backward(torch.randn(q.shape).to(dtype), q, k, v, *rest)
    assert [g.dtype for g in grads] == [dtype] * 3


def test_instruction_sets_and_threads_agree(everywhere):
    args = example(window=30, softcap=4.0, sinks=True)
    grad = torch.randn(args[0].shape)
    first, *others = everywhere(lambda: (attention(*args), *attention_backward(grad, *args)))
    for other in others:
        for found, wanted in zip(other, first, strict=True):
            assert torch.equal(found, wanted)


# ---- gradient -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_against_float64(options, isa):
    args = example(**options)
    grad = torch.randn(*args[0].shape[:2], args[2].shape[2])
    exact = [x.double().requires_grad_() for x in args[:3]]
    dense(*exact, *doubled(args[3:])).backward(grad.double())
    ours = [x.clone().requires_grad_() for x in args[:3]]
    ops.reset_report()
    attention(*ours, *args[3:]).backward(grad)
    assert ops.report()["attention_backward"] == {f"cpu/{isa}": 1}
    reference = attention_backward.reference(grad, *args)
    for x, want, other in zip(ours, exact, reference, strict=True):
        scale = want.grad.abs().max()
        assert (x.grad.double() - want.grad).abs().max() <= ATTENTION_GRADIENT * scale
        assert (other.double() - want.grad).abs().max() <= ATTENTION_GRADIENT * scale
    assert (ours[0].grad[17:20] == 0).all()
    assert (ours[1].grad[-4:] == 0).all()


def test_gradient_over_a_long_context(isa):
    """Several blocks and splits, few rows."""
    q_seq, q_pos = sequences((0, 597, 600))
    k_seq, k_pos = sequences((0, 0, 600))
    args = torch.randn(3, 2, 16), torch.randn(600, 1, 16), torch.randn(600, 1, 16)
    rest = q_seq, q_pos, q_pos + 1, k_seq, k_pos, 0.25, 0, 0.0, None
    grad = torch.randn(3, 2, 16)
    exact = [x.double().requires_grad_() for x in args]
    dense(*exact, *rest).backward(grad.double())
    for found, want in zip(attention_backward(grad, *args, *rest), exact, strict=True):
        assert (found.double() - want.grad).abs().max() <= ATTENTION_GRADIENT * want.grad.abs().max()


def test_gradient_of_strided_inputs(isa):
    q, k, v, *rest = example()
    grad = torch.randn(q.shape)
    wanted = attention_backward(grad, q, k, v, *rest)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (grad, q, k, v)]
    for found, want in zip(attention_backward(*turned, *rest), wanted, strict=True):
        assert found.is_contiguous()
        assert torch.equal(found, want)


# ---- edges and errors -----------------------------------------------------------------------------------------------


def test_no_rows_or_no_keys():
    q, k, v, q_seq, q_pos, q_end, k_seq, k_pos, *rest = example()
    assert attention(q[:0], k, v, q_seq[:0], q_pos[:0], q_end[:0], k_seq, k_pos, *rest).shape == (0, 4, 32)
    found = attention(q, k[:0], v[:0], q_seq, q_pos, q_end, k_seq[:0], k_pos[:0], *rest)
    assert found.shape == q.shape
    assert (found == 0).all()
    grads = attention_backward(torch.randn(q.shape), q, k[:0], v[:0], q_seq, q_pos, q_end, k_seq[:0], k_pos[:0], *rest)
    assert (grads[0] == 0).all()
    assert grads[1].shape == (0, 2, 32)


def test_errors():
    args = example()
    names = [argument.name for argument in attention._schema.arguments]
    good = dict(zip(names, args, strict=True))
    for change, message in [
        ({"q": good["q"].int()}, "q must be a floating tensor"),
        ({"q": good["q"][..., :16]}, "q has heads of 16, k of 32"),
        ({"q": good["q"][:, :3]}, "q has 3 heads, wanted a multiple of k's 2"),
        ({"v": good["v"][:-1]}, "k has 45 rows of 2 heads, v has 44 of 2"),
        ({"q_seq": good["q_seq"][:-1]}, r"q_seq must be contiguous int32 \[31\]"),
        ({"k_pos": good["k_pos"].long()}, r"k_pos must be contiguous int32 \[45\]"),
        ({"window": -1}, "window and softcap must be 0"),
        ({"sinks": torch.zeros(3)}, r"sinks must be contiguous f32 \[4\]"),
    ]:
        with pytest.raises(RuntimeError, match="dasllama::attention: .*" + message):
            attention(**(good | change))
    with pytest.raises(RuntimeError, match="attention_backward: grad must have the output's 3968 elements, found 32"):
        attention_backward(torch.randn(32), *args)


def test_opcheck():
    for options in OPTIONS[2:4]:
        q, k, v, *rest = example(**options)
        torch.library.opcheck(attention, (*(x.clone().requires_grad_() for x in (q, k, v)), *rest))
        torch.library.opcheck(attention_backward, (torch.randn(*q.shape[:2], v.shape[2]), q, k, v, *rest))
