"""Sessions: positions, pages, generation, errors that leave a session as it was."""

import copy
import gc
import pickle

import hf_twin
import pytest
import torch

import dasllama_torch as dl
from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.engine.scheduler import plan_windows
from dasllama_torch.engine.session import Session


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dl.load_model(hf_twin.make("qwen2", tmp_path_factory.mktemp("twin")).path)


def test_eval_advances_and_returns_what_was_asked_for(model):
    session = dl.create_session(model)
    assert session.n_past == 0
    assert session.logits is None
    last = session.eval([1, 2, 3])
    assert last.shape == (301,)
    assert last.dtype == torch.float32
    assert torch.equal(session.logits, last)
    assert session.eval([4, 5], logits="all").shape == (2, 301)
    assert session.eval([6], logits=None) is None
    assert session.logits is None  # of an older position would mislead
    assert session.tokens == [1, 2, 3, 4, 5, 6]


def test_generate_goes_on_where_it_stopped(model):
    whole, parts, manual = (dl.create_session(model) for _ in range(3))
    prompt = [7, 8, 9]
    wanted = [token for token, _ in whole.generate(prompt, max_tokens=12)]
    found = [token for token, _ in parts.generate(prompt, max_tokens=5)]
    found += [token for token, _ in parts.generate(max_tokens=4)]
    stream = parts.generate()
    found += [next(stream)[0] for _ in range(3)]
    stream.close()
    assert parts.stats.stop == "caller"
    assert found == wanted
    manual.eval(prompt)
    for token in wanted:
        assert manual.sample() == token
        manual.eval([token])
    # what was yielded counts as said: the next logits are those after it
    assert torch.equal(parts.eval([]), manual.logits)
    assert parts.tokens == manual.tokens


def test_seeds(model):
    params = dl.SamplingParams(temp=1.5)
    session, other = dl.create_session(model), dl.create_session(model)
    first = [token for token, _ in session.generate([1], params, max_tokens=10)]
    assert [token for token, _ in other.generate([1], params, max_tokens=10)] == first
    other = dl.create_session(model)
    other.set_seed(3)
    third = [token for token, _ in other.generate([1], params, max_tokens=10)]
    assert third != first
    again = dl.create_session(model).generate([1], dl.SamplingParams(temp=1.5, seed=3), max_tokens=10)
    assert [token for token, _ in again] == third


def test_stats(model):
    session = dl.create_session(model)
    list(session.generate([1, 2, 3, 4], max_tokens=6))
    stats = session.stats
    assert (stats.n_prompt, stats.n_generated, stats.stop) == (4, 6, "length")
    assert 0 < stats.prefill_s <= stats.ttft_s
    assert stats.prefill_tps > 0
    assert stats.decode_tps > 0


def test_the_context_ends_with_an_error_and_no_harm(model):
    session = dl.create_session(model, n_ctx=10)
    logits = session.eval(list(range(9)))
    with pytest.raises(dl.ContextFull, match="9 tokens .* 2 new .* n_ctx=10"):
        session.eval([1, 2])
    assert session.n_past == 9
    assert torch.equal(session.logits, logits)
    assert len(list(session.generate([5]))) == 1  # the tenth token leaves room to sample one more, not to evaluate it
    assert session.stats.stop == "context"


def test_pages_are_taken_on_demand_and_given_back(model):
    session = dl.create_session(model, n_ctx=200)
    (group,) = session.pool.groups
    before = group.pages.in_use
    session.eval(list(range(64)))
    assert group.pages.in_use == before + 1
    session.eval([1])
    assert group.pages.in_use == before + 2
    session.close()
    session.close()
    assert group.pages.in_use == before
    with pytest.raises(dl.DasllamaError, match="closed"):
        session.eval([1])
    with dl.create_session(model) as inner:
        inner.eval([1])
    left = dl.create_session(model)
    left.eval([1])
    del left
    gc.collect()
    assert group.pages.in_use == before


def small_pool(model, n_pages):
    """A pool of its own that holds so many pages of all layers."""
    layers = [layer.cache for layer in model.config.layers]
    page_bytes = KVPool(layers, "f16", 1 << 20, "cpu").groups[0].page_bytes
    return KVPool(layers, "f16", n_pages * page_bytes, "cpu")


def test_out_of_pages_loses_nothing(model):
    pool = small_pool(model, 2)
    a, b = Session(model, pool, 200), Session(model, pool, 200)
    wanted = a.eval(list(range(60)))
    with pytest.raises(dl.OutOfPages, match="has .* bytes left, wanted"):
        dl.eval_batch([a, b], [[1] * 10, [2] * 70])
    assert (a.n_past, b.n_past) == (60, 0)
    assert torch.equal(a.logits, wanted)
    assert pool.groups[0].pages.in_use == 1
    a.eval([1] * 10)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, s: s.eval([]), "no ids"),
        (lambda m, s: s.eval([301]), "301 is outside the vocabulary of 301"),
        (lambda m, s: s.eval([-1]), "-1 is outside"),
        (lambda m, s: s.eval([1], logits="first"), "'first'"),
        (lambda m, s: dl.eval_batch([s, s], [[1], [2]]), "once only"),
        (lambda m, s: dl.eval_batch([s], [[1], [2]]), "1 sessions and 2 lists"),
        (lambda m, s: dl.eval_batch([], []), "0 sessions"),
        (lambda m, s: dl.eval_batch([s, dl.create_session(m, "f32")], [[1], [2]]), "one pool"),
        (lambda m, s: dl.create_session(m, n_ctx=0), "n_ctx is 0"),
        (lambda m, s: dl.create_session(m, "q9"), "q9"),
        (lambda m, s: dl.create_session(m, rewind=-1), "rewind is -1"),
        (lambda m, s: s.truncate(1), "n is 1, wanted 0 to 0"),
        (lambda m, s: list(s.generate([1], max_tokens=-1)), "max_tokens"),
        (lambda m, s: m(None), "either input_ids or inputs_embeds"),
        (lambda m, s: m(torch.tensor([1, 2])), "rank 1"),
        (lambda m, s: m(torch.ones(2, 3).long(), attention_mask=torch.ones(2, 4)), r"is \[2, 4\], wanted \[2, 3\]"),
        (lambda m, s: dl.create_session(m, torch.float16), "torch.float16 is unknown"),
        (lambda m, s: dl.run_with_cache(m, ["a", "b"], "hook_embed"), "several texts"),
        (lambda m, s: dl.SamplingParams(constraint="[0-9]+"), "wanted a Constraint"),
    ],
)
def test_wrong_calls_are_refused(model, call, text):
    session = dl.create_session(model)
    with pytest.raises(ValueError, match=text):
        call(model, session)
    assert session.n_past == 0


@pytest.mark.parametrize("ids", ["12", ["1"], [1.5], torch.tensor([1.0, 2.0]), [[1, 2]]], ids=str)
def test_ids_are_whole_numbers(model, ids):
    """int() would take some of these for ids."""
    session = dl.create_session(model)
    for call in (session.eval, session.prefill, lambda ids: list(session.generate(ids, max_tokens=1))):
        with pytest.raises(TypeError, match="wanted token ids"):
            call(ids)
    assert session.n_past == 0
    session.eval(torch.tensor([1, 2]))


def test_copies_and_repr(model):
    session = dl.create_session(model)
    session.eval([1, 2, 3])
    assert repr(session) == "<Session of Qwen2ForCausalLM: 3 of 256 tokens, kv_dtype 'f16'>"
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="wanted fork"):
            call(session)
    session.close()
    assert "closed" in repr(session)


def test_nothing_to_sample_from(model):
    with pytest.raises(dl.DasllamaError, match="no logits"):
        dl.create_session(model).sample()
    with pytest.raises(dl.DasllamaError, match="no logits"):
        next(dl.create_session(model).generate())


def test_a_long_address_space_costs_no_memory(model):
    with open("/proc/self/statm") as f:
        before = int(f.read().split()[1])
    session = dl.create_session(model, n_ctx=100_000)
    session.eval([1, 2, 3])
    with open("/proc/self/statm") as f:
        assert int(f.read().split()[1]) - before < 20_000_000 // 4096


def test_windows():
    windows = plan_windows([5, 1, 7], 4)
    assert [[(c.index, c.start, c.stop, c.last) for c in w] for w in windows] == [
        [(0, 0, 4, False)],
        [(0, 4, 5, True), (1, 0, 1, True), (2, 0, 2, False)],
        [(2, 2, 6, False)],
        [(2, 6, 7, True)],
    ]


def test_page_allocator():
    pages = PageAllocator(5)
    first = pages.take(3)
    assert sorted(first) == [0, 1, 2]
    with pytest.raises(dl.OutOfPages, match="2 of 5 pages left, wanted 3"):
        pages.take(3)
    pages.give_back(first[:1])
    assert pages.in_use == 2
    assert pages.take(1) == first[:1]
    assert len(pages.take(2)) == 2
    assert pages.in_use == 5
