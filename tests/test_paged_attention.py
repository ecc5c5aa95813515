"""Paged attention against float64 and transformers' eager functions; and that a row's bits depend on nothing else."""

import itertools
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from attention_cases import Batch
from tolerances import ATTENTION
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_attention

from dasllama_torch import ops
from dasllama_torch.errors import KernelError
from dasllama_torch.ops.kv_codecs import KV_CODECS
from dasllama_torch.ops.paged_attention import paged_attention

CODECS = ["f32", "f16", "q8_0", "tq4"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=ATTENTION)


# ---- what is computed -----------------------------------------------------------------------------------------------


@cache  # one for all instruction sets
def of_shape(H, G, D, Dv, R, codec):
    """A batch, and what its attention is."""
    batch = Batch([(0, 5), (70, 3), (130, 1), (0, 1)], H=H, G=G, D=D, Dv=Dv, R=R, codec=codec, inert=3)
    return batch, batch.wanted()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("H", "G", "D", "Dv", "R"),
    [
        (9, 3, 64, 64, 64),
        (4, 1, 256, 256, 128),
        (3, 3, 80, 80, 16),
        (8, 2, 96, 96, 64),
        (14, 2, 64, 64, 192),
        (2, 1, 112, 48, 64),
        (5, 5, 16, 16, 7),
        (71, 1, 32, 32, 64),
        (6, 2, 20, 9, 48),
        (2, 2, 1, 3, 1),
    ],
)
def test_against_float64(H, G, D, Dv, R, codec, isa):
    batch, wanted = of_shape(H, G, D, Dv, R, codec)
    ops.reset_report()
    found = paged_attention(*batch.args())
    assert ops.report() == {"paged_attention": {f"cpu/{isa}": 1}}
    assert found.shape == (13, H, Dv)
    assert found.is_contiguous()
    assert_close(found, wanted)


OPTIONS = list(itertools.product([0, 1, 4, 65, 300], [0.0, 0.5, 30.0], [False, True]))  # window, softcap, sinks


@cache
def with_options(codec, window, softcap, sinks):
    batch = Batch(
        [(0, 70), (520, 3), (255, 2)],
        D=32,
        codec=codec,
        window=window,
        softcap=softcap,
        sinks=torch.randn(4) * 3 if sinks else None,
        spans=[(0, 10, 30), (0, 63, 66), (1, 521, 523)],
        inert=2,
    )
    return batch, batch.wanted()


@pytest.mark.parametrize(
    ("codec", "window", "softcap", "sinks"),
    [
        *((codec, *options) for codec in ("f32", "f16") for options in OPTIONS),
        *((codec, *options) for codec in ("q8_0", "tq4") for options in OPTIONS[::7]),
    ],
)
def test_options_against_float64(codec, window, softcap, sinks, isa):
    batch, wanted = with_options(codec, window, softcap, sinks)
    assert_close(paged_attention(*batch.args()), wanted)


def test_the_reference_against_float64():
    for options in ({}, {"window": 5, "softcap": 2.0, "sinks": torch.randn(4)}, {"spans": [(0, 2, 9)], "codec": "f16"}):
        batch = Batch([(0, 20), (66, 3)], D=24, R=16, inert=1, **options)
        assert_close(paged_attention.reference(*batch.args()), batch.wanted())


def test_keys_and_values_of_different_codecs(isa):
    for codec, v_codec in itertools.permutations(CODECS, 2):
        batch = Batch([(60, 8)], D=48, Dv=80, codec=codec, v_codec=v_codec)
        assert_close(paged_attention(*batch.args()), batch.wanted())


def test_a_window_counts_the_key_itself(isa):
    """W = 4: the row at position 4 sees keys 1 to 4. Unit vectors as values: the output is the probabilities."""
    batch = Batch([(0, 9)], H=1, G=1, D=16, window=4)
    batch.v_cache[:] = 0
    page = batch.block_table[0, 0]
    batch.v_cache[page, 0, :9, :9] = torch.eye(9)
    for rows in (slice(None), slice(4, 5)):  # a prompt at once, and one token
        found = paged_attention(*batch.args(rows))
        row = found[4 if rows == slice(None) else 0, 0]
        assert (row > 0).tolist() == [False] + [True] * 4 + [False] * 11
        assert row.sum().item() == pytest.approx(1, abs=1e-6)


def heads_first(batch: Batch):
    """[1, heads, n, D] of a batch of one sequence, as transformers' functions take them."""
    k, v = (x[0].float().transpose(0, 1)[None] for x in (batch.keys, batch.values))
    return batch.q.transpose(0, 1)[None], k, v


def mask(batch: Batch) -> torch.Tensor:
    key = torch.arange(len(batch.keys[0]))[None]
    seen = key < batch.row_end[:, None]
    if batch.window:
        seen &= key > batch.row_pos[:, None] - batch.window
    return torch.where(seen, 0.0, float("-inf"))[None, None]


def test_against_transformers_llama(isa):
    batch = Batch([(37, 40)], H=9, G=3)
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    wanted, _ = llama_attention(module, *heads_first(batch), mask(batch), batch.D**-0.5)
    assert_close(paged_attention(*batch.args()), wanted[0])


def test_against_transformers_gemma2(isa):
    batch = Batch([(37, 40)], H=8, G=4, window=16, softcap=3.0)
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    wanted, _ = gemma2_attention(module, *heads_first(batch), mask(batch), scaling=batch.D**-0.5, softcap=3.0)
    assert_close(paged_attention(*batch.args()), wanted[0])


def test_against_transformers_gpt_oss(isa):
    batch = Batch([(37, 40)], H=8, G=2, window=16, sinks=torch.randn(8))
    module = SimpleNamespace(num_key_value_groups=4, training=False, sinks=batch.sinks)
    wanted, _ = gpt_oss_attention(module, *heads_first(batch), mask(batch), scaling=batch.D**-0.5)
    assert_close(paged_attention(*batch.args()), wanted[0])


def test_large_scores_do_not_overflow(isa):
    batch = Batch([(290, 3)], D=16)
    batch.q *= 1000
    found = paged_attention(*batch.args())
    # The largest score of each head takes all: some are 1000 above the rest.
    for t in range(3):
        for h in range(4):
            best = (batch.keys[0][: int(batch.row_end[t]), h // 2] @ batch.q[t, h].double()).argmax()
            torch.testing.assert_close(found[t, h].double(), batch.values[0][best, h // 2], rtol=0, atol=0.1)


def test_a_sink_far_above_or_below_the_scores(isa):
    batch = Batch([(10, 2)], sinks=torch.tensor([200.0, -200.0, 0.0, 88.0]))
    found = paged_attention(*batch.args())
    batch.sinks = None
    plain = paged_attention(*batch.args())
    assert (found[:, 0] == 0).all()
    assert torch.equal(found[:, 1], plain[:, 1])
    assert torch.isfinite(found).all()


def test_rows_that_see_nothing_yield_zeros(isa):
    for sinks in (None, torch.randn(4)):
        batch = Batch([(5, 3)], sinks=sinks, inert=2)
        batch.row_end[batch.row_pos == 6] = 0
        found = paged_attention(*batch.args())
        empty = (batch.row_seq < 0) | (batch.row_end == 0)
        assert empty.sum() == 3
        assert (found[empty] == 0).all()
        assert_close(found, batch.wanted())


# ---- what must not matter -------------------------------------------------------------------------------------------

FORMS = [
    {"H": 9, "G": 3, "D": 64, "codec": "f16"},
    {"H": 4, "G": 1, "D": 256, "R": 128, "codec": "f16"},
    {"H": 3, "G": 3, "D": 80, "R": 24, "window": 100},
    {"H": 8, "G": 1, "D": 20, "softcap": 5.0, "codec": "f16"},
    {"H": 9, "G": 3, "D": 64, "codec": "q8_0"},
    {"H": 8, "G": 1, "D": 72, "R": 24, "window": 100, "codec": "q8_0", "v_codec": "tq4"},
    {"H": 3, "G": 3, "D": 128, "softcap": 5.0, "codec": "tq4"},
    {"H": 10, "G": 2, "D": 80, "R": 5, "codec": "tq4", "v_codec": "f16"},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_in_any_batch(form):
    """All at once, one by one, in chunks, reversed, and with everything else of the batch left out: bit for bit."""
    sinks = torch.randn(form["H"])
    batch = Batch([(0, 90), (300, 40), (570, 2)], sinks=sinks, spans=[(0, 60, 70)], inert=3, **form)
    whole = paged_attention(*batch.args())
    T = len(batch.q)
    for step in (1, 3, 64):
        parts = [paged_attention(*batch.args(slice(t, t + step))) for t in range(0, T, step)]
        assert torch.equal(torch.cat(parts), whole)
    for order in (torch.arange(T).flip(0), torch.randperm(T)):
        assert torch.equal(paged_attention(*batch.args(order)), whole[order])


@pytest.mark.parametrize("form", FORMS)
def test_instruction_sets_and_threads_agree(form, everywhere):
    """Including a context of several splits with few rows, whose splits go to different threads."""
    for sequences in ([(0, 60), (300, 7)], [(900, 2)]):
        batch = Batch(sequences, inert=1, **form)
        first, *others = everywhere(lambda batch=batch: paged_attention(*batch.args()))
        assert_close(first, batch.wanted())
        assert all(torch.equal(other, first) for other in others)


def test_pages_of_any_size_give_the_same_bits(isa):
    batch = Batch([(130, 9), (0, 3)], R=64)
    wanted = paged_attention(*batch.args())
    for R in (1, 5, 16, 100, 128):
        other = Batch([(130, 9), (0, 3)], R=R)
        other.q = batch.q
        for s in range(2):
            at = torch.arange(len(batch.keys[s]))
            page = other.block_table[s, at // R].long()
            other.k_cache[page, :, at % R] = batch.keys[s].float()
            other.v_cache[page, :, at % R] = batch.values[s].float()
        assert torch.equal(paged_attention(*other.args()), wanted)


def test_an_f16_cache_is_an_f32_cache_of_the_same_numbers(isa):
    for rows in (2, 40):
        batch = Batch([(100, rows)], codec="f16")
        found = paged_attention(*batch.args())
        batch.k_cache, batch.v_cache = batch.k_cache.float(), batch.v_cache.float()
        batch.codecs = (KV_CODECS["f32"],) * 2
        assert torch.equal(paged_attention(*batch.args()), found)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"window": 7}])
def test_what_a_row_does_not_see_cannot_reach_it(poison, options, isa):
    """Keys and values of later tokens, or of those behind the window, that a neighbour in the same tile does see."""
    for R in (64, 10):
        batch = Batch([(60, 20)], H=2, G=2, D=32, R=R, **options)
        clean = paged_attention(*batch.args())
        for key in (70, 61):
            twin = Batch([(60, 20)], H=2, G=2, D=32, R=R, **options)
            twin.q, twin.k_cache, twin.v_cache = batch.q, batch.k_cache.clone(), batch.v_cache.clone()
            twin.block_table = batch.block_table
            page = twin.block_table[0, key // R]
            twin.k_cache[page, :, key % R] = poison
            twin.v_cache[page, :, key % R] = poison
            found = paged_attention(*twin.args())
            sees = batch.row_end > key
            if batch.window:
                sees &= batch.row_pos - batch.window < key
            assert torch.equal(found[~sees], clean[~sees])
            assert found[sees].isnan().all()


def test_pages_without_visible_keys_are_not_looked_up(isa):
    """Pages that lie before every window, between two rows' keys, or after the end may have any entry."""
    for R in (16, 64):
        batch = Batch([(500, 2)], R=R, window=20, D=16)
        wanted = paged_attention(*batch.args())
        needed = {j // R for j in range(481, 502)}
        for b in range(batch.block_table.shape[1]):
            if b not in needed:
                batch.block_table[0, b] = -7
        assert torch.equal(paged_attention(*batch.args()), wanted)
    # Two rows of one sequence whose windows leave a gap within a block.
    batch = Batch([(0, 60)], R=16, window=4, D=16)
    pair = torch.tensor([5, 59])
    wanted = paged_attention(*batch.args(pair))
    batch.block_table[0, 1:3] = -1
    assert torch.equal(paged_attention(*batch.args(pair)), wanted)


def test_views_of_q(isa):
    """Slices of a fused projection inside NaN, transposed heads, more leading dims, some that do not flatten."""
    batch = Batch([(3, 6)], H=4, G=2, D=32)
    wanted = paged_attention(*batch.args())
    rest = batch.args()[1:]
    fused = torch.full((6, 7 + 4 * 32 + 64), float("nan"))
    fused[:, 7 : 7 + 128] = batch.q.flatten(1)
    assert torch.equal(paged_attention(fused[:, 7 : 7 + 128].unflatten(-1, (4, 32)), *rest), wanted)
    turned = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(paged_attention(turned, *rest), wanted)
    assert torch.equal(paged_attention(batch.q.unflatten(0, (2, 3)), *rest), wanted.unflatten(0, (2, 3)))
    odd = batch.q.unflatten(0, (2, 3)).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(paged_attention(odd, *rest), wanted.unflatten(0, (2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_of_q(dtype):
    batch = Batch([(3, 6)])
    batch.q = batch.q.to(dtype)
    found = paged_attention(*batch.args())
    assert found.dtype == dtype
    batch.q = batch.q.float()
    assert torch.equal(found, paged_attention(*batch.args()).to(dtype))


def test_no_rows():
    batch = Batch([(3, 6)])
    assert paged_attention(*batch.args(slice(0, 0))).shape == (0, 4, 64)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_errors_of_shapes_and_dtypes():
    batch = Batch([(3, 6)])
    names = [argument.name for argument in paged_attention._schema.arguments]
    good = dict(zip(names, batch.args(), strict=True))
    for change, message in [
        ({"q": good["q"].int()}, "q must be a floating tensor"),
        ({"q": good["q"][0, 0]}, "q must be a floating tensor"),
        ({"q": good["q"][..., :32]}, "k_cache has rows of 256 bytes, wanted 128: a head of 32 in f32"),
        ({"v_dim": 65}, "v_cache has rows of 256 bytes, wanted 260: a head of 65 in f32"),
        ({"v_dim": 0}, "v_dim is 0, wanted 1 or more"),
        ({"k_codec": 2}, r"k_cache must be Byte \[P, G, R, row\] for q8_0, found Float"),
        ({"v_codec": -1}, "codec -1 of v_cache is unknown, wanted 0 to 3"),
        ({"q": good["q"][:, :3]}, "q has 3 heads, wanted a multiple of the cache's 2"),
        ({"k_cache": good["k_cache"].double()}, r"k_cache must be Float \[P, G, R, row\] for f32, found Double"),
        ({"v_cache": good["v_cache"].transpose(0, 1)}, "v_cache must have contiguous pages"),
        ({"v_cache": good["v_cache"][:2]}, r"k_cache is \[4, 2, 64, ...\], v_cache is \[2, 2, 64, ...\]"),
        ({"block_table": good["block_table"].long()}, "block_table must be contiguous int32"),
        ({"block_table": good["block_table"][0]}, "block_table must be contiguous int32"),
        ({"row_seq": good["row_seq"][:-1]}, r"row_seq must be contiguous int32 \[6\] as q has 6 rows"),
        ({"row_pos": good["row_pos"].long()}, "row_pos must be contiguous int32"),
        ({"row_end": good["row_end"].repeat_interleave(2)[::2]}, "row_end must be contiguous int32"),
        ({"window": -1}, "window and softcap must be 0"),
        ({"softcap": -1.0}, "window and softcap must be 0"),
        ({"sinks": torch.zeros(3)}, r"sinks must be contiguous f32 \[4\]"),
        ({"sinks": torch.zeros(4).double()}, "sinks must be contiguous f32"),
    ]:
        with pytest.raises(RuntimeError, match="dasllama::paged_attention: .*" + message):
            paged_attention(**(good | change))


def test_what_would_be_read_past_the_end_is_refused_by_row():
    batch = Batch([(3, 6), (70, 2)])
    B = batch.block_table.shape[1]
    for name, row, value, message in [
        ("row_seq", 2, 2, r"row_seq\[2\] is 2, wanted -1 to 1"),
        ("row_seq", 7, -2, r"row_seq\[7\] is -2, wanted -1 to 1"),
        ("row_end", 1, B * 64 + 1, rf"row_end\[1\] is {B * 64 + 1}, wanted 0 to {B * 64} \({B} pages of 64 rows\)"),
        ("row_end", 1, -1, r"row_end\[1\] is -1, wanted 0"),
        ("row_end", 3, 65, r"row 3 sees keys 0 to 64 of sequence 0, but block_table\[0, 1\] is -1, wanted 0 to 5"),
    ]:
        before = getattr(batch, name)[row].item()
        getattr(batch, name)[row] = value
        with pytest.raises(RuntimeError, match=message):
            paged_attention(*batch.args())
        getattr(batch, name)[row] = before
    batch.block_table[1, 1] = 6
    with pytest.raises(RuntimeError, match=r"row 6 sees keys 0 to 70 of sequence 1, but block_table\[1, 1\] is 6"):
        paged_attention(*batch.args())


def test_an_input_that_requires_grad_is_refused():
    batch = Batch([(3, 2)])
    q = batch.q.clone().requires_grad_()
    with pytest.raises(KernelError, match=r"dasllama::paged_attention: q requires grad.*dasllama::attention"):
        paged_attention(q, *batch.args()[1:])
    wanted = paged_attention(*batch.args())
    with torch.no_grad():
        assert torch.equal(paged_attention(q, *batch.args()[1:]), wanted)
    with torch.inference_mode():
        assert torch.equal(paged_attention(*batch.args()), wanted)


def test_opcheck():
    for options in ({}, {"window": 3, "softcap": 2.0, "sinks": torch.randn(4), "codec": "f16"}):
        torch.library.opcheck(paged_attention, Batch([(3, 4), (66, 1)], D=16, Dv=24, inert=1, **options).args())
