"""Norms, rotations, gated activations, soft caps, cache writes and paged attention in Triton, at odd sizes and over
views, against float64 formulas and the references."""

import ctypes
import mmap

import pytest
import test_attention as attention_cases
import tolerances
import torch
from attention_cases import Batch
from triton_device import DEVICE, cases, ragged

from dasllama_torch.errors import KernelError
from dasllama_torch.ops import gated_act as acts
from dasllama_torch.ops import registry
from dasllama_torch.ops.attention import attention as attention_op
from dasllama_torch.ops.attention import attention_backward as attention_backward_op
from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.kv_write import kv_write as kv_write_op
from dasllama_torch.ops.rms_norm import rms_norm as rms_norm_op
from dasllama_torch.ops.rms_norm import rms_norm_backward as rms_norm_backward_op
from dasllama_torch.ops.rope import rope as rope_op
from dasllama_torch.ops.rope_tables import long_rope_tables as long_rope_tables_op
from dasllama_torch.ops.rope_tables import rope_tables as rope_tables_op
from dasllama_torch.triton_kernels.attention import attention, attention_backward
from dasllama_torch.triton_kernels.gated_act import gated_act, gated_act_backward
from dasllama_torch.triton_kernels.kv_write import kv_write
from dasllama_torch.triton_kernels.paged_attention import paged_attention
from dasllama_torch.triton_kernels.rms_norm import rms_norm, rms_norm_backward
from dasllama_torch.triton_kernels.rope import rope
from dasllama_torch.triton_kernels.rope_tables import long_rope_tables, rope_tables
from dasllama_torch.triton_kernels.softcap import softcap, softcap_backward

MANY = 9 if DEVICE == "cuda" else 2
F32, F16 = KV_CODECS["f32"].id, KV_CODECS["f16"].id


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def here(*tensors):
    return [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in tensors]


def assert_near(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> None:
    assert found.dtype == wanted.dtype or wanted.dtype == torch.float64
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu().double(), wanted.double(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("C", cases([1, 67, 4099], 1, 4099))
def test_rms_norm(C):
    x, weight, grad = torch.randn(2, 3, C) * 5, torch.randn(C), torch.randn(2, 3, C)
    for w in (weight, None):
        found = rms_norm(ragged(x), *here(w), 1e-5)
        assert_near(found, rms_norm_op.reference(x.double(), w, 1e-5), tolerances.TRITON_F32, tolerances.TRITON_F32)
        found = rms_norm_backward(ragged(grad), ragged(x), *here(w), 1e-5)
        wanted = rms_norm_backward_op.reference(grad.double(), x.double(), w, 1e-5)
        assert_near(found, wanted, tolerances.TRITON_F32, 5 * tolerances.TRITON_F32)
    assert rms_norm(x.half().to(DEVICE), None, 1e-5).dtype == torch.float16


@pytest.mark.parametrize("act", range(4))
def test_gated_act(act):
    edge = torch.tensor([0.0, -0.0, 7.0, -7.0, 7.5, -40.0, 40.0, 88.8, -88.8, -200.0, 200.0, 1e-20, float("nan")])
    gate = torch.cat([torch.randn(200) * 8, edge])[None].repeat(3, 1)
    up, grad = torch.randn(3, 213) * 8, torch.randn(3, 213)
    found = gated_act(ragged(gate), ragged(up), act).cpu().double()
    wanted = acts.gated_act.reference(gate.double(), up.double(), act).double()  # f32 inside: rounded inputs
    scale = (gate * up).abs().double() if act != acts.SIGMOID else up.abs().double()
    error = (found - wanted).abs()
    allowed = 2 * tolerances.ACTIVATION * wanted.abs() + 2 * tolerances.ACTIVATION_TAIL * scale
    assert ((error <= allowed) | (found.isnan() & wanted.isnan())).all()
    for got, want in zip(
        gated_act_backward(*(ragged(t) for t in (grad, gate, up)), act),
        acts.gated_act_backward.reference(grad, gate, up, act),
        strict=True,
    ):
        assert_near(got, want, 4e-6, 4e-6)


def test_softcap():
    x = torch.cat([torch.randn(3000) * 60, torch.randn(500) * 0.01, torch.tensor([0.0, 1e4, -1e4, float("nan")])])
    wanted = torch.tanh(x.double() / 30) * 30
    assert_near(softcap(x.to(DEVICE), 30.0), wanted, tolerances.ACTIVATION, 0)
    grad = torch.randn(len(x))
    y = wanted.float()
    found = softcap_backward(*here(grad, y), 30.0)
    assert_near(found, grad.double() * (1 - (y.double() / 30) ** 2), tolerances.ACTIVATION, tolerances.ACTIVATION)


def test_rope_and_its_tables():
    inv_freq = 1 / 1e4 ** (torch.arange(0, 36, 2).float() / 36)
    positions = torch.tensor([0, 1, 77, 131071, 1000003])
    for dtype in (torch.int32, torch.int64):
        for got, want in zip(
            rope_tables(*here(positions.to(dtype), inv_freq), 1.1),
            rope_tables_op.reference(positions, inv_freq, 1.1),
            strict=True,
        ):
            assert_near(got, want, 0, 2 * tolerances.ROPE_TABLE)
    x = torch.randn(5, 7, 40)
    cos, sin = rope_tables_op.reference(positions, inv_freq, 1.1)
    found = rope(*here(torch.randn(5, 9, 40)[:, 1:8].copy_(x), cos, sin))
    assert_near(found, rope_op.reference(x, cos, sin), tolerances.TRITON_F32, tolerances.TRITON_F32)
    assert torch.equal(found[..., 36:].cpu(), x[..., 36:])


def test_tables_of_several_positions_and_of_long_contexts():
    inv_freq, positions = torch.rand(10), torch.randint(0, 999, (4, 3))
    axes = torch.randint(0, 3, (10,), dtype=torch.int32)
    for got, want in zip(
        rope_tables(*here(positions, inv_freq), 1.0, axes.to(DEVICE)),
        rope_tables_op.reference(positions, inv_freq, 1.0, axes),
        strict=True,
    ):
        assert_near(got, want, 0, tolerances.ROPE_TABLE)
    bad = axes.clone()
    bad[2] = 3
    cos, _ = rope_tables(*here(positions, inv_freq), 1.0, bad.to(DEVICE))
    assert cos[:, 2].isnan().all()
    assert not cos[:, :2].isnan().any()
    lengths, long = torch.tensor([5, 100, 101, 9]), torch.rand(10)
    for got, want in zip(
        long_rope_tables(*here(positions[:, 0], lengths, inv_freq, long), 100, 1.2),
        long_rope_tables_op.reference(positions[:, 0], lengths, inv_freq, long, 100, 1.2),
        strict=True,
    ):
        assert_near(got, want, 0, 2 * tolerances.ROPE_TABLE)


@pytest.mark.parametrize("codecs", [("f32", "f32"), ("f16", "f16"), ("f32", "f16")])
def test_kv_write(codecs):
    keys, values = (KV_CODECS[name] for name in codecs)
    P, G, R, D, Dv = 4, 2, 5, 20, 9
    memory = [torch.full((P, G, R, n + 3), 7.0, dtype=c.dtype) for n, c in ((D, keys), (Dv, values))]
    caches = [m[..., :n] for m, n in zip(memory, (D, Dv), strict=True)]
    k, v = torch.randn(8, G, D), torch.randn(8, G, Dv) * 1e5
    v[0, 0, 0] = float("nan")
    slots = torch.randperm(P * R)[:8]
    slots[3] = -1
    on_device = [m.clone().to(DEVICE) for m in memory]
    found = [m[..., :n] for m, n in zip(on_device, (D, Dv), strict=True)]
    outside = slots.clone()
    outside[3] = P * R  # a GPU leaves it out
    for s in (slots, outside):
        kv_write(ragged(k), ragged(v), *found, s.to(DEVICE), keys.id, values.id)
    kv_write_op.reference(k, v, *caches, slots, keys.id, values.id)
    for got, want in zip(on_device, memory, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", cases(["f32", "f16"], "f16"))
@pytest.mark.parametrize(
    ("sequences", "shape"),
    [
        ([(0, 5), (70, 3), (130, 1), (0, 1)], dict(inert=3)),
        ([(3, 40)], dict(H=6, G=1, D=80, R=16)),
        ([(30, 1), (0, 3)], dict(H=71, G=1, D=32)),
        ([(60, 19), (0, 9)], dict(window=21, softcap=3.0, sinks=torch.linspace(-2, 2, 4), inert=2)),
        ([(20, 12), (0, 20)], dict(spans=[(1, 4, 11)], D=20, Dv=9, R=7, window=6)),
        ([(700, 1), (0, 2), (530, 1)], dict(D=16, sinks=torch.linspace(-2, 2, 4), inert=1)),
        ([(1100, 1)], dict(D=16, window=600)),
        ([(90, 1), (9, 1)], dict(window=21, softcap=3.0, sinks=torch.linspace(-2, 2, 4), inert=1)),
        ([(150, 1), (33, 2)], dict(H=12, G=1, D=20, Dv=9, R=24)),
        ([(150, 1), (70, 1)], dict(H=6, G=2, D=72, Dv=40)),
    ],
)
def test_paged_attention(sequences, shape, codec):
    batch = Batch(sequences, codec=codec, **shape)
    found = paged_attention(*here(*batch.args()))
    assert_near(found, batch.wanted(), 0, tolerances.TRITON_ATTENTION)


@pytest.mark.parametrize("Dv", cases([1, 16, 17, 33, 128, 256], 17))
def test_widths_of_values(Dv):
    batch = Batch([(0, 70)], codec="f16", H=4, G=2, D=40, Dv=Dv)
    found = paged_attention(*here(*batch.args()))
    assert_near(found, batch.wanted(), 0, tolerances.TRITON_ATTENTION)


def test_attention_over_mixed_caches_and_strided_queries():
    batch = Batch([(33, 3)], codec="f32", v_codec="f16", H=5, G=5)
    q, *rest = batch.args()
    found = paged_attention(ragged(q), *here(*rest))
    assert_near(found, batch.wanted(), 0, tolerances.TRITON_ATTENTION)
    assert paged_attention(*here(*batch.args(slice(0, 0)))).shape == (0, 5, 64)


def test_a_fault_shows_in_the_rows_that_see_it_alone():
    batch = Batch([(0, 40)], H=2, G=1, D=16)
    page, row = batch.block_table[0, 0], 30
    batch.v_cache[page, 0, row, 3] = float("nan")
    found = paged_attention(*here(*batch.args())).cpu()
    assert found[30:].isnan().flatten(1).any(1).all()
    torch.testing.assert_close(found[:30].double(), batch.wanted()[:30], rtol=0, atol=tolerances.TRITON_ATTENTION)


@pytest.mark.parametrize("codec", ["f16", "q8_0"])
def test_a_fault_shows_in_the_single_rows_that_see_it_alone(codec):
    """Behind one row's window, and in another's keys or values; a tile of keys has both."""
    batch = Batch([(49, 1), (40, 1), (40, 1)], H=2, G=1, D=32, codec=codec, window=30)
    batch.k_cache, batch.v_cache, wanted = batch.k_cache.contiguous(), batch.v_cache.contiguous(), batch.wanted()
    nan = torch.tensor([0x7E00], dtype=torch.int16).view(batch.k_cache.dtype)
    for cache, seq, row in (
        (batch.k_cache, 0, 5), (batch.v_cache, 0, 6), (batch.k_cache, 1, 20), (batch.v_cache, 2, 30)
    ):  # fmt: skip
        cache[batch.block_table[seq, 0], 0, row, : len(nan)] = nan
    found = paged_attention(*here(*batch.args())).cpu()
    assert found[1].isnan().all()
    assert found[2].isnan().flatten(1).any(1).all()
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0, atol=tolerances.TRITON_ATTENTION)


@pytest.mark.skipif(DEVICE != "cpu", reason="protects memory of the host")
@pytest.mark.parametrize("page", [-1, 2])
def test_a_single_row_reads_nothing_of_a_page_that_is_none(page):
    """No other one either: a pool has memory behind no more pages than are in use."""
    memory = mmap.mmap(-1, 4096 * 2)
    cache = torch.frombuffer(memory, dtype=torch.float16).view(2, 1, 64, 32)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(4096 * 2), 0) == 0
    row = torch.zeros(1, dtype=torch.int32)
    where = row[None] + page, row, row + 4, row + 5
    for found in (cache, cache[:0]):
        assert paged_attention(torch.randn(1, 2, 32), found, found, *where, 1.0, 0, 0.0, None, 1, 1, 32).isnan().all()


@pytest.mark.parametrize("sequences", [[(0, 20), (7, 1)], [(19, 1), (7, 1)]])
def test_what_is_out_of_range_gives_nan_and_reads_nothing(sequences):
    for what, change in (("sequence", (4, 5)), ("end", (6, 9999)), ("page", (3, 2**30)), ("page", (3, -1))):
        batch = Batch(sequences, H=2, G=1, D=16)
        args = list(batch.args())
        args[change[0]] = args[change[0]].clone()
        args[change[0]][0] = change[1]
        found = paged_attention(*here(*args)).cpu()
        assert found[0].isnan().all(), what
        torch.testing.assert_close(found[-1].double(), batch.wanted()[-1], rtol=0, atol=tolerances.TRITON_ATTENTION)


@pytest.mark.parametrize(
    ("codecs", "D", "Dv"),
    [(("q8_0", "q8_0"), 80, 33), (("tq4", "tq4"), 128, 80), (("f16", "tq4"), 20, 20), (("q8_0", "f32"), 64, 17)][:MANY],
)
def test_codes(codecs, D, Dv):
    """What is written is the reference's, to the bit, and attention reads it: a few rows, and tiles of them."""
    batch = Batch([(70, 1), (5, 12)], codec=codecs[0], v_codec=codecs[1], H=4, G=2, D=D, Dv=Dv, window=50, inert=2)
    batch.k_cache, batch.v_cache = batch.k_cache.contiguous(), batch.v_cache.contiguous()
    found = paged_attention(*here(*batch.args()))
    assert_near(found, batch.wanted(), 0, tolerances.TRITON_ATTENTION)
    few = slice(0, 3)
    assert_near(paged_attention(*here(*batch.args(few))), batch.wanted()[few], 0, tolerances.TRITON_ATTENTION)
    keys, values = batch.codecs
    k, v = torch.randn(9, 2, D), torch.randn(9, 2, Dv) * 10
    k[0], k[1, 0, :3] = 0.0, torch.tensor([1e30, -1e30, 0.0])
    wanted = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
    slots = torch.randperm(batch.k_cache.shape[0] * batch.R)[:9]
    on_device = here(*(cache.clone() for cache in wanted))
    kv_write(ragged(k), ragged(v), *on_device, slots.to(DEVICE), keys.id, values.id)
    kv_write_op.reference(k, v, *wanted, slots, keys.id, values.id)
    for got, want in zip(on_device, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    v[2, 1, 4] = float("nan")
    kv_write(*here(k, v), *on_device, slots.to(DEVICE), keys.id, values.id)
    page, row = divmod(slots[2].item(), batch.R)
    assert values.load(on_device[1][page, 1, row].cpu(), Dv).isnan().any()
    assert not values.load(on_device[1][page, 0, row].cpu(), Dv).isnan().any()


def test_codes_at_odd_addresses_are_left_to_the_reference_and_counted():
    batch = Batch([(3, 2)], codec="q8_0")
    memory = torch.zeros(batch.v_cache.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:]
    args = here(*batch.args())
    args[2] = memory.view(batch.v_cache.shape).copy_(batch.v_cache)
    registry.reset_report()
    found = paged_attention(*args)
    assert registry.report()["paged_attention"] == {"reference": 1}
    assert_near(found, batch.wanted(), 0, tolerances.TRITON_ATTENTION)
    with registry.strict(), pytest.raises(KernelError, match="codes at odd addresses"):
        paged_attention(*args)


@pytest.mark.parametrize("options", attention_cases.OPTIONS)
def test_attention_without_a_cache(options):
    args = attention_cases.example(**options)
    found = attention(*here(*args))
    assert_near(found, attention_op.reference(*args), 0, 2 * tolerances.ATTENTION)
    grad = torch.randn(found.shape)
    for got, want in zip(
        attention_backward(*here(grad, *args)), attention_backward_op.reference(grad, *args), strict=True
    ):
        assert (got.cpu() - want).abs().max() <= 2 * tolerances.ATTENTION_GRADIENT * want.abs().max()


def test_a_fault_in_a_key_shows_in_the_rows_that_see_it_alone():
    args = list(attention_cases.example(H=2, G=1))
    args[2] = args[2].clone()
    args[2][5, 0, 3] = float("inf")
    found = attention(*here(*args)).cpu()
    assert found[5:17].isnan().flatten(1).any(1).all()
    assert not found[:5].isnan().any()
    assert not found[17:].isnan().any()


def test_wrong_caches_are_refused():
    batch = Batch([(3, 2)])
    args = here(*batch.args())
    for at, value, text in ((1, args[1].half(), "k_cache must be"), (4, args[4].long(), "row_seq must be int32")):
        with pytest.raises(RuntimeError, match=f"dasllama::paged_attention: {text}"):
            paged_attention(*args[:at], value, *args[at + 1 :])
    k, v, slots = *(torch.zeros(2, 2, 64, device=DEVICE) for _ in range(2)), torch.zeros(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="dasllama::kv_write: slots must be int64"):
        kv_write(k, v, args[1], args[2], slots, F32, F32)
    with pytest.raises(RuntimeError, match="dasllama::kv_write: v_cache must be torch.float16"):
        kv_write(k, v, args[1], args[2], slots.long(), F32, F16)


def test_wrong_shapes_and_dtypes_are_refused():
    x, row = torch.zeros(3, 2, 8, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    for call, text in (
        (lambda: rms_norm(x, row[0], 1e-5), r"rms_norm: weight must be torch.float32 \[8\]"),
        (lambda: rms_norm(x.double(), None, 1e-5), "rms_norm: x must be torch.float32 or"),
        (lambda: rms_norm_backward(x[:2], x, None, 1e-5), r"rms_norm_backward: grad must be .* \[3, 2, 8\]"),
        (lambda: gated_act(x, x[:, :1], 0), r"gated_act: up must be .* \[3, 2, 8\]"),
        (lambda: gated_act(x, x, 4), "gated_act: act must be"),
        (lambda: softcap(x.int(), 3.0), "softcap: x must be"),
        (lambda: rope(x, row[:2], row[:2]), "rope: cos must be"),
        (lambda: rope(x, row, row.half()), "rope: sin must be torch.float32"),
        (lambda: rope_tables(row[0], row[0], 1.0), "rope_tables: positions must be torch.int32 or torch.int64"),
        (lambda: rope_tables(x[0].long(), row[0], 1.0), "rope_tables: positions .* need axes"),
    ):
        with pytest.raises(RuntimeError, match=f"dasllama::{text}"):
            call()
