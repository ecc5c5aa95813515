"""What q8_0 and tq4 keep of a head, of every size, against float64; what the pool makes of codecs; what is refused."""

import kv_formulas
import numpy as np
import pytest
import torch
from attention_cases import Batch, blank
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch import ops
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.config import CacheSpec
from dasllama_torch.errors import KernelError
from dasllama_torch.ops import registry
from dasllama_torch.ops.kv_codecs import KV_CODECS, MOST_ROTATED
from dasllama_torch.ops.kv_read import kv_read
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.paged_attention import paged_attention

PACKED = ["q8_0", "tq4"]
SIZES = range(32, 513)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cache(codec, dim, rows=3, heads=2):
    """One page, and bytes of another between its end and that of the memory."""
    row = codec.row(dim)
    return blank(codec, 1, heads * rows * row, 0, 40).unflatten(1, (heads, rows, row))


def written(codec, x, form=kv_write):
    """A page whose rows [0, len(x)) hold x [T, heads, dim]."""
    page = cache(codec, x.shape[-1], len(x), x.shape[1])
    form(x, x, page, page.clone(), torch.arange(len(x)), codec.id, codec.id)
    return page


@pytest.mark.parametrize("name", PACKED)
def test_every_head_size_is_kept_as_float64_has_it(name, isa):
    """Scales to a rounding of f16; every code is the nearest one, but where f32 is too coarse to tell."""
    codec = KV_CODECS[name]
    for dim in SIZES:
        x = torch.randn(3, 2, dim) * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
        page = cache(codec, dim)
        end = page.untyped_storage()[-40:]
        kv_write(x, x, page, cache(codec, dim), torch.arange(3), codec.id, codec.id)
        assert list(page.untyped_storage()[-40:]) == list(end) == [255] * 40
        assert page.shape[3] == kv_formulas.row_bytes(name, dim)
        rows = page[0].transpose(0, 1)  # [T, G, row]
        codes, d = kv_formulas.unpack(name, rows.numpy())
        wanted = kv_formulas.kept(name, x.numpy()).reshape(codes.shape)
        at = np.abs(wanted).argmax(-1, keepdims=True)
        top = np.take_along_axis(wanted, at, -1)
        scale = np.abs(top) / 127 if name == "q8_0" else top / -8
        assert (np.abs(d - scale) <= np.maximum(np.abs(scale) * 2.0**-11 * 1.001, 2.0**-25)).all()
        steps = wanted / scale
        assert (np.abs(codes - np.minimum(steps, 127 if name == "q8_0" else 7)) <= 0.5 + 1e-4).all()
        found = kv_read(page, torch.arange(3), codec.id, dim)
        error = np.abs(found.numpy() - kv_formulas.heads(name, rows.numpy(), dim)).max(-1)
        assert (error <= 1e-6 * x.abs().amax(-1).numpy()).all()


@pytest.mark.parametrize("name", list(KV_CODECS))
def test_kernels_and_references_agree_to_the_bit(name, isa):
    codec = KV_CODECS[name]
    for dim in (1, 20, 32, 33, 64, 80, 96, 200, 256, 512, 1000):
        x = torch.randn(5, 2, dim) * torch.logspace(-9, 7, 5)[:, None, None]
        x[0, 0] = 0
        x[1, 1, dim // 2] = float("nan")
        x[2, 0, 0], x[2, 1, 0] = float("inf"), -float("inf")
        ops.reset_report()
        page = written(codec, x)
        slots = torch.tensor([4, -1, 0, 3, 2, 2])
        found = kv_read(page, slots, codec.id, dim)
        assert ops.report() == {op: {f"cpu/{isa}": 1} for op in ("kv_write", "kv_read")}
        assert torch.equal(page.view(torch.uint8), written(codec, x, kv_write.reference).view(torch.uint8))
        wanted = kv_read.reference(page, slots, codec.id, dim)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        assert (found[1] == 0).all()


def test_what_does_not_fit_into_f16():
    """Infinities and large values are taken as the largest of f16; a NaN is not lost."""
    for name in ("f16", *PACKED):
        codec = KV_CODECS[name]
        x = torch.full((3, 1, 256), 1e30)
        x[1, 0, 100:] = -float("inf")
        x[2, 0, 7] = float("nan")
        found = kv_read(written(codec, x), torch.arange(3), codec.id, 256)
        wanted = x[:2].clamp(-65504, 65504)
        assert (found[:2] - wanted).square().mean() < 0.01 * 65504**2
        assert found[2, 0, 7].isnan()


def test_a_rotated_dot_product_loses_little():
    """A head with one large element: 4 bits of a block of its own lose the rest, of a rotated head they do not."""
    x = torch.randn(50, 1, 128)
    x[:, :, 3] *= 40
    codec = KV_CODECS["tq4"]
    kept = kv_read(written(codec, x), torch.arange(50), codec.id, 128)
    assert (kept - x)[:, :, 64:].abs().mean() > 0.1  # spread over all
    assert (kept - x).square().sum() / x.square().sum() < 0.01


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dim", [33, 40, 80, 100, 112, 192, 256, 300, 512])
def test_attention_of_odd_sizes(name, dim, isa):
    from test_paged_attention import assert_close

    batch = Batch([(70, 3), (0, 1)], H=3, G=1, D=dim, Dv=max(32, dim - 7), codec=name, R=64, window=50)
    assert_close(paged_attention(*batch.args()), batch.wanted())


@pytest.mark.parametrize("name", PACKED)
def test_the_reference_of_attention(name):
    from test_paged_attention import assert_close

    batch = Batch([(20, 4)], D=40, Dv=72, codec=name, R=16, softcap=2.0, sinks=torch.randn(4), inert=1)
    assert_close(paged_attention.reference(*batch.args()), batch.wanted())


def test_ops_over_codes_have_no_gradient():
    batch = Batch([(3, 2)], codec="tq4")
    with pytest.raises(KernelError, match="q requires grad.*dasllama::attention"):
        paged_attention(batch.q.requires_grad_(), *batch.args()[1:])
    x = torch.randn(1, 2, 64, requires_grad=True)
    codec = KV_CODECS["q8_0"]
    with pytest.raises(KernelError, match="k requires grad.*dasllama::attention"):
        kv_write(x, x, cache(codec, 64), cache(codec, 64), torch.tensor([0]), codec.id, codec.id)


def test_opcheck():
    for name, v_name in (("q8_0", "tq4"), ("tq4", "f16")):
        batch = Batch([(3, 4), (66, 1)], D=48, Dv=24, codec=name, v_codec=v_name, inert=1)
        torch.library.opcheck(paged_attention, batch.args())
        k, v = KV_CODECS[name], KV_CODECS[v_name]
        slots = torch.tensor([5, -1, 0])
        x = torch.randn(3, 2, 48)
        caches = (torch.zeros(2, 2, 4, c.row(48), dtype=c.dtype) for c in (k, v))
        torch.library.opcheck(kv_write, (x, x, *caches, slots, k.id, v.id))
        torch.library.opcheck(kv_read, (torch.zeros(2, 2, 4, k.row(48), dtype=k.dtype), slots, k.id, 48))


def test_errors_of_reading():
    codec = KV_CODECS["tq4"]
    page, slots = cache(codec, 64), torch.tensor([0])
    for args, message in [
        ((page, slots, 9, 64), "codec 9 of cache is unknown, wanted 0 to 3"),
        ((page, slots, 3, 65), "cache has rows of 36 bytes, wanted 72: a head of 65 in tq4"),
        ((page, slots, 3, 0), "dim is 0, wanted 1 or more"),
        ((page, slots, 3, 1025), "tq4 rotates heads of at most 1024 elements, found 1025"),
        ((page.view(torch.int8), slots, 3, 64), r"cache must be Byte \[P, G, R, row\] for tq4, found Char"),
        ((page, slots.int(), 3, 64), r"slots must be contiguous int64 \[T\]"),
        ((page, torch.tensor([0, 3]), 3, 64), r"slots\[1\] is 3, wanted -1 \(skip\) or less than 3"),
    ]:
        with pytest.raises(RuntimeError, match="dasllama::kv_read: " + message):
            kv_read(*args)


# ---- pools and sessions ---------------------------------------------------------------------------------------------


def layer(heads, k_dim, v_dim):
    return CacheSpec(n_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, window=0)


def test_bytes_of_a_token():
    """As the codec says: 34 or 18 bytes for 32 elements, of heads padded to blocks or to a power of two."""
    for kv_dtype, k_bytes, v_bytes in [
        ("f32", 4 * 80, 4 * 200),
        ("f16", 2 * 80, 2 * 200),
        ("q8_0", 3 * 34, 7 * 34),
        ("tq4", 4 * 18, 8 * 18),
        (("q8_0", "tq4"), 3 * 34, 8 * 18),
        (("f32", "q8_0"), 4 * 80, 7 * 34),
    ]:
        pool = KVPool([layer(3, 80, 200), None, layer(1, 80, 200)], kv_dtype, 1 << 22, "cpu")
        assert pool.groups[0].page_bytes == 64 * (3 + 1) * (k_bytes + v_bytes)
        assert pool.kv_dtype == kv_dtype


def test_pages_of_one_odd_row_keep_floats_aligned():
    """After 34 bytes of a key, the f32 of a value: its layer begins at a multiple of 4, and pages do too."""
    for kv_dtype in (("q8_0", "f32"), ("f32", "q8_0"), ("tq4", "f16")):
        pool = KVPool([layer(1, 32, 32)] * 2, kv_dtype, 1 << 16, "cpu", page_rows=1)
        x, slots = torch.randn(4, 1, 32), torch.arange(4)
        for i, paged in enumerate((pool[0], pool[1])):
            kv_write(x + i, x - i, paged.k, paged.v, slots, *(codec.id for codec in pool.codecs))
        for i, paged in enumerate((pool[0], pool[1])):
            for written, part, codec in ((x + i, paged.k, paged.k_codec), (x - i, paged.v, paged.v_codec)):
                assert torch.equal(kv_read(part, slots, codec.id, 32), codec.load(codec.store(written), 32))


@pytest.mark.parametrize(
    ("kv_dtype", "message"),
    [
        ("q4_0", "kv_dtype 'q4_0' is not offered, wanted 'tq4'"),
        (("f16", "q4_0"), "kv_dtype 'q4_0' is not offered, wanted 'tq4'"),
        ("q9", "kv_dtype 'q9' is unknown, wanted one of f32, f16, q8_0, tq4"),
        (("f16",), "wanted a name or a pair of names"),
    ],
)
def test_names_that_are_refused(kv_dtype, message, oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf")
    for create in (dl.create_session, dl.create_kv_pool):
        with pytest.raises(ValueError, match=message):
            create(model, kv_dtype=kv_dtype)


def test_heads_that_cannot_be_rotated_are_refused():
    with pytest.raises(ValueError, match="tq4 rotates heads of at most 1024 elements, found 1025"):
        KVPool([layer(1, MOST_ROTATED + 1, 32)], ("tq4", "f16"), 1 << 22, "cpu")


def test_a_pair_of_equals_is_that_codec(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf")
    with dl.create_session(model, "tq4") as a, dl.create_session(model, ("tq4", "tq4")) as b:
        assert a.pool is b.pool
        dl.eval_batch([a, b], [[1], [2]])
        with pytest.raises(ValueError, match="kv_dtype is 'f16', and the pool's 'tq4'"):
            dl.create_session(model, "f16", pool=a.pool)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama_headdim", "tq4"),
        ("gpt-oss", "q8_0"),
        ("gemma2", ("tq4", "f16")),
        ("gemma3", "tq4"),
        ("gemma4_e", ("f32", "q8_0")),
        ("gemma4_e", "tq4"),
        ("qwen35", "q8_0"),
        ("qwen35", ("q8_0", "tq4")),
    ],
)
def test_a_row_is_the_same_however_it_is_reached(name, kv_dtype, oracle):
    """Sinks, soft caps, windows, shared keys and values, recurrent layers: in chunks, as recorded steps, in a batch,
    after a fork in the middle of a page, and after going back, a session has the bits of one evaluated in one go."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf")
    pool = dl.create_kv_pool(model, kv_dtype=kv_dtype)
    texts = [text(seed, 150) for seed in range(3)]
    texts[2][:75] = texts[1][:75]

    def session():
        return dl.create_session(model, n_ctx=512, pool=pool)

    wanted = []
    for ids in texts:
        with session() as alone:
            wanted.append(alone.eval(ids, logits="all"))
    assert (wanted[0] != wanted[1]).any()
    a, b = session(), session()
    found = [[a.eval(texts[0][:75], logits="all")], [b.eval(texts[1][:75], logits="all")], [wanted[2][:75]]]
    a.checkpoint()
    c = dl.fork(b)
    for first, last in ((75, 76), (76, 80), (80, 149), (149, 150)):
        parts = dl.eval_batch([a, b, c], [ids[first:last] for ids in texts], logits="all")
        for rows, part in zip(found, parts, strict=True):
            rows.append(part)
    a.truncate(75)
    found.append([wanted[0][:75], a.eval(texts[0][75:], logits="all")])
    for rows, logits in zip(found, [*wanted, wanted[0]], strict=True):
        assert torch.equal(torch.cat(rows), logits)
    for each in (a, b, c):
        each.close()
    assert pool.used_bytes == 0


def test_codecs_are_near_to_floats(oracle):
    """In a model of random weights, as near as their bits allow: a wrong row or scale would be far off."""
    model = dl.load_model(oracle / "tiny" / "llama_headdim.gguf", mode="fp32")
    ids = text(5, 200)
    wanted = dl.create_session(model, "f32", n_ctx=512).eval(ids, logits="all")
    for kv_dtype, bound in (("f16", 0.001), ("q8_0", 0.02), (("f16", "q8_0"), 0.02), ("tq4", 0.4)):
        found = dl.create_session(model, kv_dtype, n_ctx=512).eval(ids, logits="all")
        assert 0 < (found - wanted).std() < bound * wanted.std()


@pytest.mark.parametrize("kv_dtype", ["q8_0", "tq4"])
def test_the_end_of_the_context_is_not_passed(kv_dtype, oracle):
    """Rounded keys cannot be turned to other positions where they lie: ggml-org/llama.cpp#9743. The context ends, or a
    shift evaluates again what it keeps."""
    model = dl.load_model(oracle / "tiny" / "llama.gguf")
    with dl.create_session(model, kv_dtype, n_ctx=64) as session:
        session.eval(text(1, 60))
        assert len(list(session.generate([5], max_tokens=50))) <= 4
        session.truncate(60)
        with pytest.raises(dl.ContextFull):
            session.eval(text(2, 5))
        assert session.n_past == 60
    with dl.create_session(model, kv_dtype, n_ctx=64, on_full="shift") as session:
        session.eval(text(1, 60))
        list(session.generate([5], max_tokens=50))
        assert session.stats.shifts > 0
        found = session.eval([7])
        with dl.create_session(model, kv_dtype, n_ctx=64) as fresh:
            assert torch.equal(fresh.eval(session.tokens), found)


def test_a_recorded_step_knows_its_bytes(oracle):
    """Written and read as the codec has it: of one token over 100 keys."""
    costs = {}
    for name in ("f16", "q8_0", "tq4"):
        batch = Batch([(99, 1)], H=4, G=2, D=64, codec=name)
        costs[name] = registry.cost_of(paged_attention, batch.args(), {}, None).nbytes - 2 * batch.q.nbytes
    assert costs == {"f16": 100 * 2 * 256, "q8_0": 100 * 2 * 136, "tq4": 100 * 2 * 72}
    codec = KV_CODECS["tq4"]
    x, page = torch.randn(3, 2, 64), cache(codec, 64)
    args = x, x, page, page, torch.arange(3), codec.id, codec.id
    assert registry.cost_of(kv_write, args, {}, None).nbytes == 2 * x.nbytes + 2 * 3 * 2 * 36


def test_kernels_of_every_instruction_set_keep_the_same(everywhere):
    codec = KV_CODECS["tq4"]
    x = torch.randn(40, 3, 72)
    first, *others = everywhere(lambda: written(codec, x))
    assert all(torch.equal(other, first) for other in others)
