"""kv_write against torch's indexing, bit for bit."""

import pytest
import torch

from dasllama_torch import ops
from dasllama_torch.errors import KernelError
from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.kv_write import kv_write

DTYPES = [torch.float32, torch.float16]
IDS = {codec.dtype: codec.id for codec in (KV_CODECS["f32"], KV_CODECS["f16"])}


def write(k, v, k_cache, v_cache, slots, form=kv_write):
    """Into caches of floats, whose dtypes say the codec."""
    form(k, v, k_cache, v_cache, slots, IDS[k_cache.dtype], IDS[v_cache.dtype])


def caches(P, G, R, D, Dv, k_dtype=torch.float32, v_dtype=torch.float32):
    """Pages with something else between them, as in a pool."""
    k = torch.full((P, G * R * D + 24), float("nan"), dtype=k_dtype)[:, 8:-16].unflatten(1, (G, R, D))
    v = torch.full((P, G * R * Dv + 3), float("nan"), dtype=v_dtype)[:, :-3].unflatten(1, (G, R, Dv))
    return k, v


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.float16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("v_dtype", DTYPES)
@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize(
    ("P", "G", "R", "D", "Dv"), [(5, 3, 64, 64, 64), (4, 1, 16, 256, 256), (7, 2, 5, 80, 40), (3, 2, 64, 8, 19)]
)
def test_rows_go_to_their_slots_and_nothing_else_is_touched(P, G, R, D, Dv, k_dtype, v_dtype, isa):
    T = P * R // 2
    slots = torch.randperm(P * R)[:T]
    slots[::4] = -1
    k, v = torch.randn(T, G, D), torch.randn(T, G, Dv)
    k_cache, v_cache = caches(P, G, R, D, Dv, k_dtype, v_dtype)
    ops.reset_report()
    write(k, v, k_cache, v_cache, slots)
    assert ops.report() == {"kv_write": {f"cpu/{isa}": 1}}
    for x, cache in ((k, k_cache), (v, v_cache)):
        wanted = torch.full_like(cache, float("nan"))
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[slot // R, :, slot % R] = x[t].to(cache.dtype)
        assert same_bits(cache, wanted)
    twins = caches(P, G, R, D, Dv, k_dtype, v_dtype)
    write(k, v, *twins, slots, kv_write.reference)
    assert same_bits(k_cache, twins[0])
    assert same_bits(v_cache, twins[1])


def test_halves_are_rounded_to_nearest_even_and_clamped(isa):
    special = [
        65504.0,
        65519.0,
        65520.0,
        1e6,
        -1e6,
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        6e-8,
        2.9e-8,
        2.98024e-8,
        3e-8,
    ]
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-25, 1e-40, 2049.0, 2051.0]
    values = torch.cat([torch.tensor(special + ties), torch.randn(2000) * torch.logspace(-9, 5, 2000)])
    values = values[: values.numel() // 16 * 16].view(1, 1, -1)
    k_cache, v_cache = caches(1, 1, 1, values.numel(), values.numel(), torch.float16, torch.float16)
    write(values, -values, k_cache, v_cache, torch.tensor([0]))
    assert same_bits(k_cache.view(-1), values.clamp(-65504, 65504).half().view(-1))
    assert same_bits(v_cache.view(-1), (-values).clamp(-65504, 65504).half().view(-1))


def test_nan_stays_nan(isa):
    k = torch.full((1, 1, 32), float("nan"))
    k_cache, v_cache = torch.zeros(1, 1, 1, 32).half(), torch.zeros(1, 1, 1, 32)
    write(k, k, k_cache, v_cache, torch.tensor([0]))
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_views(isa):
    """Slices of one fused projection, and leading dims that do not flatten."""
    B, L, G, D = 2, 3, 2, 24
    slots = torch.randperm(16)[: B * L]
    fused = torch.full((B, L, 7 + 2 * G * D), float("nan"))
    fused[..., 7:] = torch.randn(B, L, 2 * G * D)
    k, v = fused[..., 7 : 7 + G * D].unflatten(-1, (G, D)), fused[..., 7 + G * D :].unflatten(-1, (G, D))
    for a, b in ((k, v), (torch.randn(B, G, L, D).transpose(1, 2), torch.randn(L, B, G, D).transpose(0, 1))):
        found, wanted = caches(4, G, 4, D, D), caches(4, G, 4, D, D)
        write(a, b, *found, slots)
        write(a.contiguous(), b.contiguous(), *wanted, slots)
        assert same_bits(found[0], wanted[0])
        assert same_bits(found[1], wanted[1])
        assert (~found[0].isnan()).sum() == B * L * G * D


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_of_other_dtypes(dtype):
    k = torch.randn(3, 2, 16).to(dtype)
    k_cache, v_cache = caches(1, 2, 4, 16, 16, torch.float16)
    write(k, k, k_cache, v_cache, torch.tensor([0, 3, 1]))
    assert torch.equal(v_cache[0, :, 3], k[1].float())
    assert torch.equal(k_cache[0, :, 1], k[2].half())


def test_no_rows():
    k_cache, v_cache = caches(1, 2, 4, 16, 16)
    write(torch.randn(0, 2, 16), torch.randn(0, 2, 16), k_cache, v_cache, torch.zeros(0, dtype=torch.int64))
    assert k_cache.isnan().all()


def test_many_threads_write_the_same(threads):
    k, v, slots = torch.randn(700, 3, 64), torch.randn(700, 3, 64), torch.randperm(768)[:700]
    results = []
    for n in (1, 2, 5):
        threads(n)
        pair = caches(12, 3, 64, 64, 64, torch.float16)
        write(k, v, *pair, slots)
        results.append(pair)
    for pair in results[1:]:
        assert same_bits(pair[0], results[0][0])
        assert same_bits(pair[1], results[0][1])


@pytest.mark.parametrize("bad", [16, 10**12, -2])
@pytest.mark.parametrize("form", [kv_write, kv_write.reference])
def test_a_slot_out_of_range_raises_and_writes_nothing(form, bad):
    k = torch.randn(3, 2, 16)
    k_cache, v_cache = caches(4, 2, 4, 16, 16)
    with pytest.raises((RuntimeError, ValueError), match=r"kv_write: slots.*less than 16 \(4 pages of 4 rows\)"):
        write(k, k, k_cache, v_cache, torch.tensor([0, 1, bad]), form)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_the_error_names_the_slot():
    k = torch.randn(3, 2, 16)
    with pytest.raises(RuntimeError, match=r"slots\[2\] is 99, wanted"):
        write(k, k, *caches(4, 2, 4, 16, 16), torch.tensor([0, 1, 99]))


def test_errors():
    k, slots = torch.randn(3, 2, 16), torch.arange(3)
    k_cache, v_cache = caches(4, 2, 4, 16, 16)
    for args, message in [
        ((k.int(), k, k_cache, v_cache, slots), "k and v must be floating"),
        ((k, k, k_cache, v_cache, slots.int()), "slots must be contiguous int64"),
        ((k, k, k_cache, v_cache, slots[:2]), "one row per slot, found 3 and 3 rows for 2 slots"),
        ((k, k[:2], k_cache, v_cache, slots), "one row per slot, found 3 and 2"),
        ((k[..., :8], k, k_cache, v_cache, slots), "k_cache has rows of 64 bytes, wanted 32: a head of 8 in f32"),
        ((k, k[:, :1], k_cache, v_cache, slots), "v has 1 heads, v_cache has 2"),
        ((k, k, k_cache, v_cache[:3], slots), "v_cache has 3 pages of 4 rows, k_cache has 4 of 4"),
        ((k, k, k_cache.double(), v_cache, slots), r"k_cache must be Float \[P, G, R, row\] for f32, found Double"),
        ((k, k, k_cache, v_cache.transpose(0, 2), slots), "v_cache must have contiguous pages"),
        ((k, k, k_cache[0], v_cache, slots), r"k_cache must be Float \[P, G, R, row\] for f32, found Float of rank 3"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            kv_write(*args, 0, 0)
    with pytest.raises(RuntimeError, match="codec 4 of v_cache is unknown, wanted 0 to 3"):
        kv_write(k, k, k_cache, v_cache, slots, 0, 4)


def test_an_input_that_requires_grad_is_refused():
    k, slots = torch.randn(1, 2, 16), torch.tensor([0])
    pair = caches(1, 2, 4, 16, 16)
    with pytest.raises(KernelError, match=r"dasllama::kv_write: k requires grad.*dasllama::attention"):
        write(k.clone().requires_grad_(), k, *pair, slots)
    with pytest.raises(KernelError, match="v requires grad"):
        write(k, k.clone().requires_grad_(), *pair, slots)
    assert pair[0].isnan().all()
    with torch.no_grad():
        write(k.clone().requires_grad_(), k, *pair, slots)
    with torch.inference_mode():
        write(k.clone(), k, *pair, slots)
    assert torch.equal(pair[0][0, :, 0], k[0])


def test_opcheck():
    k = torch.randn(2, 3, 2, 16)
    for dtype in DTYPES:
        args = (
            k,
            k[..., :8],
            *(torch.zeros(4, 2, 4, d, dtype=dtype) for d in (16, 8)),
            torch.tensor([3, -1, 0, 15, 7, 8]),
            IDS[dtype],
            IDS[dtype],
        )
        torch.library.opcheck(kv_write, args)
