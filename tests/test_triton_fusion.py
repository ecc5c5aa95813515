"""Ops that are launched as one give what they give one by one, and what must not be is not. Here the mode meets tensors
of the CPU, whose other ops run on the CPU's kernels."""

import pytest
import tolerances
import torch
from attention_cases import Batch
from packed import random_rows
from triton_device import DEVICE, cases

from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.gated_act import SILU, gated_act
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.paged_attention import paged_attention
from dasllama_torch.ops.quant_linear import quant_linear
from dasllama_torch.ops.rms_norm import rms_norm
from dasllama_torch.ops.rope import rope
from dasllama_torch.triton_kernels.few_rows import few_rows_native
from dasllama_torch.triton_kernels.fusion import Fusion

K = 32


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weight(name, N, width=K):
    row = ggml_types.by_name(name)
    return random_rows(row, N, width, seed=N).to(DEVICE), row.id


def fused(f, *args):
    """What f gives with and without fusing, and which kernels served it fused."""
    with torch.inference_mode():
        plain = f(*args)
        registry.reset_report()
        with Fusion():
            found = f(*args)
        return found, plain, registry.report()


def assert_near(found, plain):
    """Rounded activations are those of the plain ops, but for a last bit of the norm, which hardly ever shows."""
    for got, want in zip(found, plain, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 2e-3 * want.abs().max()


@pytest.mark.parametrize("M", cases([1, 3], 3))
def test_a_block(M):
    H, G, D = 2, 1, 16
    x, gain = torch.randn(1, M, K, device=DEVICE), (torch.rand(K, device=DEVICE) + 0.5) * 1e-3
    weights = [weight("Q5_0", H * D), weight("Q5_0", G * D), weight("Q8_0", G * D), weight("Q4_0", K, H * D)]
    gate, up, down = weight("Q5_0", K), weight("Q5_0", K), weight("Q4_1", 5)
    cos, sin = torch.rand(M, 6, device=DEVICE), torch.rand(M, 6, device=DEVICE)
    slots = torch.tensor([9, 2, -1], device=DEVICE)[:M]

    def block(caches):
        h = rms_norm(x, gain, 1e-5)
        q, k, v = (quant_linear(h, *w, None, True).unflatten(-1, (-1, D)) for w in weights[:3])
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        kv_write(k, v, *caches, slots, 1, 0)
        y = x + quant_linear(q.flatten(-2), *weights[3], None, True)
        h = rms_norm(y, gain, 1e-5)
        z = gated_act(quant_linear(h, *gate, None, True), quant_linear(h, *up, None, True), SILU)
        return q, k, v, y, h, z, quant_linear(z, *down, None, True)

    def caches():
        return [torch.zeros(2, G, 8, D, dtype=dtype, device=DEVICE) for dtype in (torch.float16, torch.float32)]

    mine, theirs = caches(), caches()
    with torch.inference_mode():
        plain = block(theirs)
        registry.reset_report()
        with Fusion():
            found = block(mine)
    assert_near(found, plain)
    assert_near(mine, theirs)
    calls = registry.report()
    assert calls["quant_linear"] == {"triton/few_rows_together": 4, "triton/few_rows_native": 3}
    assert calls["rms_norm"] == {"triton/norm_round": 2}
    assert calls["gated_act"] == {"triton/act_round": 1}
    assert calls["rope"] == {"triton/rope_write": 2}
    assert calls["kv_write"] == {"triton/rope_write": 1}
    assert "add" not in calls


def test_bits_of_products_and_sums():
    """Without a norm before them nothing is rounded otherwise."""
    x, a = torch.randn(2, K, device=DEVICE), torch.randn(2, 20, device=DEVICE)
    w, other = weight("Q5_0", 20), weight("Q4_1", 7)

    def f():
        y = quant_linear(x, *w, None, True)
        total = a + y
        return y, total, quant_linear(x, *other, torch.ones(7, device=DEVICE), True), total + 1

    found, plain, _ = fused(f)
    for got, want in zip(found, plain, strict=True):
        assert (got - want).abs().max() <= tolerances.TRITON_PRODUCT * 10 * want.abs().max()
    assert torch.equal(found[1], a + found[0])


@pytest.mark.parametrize(("M", "K"), [(1, 2048), (2, 2048), (1, 768)])
def test_matrices_of_two_types(M, K):
    """One row takes them in one launch, in which each row of W is added up as ever; also where those of the last one do
    not begin at multiples of 16 bytes, as Q6_K's of 768."""
    x = torch.randn(M, K, device=DEVICE)
    weights = [weight("Q4_K", 6, K), weight("Q4_K", 5, K), weight("Q6_K", 7, K), weight("Q5_K", 3, K)]

    def f():
        return [quant_linear(x, *w, None, True) for w in weights]

    found, _, calls = fused(f)
    for got, w in zip(found, weights, strict=True):
        assert torch.equal(got, few_rows_native(x, *w, None))
    together = 3 if M == 1 else 2
    assert calls["quant_linear"] == {"triton/few_rows_together": together, "triton/few_rows_native": 4 - together}


def test_what_changes_in_between_is_seen():
    """Copies, sums of something else, writing in place, another view of a norm: all see what they must."""
    x, gain = torch.randn(1, 2, K, device=DEVICE), torch.rand(K, device=DEVICE)
    w, wide, p = weight("Q5_0", 6), weight("Q5_0", 6, 2 * K), torch.randn(1, 2, 6, device=DEVICE)

    def f():
        h = rms_norm(x, gain, 1e-5)
        joined = h.view(1, 1, 2 * K)  # rounded in blocks of another row
        a = quant_linear(joined, *wide, None, True)
        transposed = rms_norm(x, None, 1e-5).transpose(1, 2).reshape(1, 2 * K)
        b = quant_linear(x, *w, None, True)
        apart = p + p
        again = quant_linear(x, *w, None, True)
        doubled = again + again
        scratch = x.clone()
        c = quant_linear(scratch, *w, None, True)
        scratch.mul_(3)
        d = quant_linear(scratch, *w, None, True)
        half = rms_norm(x, gain, 1e-5).to(torch.float16)
        act = gated_act(x, x, SILU).unflatten(-1, (2, -1)).contiguous()
        tables = (gain.view(2, -1)[:, i : i + 4].contiguous() for i in (0, 4))
        turned = rope(x.unflatten(-1, (4, -1)), *tables)
        return a, transposed, b, apart, doubled, c, d, half, act, turned

    found, plain, calls = fused(f)
    assert_near([t.float() for t in found], [t.float() for t in plain])
    assert calls["rope"] == {"triton": 1}


def test_what_is_no_product_of_few_rows_goes_its_way():
    x, floats = torch.randn(3, K, device=DEVICE), torch.randn(5, K, device=DEVICE).view(torch.uint8)
    w = weight("Q5_0", 6)

    def f():
        return (
            quant_linear(x, *w, None, False),
            quant_linear(x, floats, ggml_types.F32, None, True),
            quant_linear(x.half(), *w, None, True).float(),
            quant_linear(x[:0], *w, None, True),
            quant_linear(x.repeat(20, 1), *w, None, True),
        )

    found, plain, calls = fused(f)
    for got, want in zip(found, plain, strict=True):
        assert torch.equal(got, want)
    assert not any("few_rows_together" in name for name in calls["quant_linear"])


@pytest.mark.parametrize("name", cases(["Q5_0", "Q6_K"], "Q6_K"))
def test_attention_is_rounded_for_its_product(name):
    batch = Batch([(700, 1), (0, 1)], codec="f16", H=8, G=2, D=64, sinks=torch.linspace(-2, 2, 8))
    args = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in batch.args()]
    w = weight(name, 6, 8 * 64)

    def f():
        y = paged_attention(*args)
        z = quant_linear(y.flatten(-2), *w, None, True)
        return y, z, paged_attention(*args) + 1

    found, plain, calls = fused(f)
    assert_near(found, plain)
    assert calls["paged_attention"] == {"triton/shared_round": 1, "triton/shared": 1}


@pytest.mark.parametrize("case", cases(["f16, a window", "f32, other widths", "other caches"], "f16, a window"))
def test_rotation_writing_and_attention(case):
    """Single rows of sequences of their own, one of them without keys before it, and one that is inert. Where nothing
    is to be written, or attention reads another cache, each is done by itself."""
    shape = dict(codec="f16", H=8, G=2, D=64, window=300)
    if case == "f32, other widths":
        shape = dict(codec="f32", H=6, G=2, D=40, Dv=24, R=24, softcap=2.0)
    batch = Batch([(700, 1), (0, 1), (33, 1)], inert=1, **shape)
    T, (G, D, Dv, R) = len(batch.q), (batch.G, batch.D, batch.Dv, batch.R)
    q, k, v = (torch.randn(T, heads, width, device=DEVICE) for heads, width in ((batch.H, D), (G, D), (G, Dv)))
    cos, sin = (torch.rand(T, D // 2 - 4, device=DEVICE) for _ in range(2))
    pages = batch.block_table[batch.row_seq.long(), batch.row_pos.long() // R]
    slots = torch.where(batch.row_seq < 0, -1, pages.long() * R + batch.row_pos % R).to(DEVICE)
    *args, _ = (arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in (*batch.args(), None))
    for cache in args[1:3]:
        cache.transpose(1, 2)[slots[slots >= 0] // R, slots[slots >= 0] % R] = torch.nan
    caches = {fuse: [cache.clone() for cache in args[1:3]] for fuse in (False, True)}

    def f(written):
        read = written if case != "other caches" else [cache.nan_to_num() for cache in args[1:3]]
        turned, key = rope(q, cos, sin), rope(k, cos, sin)
        kv_write(key, v, *written, slots, *args[-3:-1])
        return turned, key, paged_attention(turned, *read, *args[3:])

    with torch.inference_mode():
        plain = f(caches[False])
        registry.reset_report()
        with Fusion():
            found = f(caches[True])
    kernel = "triton/rope_write" if case == "other caches" else "triton/attend_row"
    assert registry.report()["kv_write"] == {kernel: 1}
    assert registry.report()["rope"] == {kernel: 2}
    assert_near(found, plain)
    for mine, theirs in zip(caches[True], caches[False], strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert_near([mine.nan_to_num().float()], [theirs.nan_to_num().float()])


def test_an_error_leaves_nothing_waiting():
    x, w = torch.randn(1, K, device=DEVICE), weight("Q5_0", 6)

    def fail():
        with Fusion():
            quant_linear(x, *w, None, True)
            raise ValueError("mine")

    with torch.inference_mode(), pytest.raises(ValueError, match="mine"):
        fail()
    with torch.inference_mode(), Fusion(), pytest.raises(RuntimeError, match="dasllama::quant_linear: x must be"):
        quant_linear(x[:, :-1].contiguous(), *w, None, True)
