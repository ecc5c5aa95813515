"""Rows of embeddings in the place of tokens: alone and beside text, spans whose rows see each other, positions on three
axes. The oracles are the same tokens' evaluation, and transformers on the golden models' weights."""

import json

import pytest
import torch
from families import TINY
from test_graphs import counted
from test_hf_live import M_ROPE, assert_close, hf_weights
from test_invariants import text
from test_module_paths import hf_model
from tolerances import FP32_LOGITS
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model as gemma3_masks
from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model as gemma4_masks

import dasllama_torch as dl
from dasllama_torch.engine.scheduler import Chunk, plan_windows
from dasllama_torch.step import Step

N_CTX = 2048


@pytest.fixture
def load(oracle):
    return lambda name, mode="native": dl.load_model(oracle / "tiny" / f"{name}.gguf", mode=mode)


def create(model, **how):
    return dl.create_session(model, n_ctx=N_CTX, **how)


def rows_of(model, ids):
    """The embeddings f32 [n, C] of ids, as an ordinary tensor."""
    with torch.no_grad():
        return model.get_input_embeddings()(torch.tensor(ids))


def picture(model, n, seed=0):
    """Rows that are no token's, of the size that tokens have."""
    return rows_of(model, text(seed, n)).roll(1, dims=1)


def grid(height, width, frames=1):
    """Positions int64 [n, 3] of a picture's rows: those of Qwen2-VL, arXiv:2409.12191, section 2.1."""
    axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2)


def twin(model, name, oracle):
    """The transformers model with the weights of the golden file."""
    hf = hf_model(json.loads((oracle / "tiny" / f"{name}.json").read_text()), device="cpu").eval().float()
    hf.load_state_dict(hf_weights(model, name.startswith(("gemma2", "gemma3", "qwen35", "qwen3next"))), strict=False)
    return hf


@pytest.mark.parametrize("name", [name for name in TINY if name != "gemma4_e"])
def test_rows_of_tokens_are_tokens(name, load):
    """Of three sessions, in batches that mix ids, rows and single tokens; then recorded steps."""
    model = load(name)
    texts = [text(seed, 40) for seed in (1, 2, 3)]
    rows = [rows_of(model, ids) for ids in texts]
    sessions = [create(model) for _ in texts]
    found = [[], [], []]

    def both(*inputs):
        for kept, logits in zip(found, dl.eval_batch(sessions, inputs, "all"), strict=True):
            kept.append(logits)

    both(texts[0][:9], dl.Embeddings(rows[1][:9]), texts[2][:1])
    both(dl.Embeddings(rows[0][9:30]), texts[1][9:10], dl.Embeddings(rows[2][1:2]))
    both(texts[0][30:36], dl.Embeddings(rows[1][10:36]), texts[2][2:36])
    _, steps = counted(lambda: [both(*([ids[i]] for ids in texts)) for i in range(36, 40)])
    assert steps["recorded"] == 3
    for ids, parts, session in zip(texts, found, sessions, strict=True):
        assert torch.equal(torch.cat(parts), create(model).eval(ids, "all"))
        assert session.rope_delta == 0
    assert sessions[0].tokens == [*texts[0][:9], *[-1] * 21, *texts[0][30:]]
    assert [(span.start, span.stop) for span in sessions[1].spans] == [(0, 9), (10, 36)]


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
def test_all_kinds_in_one_forward(name, load):
    """A span whose rows see each other, one with positions where there are axes, a prompt and a single token: each
    session's results are those that it has alone."""
    model = load(name)
    positions = grid(5, 4) if name == "qwen3vl" else None
    inputs = [
        dl.Embeddings(picture(model, 20, 1), causal=False),
        [5],
        dl.Embeddings(picture(model, 20, 2), positions=positions),
        text(3, 30),
        dl.Embeddings(picture(model, 1, 4), causal=False),
    ]

    def begin(i):
        session = create(model)
        session.eval(text(10 + i, 4 + i))
        if i == 1:  # a single token behind a picture
            session.eval(inputs[2])
        return session

    together, alone = [begin(i) for i in range(5)], [begin(i) for i in range(5)]
    found, steps = counted(lambda: dl.eval_batch(together, inputs, "all"))
    assert steps == {"eager": 1}
    for given, rows, session in zip(inputs, found, alone, strict=True):
        assert torch.equal(rows, session.eval(given, "all"))
    following = dl.eval_batch(together, [[7]] * 5)
    for row, session, other in zip(following, alone, together, strict=True):
        assert torch.equal(row, session.eval([7]))
        assert (session.spans, session.rope_delta) == (other.spans, other.rope_delta)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, 5])
def test_rows_of_a_model_with_an_embedding_table_in_each_layer(padding, load, oracle):
    model = load("gemma4_e", "fp32")
    model.tokenizer.pad_id = padding
    hf = twin(model, "gemma4_e", oracle)
    ids, rows = text(1, 30), picture(model, 12)
    stand_in = torch.tensor([[*ids[:10], *[padding or 0] * 12, *ids[10:]]])
    x = torch.cat([rows_of(model, ids[:10]), rows, rows_of(model, ids[10:])])[None]
    wanted = hf(inputs_embeds=x, per_layer_inputs=hf.model.get_per_layer_inputs(stand_in)).logits[0]
    session = create(model, kv_dtype="f32")
    parts = [session.eval(ids[:10], "all"), session.eval_embd(rows, "all"), session.eval(ids[10:], "all")]
    assert_close(torch.cat(parts), wanted, FP32_LOGITS * TINY["gemma4_e"])


def with_spans(session, ids, spans):
    """Logits of 7 ids, a span, 5 ids, the next span, and the remaining ids, in chunks and single tokens."""
    parts = [session.eval(ids[:7], "all"), session.eval_embd_span(spans[0], "all"), session.eval(ids[7:12], "all")]
    parts += [session.eval_embd_span(spans[1], "all"), session.eval(ids[12:30], "all")]
    return torch.cat([*parts, *(session.eval([token], "all") for token in ids[30:])])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama", "qwen3"])
def test_non_causal_spans(name, load, oracle):
    """Rows of a picture see each other, on gemma4's global layers only those before; of another picture only what
    precedes; windows of 12 hide what they always hide, from a span of 9 and from one of 31."""
    model = load(name, "fp32")
    hf = twin(model, name, oracle)
    ids, spans = text(1, 40), [picture(model, 9, 1), picture(model, 31, 2)]
    places = (slice(7, 16), slice(21, 52))
    parts = [rows_of(model, ids[:7]), spans[0], rows_of(model, ids[7:12]), spans[1], rows_of(model, ids[12:])]
    x = torch.cat(parts)[None]
    blocks = torch.full((1, 80), -1)
    for i, place in enumerate(places):
        blocks[0, place] = i
    if name.startswith("gemma"):
        masks = {"gemma3": gemma3_masks, "gemma4": gemma4_masks}[name]
        mask = masks(hf.config, x, None, None, torch.arange(80)[None], block_sequence_ids=blocks)
    else:
        seen = torch.ones(80, 80, dtype=torch.bool).tril() | ((blocks == blocks.T) & (blocks >= 0))
        mask = torch.zeros(1, 1, 80, 80).masked_fill(~seen, -torch.inf)
    wanted = hf(inputs_embeds=x, attention_mask=mask).logits[0]
    pool = dl.create_kv_pool(model, page_rows=16, kv_dtype="f32")
    found = with_spans(create(model, pool=pool), ids, spans)
    assert_close(found, wanted, FP32_LOGITS * TINY[name])
    causal = hf(inputs_embeds=x).logits[0]
    assert (causal - wanted).abs().max() > 0.1 * wanted.std()


@torch.no_grad()
@pytest.mark.parametrize("name", M_ROPE)
def test_positions_on_three_axes(name, load, oracle):
    """A picture of 3 x 5 rows, which text follows, and two frames of 4 x 2."""
    model = load(name, "fp32")
    hf = twin(model, name, oracle)
    ids = text(1, 50)
    pictures = [(picture(model, 15, 1), grid(3, 5)), (picture(model, 16, 2), grid(4, 2, frames=2))]
    session = create(model, kv_dtype="f32")
    parts = [session.eval(ids[:6], "all")]
    for (rows, positions), first in zip(pictures, (6, 12), strict=True):
        parts += [
            session.eval_embd_span_mrope(rows, positions, logits="all"),
            session.eval(ids[first : first + 6], "all"),
        ]
    _, steps = counted(lambda: parts.extend(session.eval([token], "all") for token in ids[18:30]))
    assert steps["recorded"] == 11
    assert session.rope_delta == (5 - 15) + (4 - 16)
    parts.append(session.eval(ids[30:], "all"))
    x, positions = [rows_of(model, ids[:6])], [torch.arange(6).expand(3, 6)]
    for (rows, axes), cut in zip(pictures, (slice(6, 12), slice(12, 50)), strict=True):
        x += [rows, rows_of(model, ids[cut])]
        positions.append(positions[-1].max() + 1 + axes.T)
        positions.append(positions[-1].max() + 1 + torch.arange(len(ids[cut])).expand(3, -1))
    x, positions = torch.cat(x)[None], torch.cat(positions, 1)[:, None]
    wanted = hf(inputs_embeds=x, position_ids=positions).logits[0]
    assert_close(torch.cat(parts), wanted, FP32_LOGITS * TINY[name])
    assert (hf(inputs_embeds=x).logits[0] - wanted).abs().max() > 0.1 * wanted.std()


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3vl"])
def test_positions_are_those_of_transformers(name, load, oracle):
    """Their own count for a prompt with a picture of 3 x 5 merged patches, and `rope_deltas`."""
    model = load(name)
    hf = hf_model(json.loads((oracle / "tiny" / f"{name}.json").read_text()))
    merge = hf.config.vision_config.spatial_merge_size
    kinds = torch.tensor([[0] * 6 + [1] * 15 + [0] * 4])
    wanted, deltas = hf.model.get_rope_index(
        torch.ones_like(kinds), kinds, image_grid_thw=torch.tensor([[1, 3 * merge, 5 * merge]])
    )
    assert torch.equal(wanted[:, 0, 6:21].T, 6 + grid(3, 5))
    session = create(model)
    session.eval(text(1, 6))
    session.eval_embd_span_mrope(picture(model, 15), grid(3, 5))
    assert session.n_past + session.rope_delta == wanted[0, 0, 21]
    session.eval(text(2, 4))
    assert session.rope_delta == deltas.item()


def independent(model, x, positions=None, ends=None):
    """Logits f32 [n, V] of embeddings x [n, C] in one forward without a cache."""
    n = len(x)
    at = torch.arange(n, dtype=torch.int32)
    step = Step(
        positions=at.long() if positions is None else positions,
        row_seq=torch.zeros_like(at),
        row_pos=at,
        row_end=at + 1 if ends is None else ends,
        n_seqs=1,
        row_context=torch.full((n,), N_CTX),
    )
    with torch.no_grad():
        return model(inputs_embeds=x[None], step=step).logits[0]


@pytest.mark.parametrize("pending", [False, True])
def test_a_span_larger_than_a_window_of_rows(load, pending):
    """A non-causal one goes through in one forward that has room for it, beside others and behind a pending token."""
    model = load("llama")
    ids, rows = text(1, 20), picture(model, 600)
    session, other = create(model, kv_dtype="f32"), create(model, kv_dtype="f32")
    session.eval(ids[:9])
    if pending:
        session.pending = ids[9:10]
    else:
        session.eval(ids[9:10])
    given = dl.Embeddings(rows, causal=False)
    (found, beside), steps = counted(lambda: dl.eval_batch([session, other], [given, text(2, 700)], "all"))
    assert steps["eager"] == 3 + pending  # of 10 or none, 600, 512 and 188 rows
    ends = torch.arange(610, dtype=torch.int32) + 1
    ends[10:] = 610
    assert torch.equal(found, independent(model, torch.cat([rows_of(model, ids[:10]), rows]), ends=ends)[10:])
    assert torch.equal(beside, create(model, kv_dtype="f32").eval(text(2, 700), "all"))


def test_a_causal_span_in_several_windows_of_rows(load):
    """With positions of its own, which go on over the cut; an error half way leaves what was done."""
    model = load("qwen3vl")
    ids, rows = text(1, 4), picture(model, 35 * 34)
    positions = torch.arange(4).expand(3, 4).T
    positions = torch.cat([positions, 4 + grid(35, 34), 4 + 35 + torch.arange(3)[:, None].expand(3, 3)])
    x = torch.cat([rows_of(model, ids), rows, rows_of(model, [7, 8, 9])])
    wanted = independent(model, x, positions)
    session = create(model, kv_dtype="f32")
    session.eval(ids)
    given = dl.Embeddings(rows, positions=grid(35, 34))
    found = session.eval(given, "all")
    assert torch.equal(torch.cat([found, session.eval([7, 8, 9], "all")]), wanted[4:])
    session.truncate(4)
    seen = []
    hook = model.get_decoder().layers[1].register_forward_hook(lambda *_: seen.append(0) if not seen else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.eval(given)
    hook.remove()
    (span,) = session.spans
    assert (span.start, span.stop, session.n_past, session.rope_delta) == (4, 516, 516, 34 - 512)
    assert span == given.span(4).until(516)
    fresh = create(model, kv_dtype="f32")
    fresh.eval(ids)
    fresh.eval(dl.Embeddings(rows[:512], positions=grid(35, 34)[:512]))
    assert torch.equal(session.eval([7]), fresh.eval([7]))


def test_truncate_and_fork(load):
    """Back into a causal span, whose positions are then those of the rows that remain, and to the ends of one that is
    not."""
    model = load("qwen3vl")
    ids, rows = text(1, 12), picture(model, 20)

    def start(n, **how):
        session = create(model, **how)
        session.eval(ids[:5])
        session.eval(dl.Embeddings(rows[:n], positions=grid(5, 4)[:n]))
        return session

    session = start(20)
    fork = dl.fork(session)
    session.eval(ids[5:8])
    session.eval_embd_span(picture(model, 6))
    for n in (29, 33):
        with pytest.raises(dl.CannotRewind, match="position .* lies in a span .* wanted 28 or 34"):
            session.truncate(n)
    session.truncate(34)
    assert len(session.spans) == 2
    session.truncate(28)
    assert (len(session.spans), session.rope_delta) == (1, 5 - 20)
    for n in (13, 5, 0):
        for each in (session, fork):
            each.truncate(n)
        assert session.spans == fork.spans == ([start(20).spans[0].until(n)] if n > 5 else [])
        fresh = start(8) if n == 13 else create(model)
        if n == 5:
            fresh.eval(ids[:5])
        assert session.rope_delta == fork.rope_delta == fresh.rope_delta
        for token in ids[8:]:
            wanted = fresh.eval([token])
            assert torch.equal(session.eval([token]), wanted)
            assert torch.equal(fork.eval([token]), wanted)


def test_generate(load):
    model = load("gemma3")
    ids, params = text(1, 20), dl.SamplingParams(temp=1.0, repetition_penalty=1.4, penalty_last_n=-1)
    given = rows_of(model, ids)
    wanted = [token for token, _ in create(model).generate(ids, max_tokens=15)]
    assert [token for token, _ in create(model).generate_embd(given, max_tokens=15)] == wanted
    session = create(model)
    assert [token for token, _ in dl.generate_embd(session, given, max_tokens=15)] == wanted
    assert session.stats.n_prompt == 20
    # What was said is penalized, rows of embeddings are not
    session = create(model)
    stream = session.generate_embd(given, params, causal=False)
    said = [next(stream)[0] for _ in range(12)]
    assert session.tokens == [-1] * 20 + said[:-1]
    assert len(set(said)) > 1


def test_a_digest_tells_what_the_keys_depend_on(load):
    rows = torch.arange(24.0).view(6, 4)
    given = dl.Embeddings(rows, positions=grid(2, 3))
    digest = dl.Embeddings(rows.clone().half(), positions=grid(2, 3).int()).digest
    rows[0, 0] = 5
    assert given.digest == digest
    others = [
        dl.Embeddings(rows, positions=grid(2, 3)),
        dl.Embeddings(given.rows, positions=grid(3, 2)),
        dl.Embeddings(given.rows, causal=False, positions=grid(2, 3)),
        dl.Embeddings(given.rows),
        dl.Embeddings(given.rows.view(4, 6)),
    ]
    assert len({digest, *(other.digest for other in others)}) == 6


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("llama", lambda rows: dl.Embeddings(rows[0]), ValueError, r"rows of embeddings f32 \[n, C\]"),
        ("llama", lambda rows: dl.Embeddings(rows[:0]), ValueError, "at least one"),
        ("llama", lambda rows: dl.Embeddings(rows.long()), ValueError, "torch.int64"),
        ("llama", lambda rows: dl.Embeddings(rows[:, 1:]), ValueError, "63 wide, wanted the model's 64"),
        ("llama", lambda rows: dl.Embeddings(rows, positions=grid(2, 3)), dl.UnsupportedModel, "one position"),
        ("qwen3vl", lambda rows: dl.Embeddings(rows, positions=grid(2, 2)), ValueError, r"int64 \[6, axes\]"),
        ("qwen3vl", lambda rows: dl.Embeddings(rows, positions=grid(2, 3)[:, :2]), ValueError, "wanted 3"),
        ("qwen3vl", lambda rows: dl.Embeddings(rows, positions=grid(2, 3).float()), ValueError, "found torch.float32"),
        ("qwen3vl", lambda rows: dl.Embeddings(rows, positions=grid(2, 3) - 1), ValueError, "from 0 to 16777215"),
        ("qwen3vl", lambda rows: dl.Embeddings(rows, positions=grid(2, 3) << 24), ValueError, "from 0 to 16777215"),
        ("qwen35", lambda rows: dl.Embeddings(rows, causal=False), dl.UnsupportedModel, "recurrent .*eval_embd"),
        ("gemma4_e", lambda rows: dl.Embeddings(rows, causal=False), dl.UnsupportedModel, "gemma4: .*E2B and E4B"),
    ],
)
def test_refusals(name, given, error, message, load):
    model = load(name)
    session = create(model)
    logits = session.eval([1, 2, 3])
    with pytest.raises(error, match=message):
        session.eval(given(picture(model, 6)))
    assert (session.tokens, session.spans) == ([1, 2, 3], [])
    assert torch.equal(session.eval([4]), create(model).eval([1, 2, 3, 4]))
    assert logits is not None


def test_the_context_counts_rows(load):
    model = load("qwen3vl")
    session = dl.create_session(model, n_ctx=20)
    with pytest.raises(dl.ContextFull):
        session.eval_embd_span_mrope(picture(model, 21), grid(3, 7))
    session.eval_embd_span_mrope(picture(model, 19), grid(1, 19))
    session.eval([1])
    with pytest.raises(dl.ContextFull):
        session.eval([1])
    with pytest.raises(ValueError, match="token id -1"):
        session.eval([-1])


def test_plans_keep_a_span_whole():
    def plan(lengths, whole, rows=10):
        return [[(c.index, c.start, c.stop) for c in window] for window in plan_windows(lengths, rows, whole)]

    assert plan([8], {0: (2, 8)}) == [[(0, 0, 8)]]
    assert plan([12], {0: (4, 12)}) == [[(0, 0, 4)], [(0, 4, 12)]]
    assert plan([25], {0: (0, 25)}) == [[(0, 0, 25)]]
    assert plan([3, 25, 4], {1: (1, 25)}) == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 25)], [(2, 0, 4)]]
    assert plan([3, 7, 4], {1: (0, 7)}) == [[(0, 0, 3), (1, 0, 7)], [(2, 0, 4)]]
    assert plan([3, 8, 4], {1: (0, 8)}) == [[(0, 0, 3)], [(1, 0, 8), (2, 0, 2)], [(2, 2, 4)]]
    assert plan_windows([2], 10) == [[Chunk(0, 0, 2, True)]]
