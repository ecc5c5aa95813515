"""What ends a generation, what it tells of each token, and several of them side by side."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from talkers import saying, tiny_llama
from test_invariants import text as some_ids
from test_stops import plain
from vocabularies import bpe

import dasllama_torch as dl
from dasllama_torch.sampling import restrict, token_logprob
from dasllama_torch.text.special import TokenType

INF = float("inf")


@pytest.fixture(scope="module")
def model():
    """Its metadata names <|endoftext|> as the end, and its turns end with <end_of_turn>."""
    specials = {"<|endoftext|>": TokenType.CONTROL, "<end_of_turn>": TokenType.CONTROL, "<think>": TokenType.CONTROL}
    words = bpe("qwen2", specials)
    words["tokenizer.ggml.eos_token_id"] = words["tokenizer.ggml.tokens"].index("<|endoftext|>")
    return tiny_llama(words)


def named(model, name):
    (token,) = model.encode(name, add_special=False, parse_special=True)
    return token


def of_bytes(model, raw):
    """A token for each byte, so that every character of more than one comes in parts."""
    table = {model.tokenizer.piece_bytes(i): i for i in reversed(range(len(model.tokenizer)))}
    return [table[bytes([byte])] for byte in raw]


def said(model, tokens, params=None, max_tokens=None):
    """(tokens, text, stats, session) of a generation of a model that says these tokens."""
    session = dl.create_session(model)
    with saying(model, tokens):
        pairs = list(session.generate([1], params or dl.SamplingParams(), max_tokens))
    return [token for token, _ in pairs if token is not None], "".join(text for _, text in pairs), session


@pytest.mark.parametrize("end", ["<|endoftext|>", "<end_of_turn>"])
def test_every_end_of_generation_ends_it(model, end):
    words = model.encode("The old keeper", add_special=False)
    tokens, text, session = said(model, [*words, named(model, "<think>"), named(model, end), *words], max_tokens=50)
    assert tokens == [*words, named(model, "<think>")]
    assert text == "The old keeper"
    assert (session.stats.stop, session.stats.stopped_by) == ("eog", named(model, end))
    assert session.tokens + session.pending == [1, *tokens]


def test_a_message_of_harmony_ends_no_generation():
    names = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
    model = tiny_llama(bpe("gpt-4o", dict.fromkeys(names, TokenType.CONTROL)))
    ids = {name: named(model, name) for name in names}
    for last in ("<|return|>", "<|call|>"):
        tokens, _, session = said(model, [ids["<|end|>"], ids["<|start|>"], ids[last], 5], max_tokens=9)
        assert tokens == [ids["<|end|>"], ids["<|start|>"]]
        assert session.stats.stopped_by == ids[last]


def test_a_stop_id_ends_it_like_an_end_of_generation(model):
    tokens, text, session = said(model, [5, 6, 7, 8], dl.SamplingParams(stop_ids=[7, 300]), max_tokens=9)
    assert tokens == [5, 6]
    assert (session.stats.stop, session.stats.stopped_by) == ("stop", 7)
    assert session.tokens + session.pending == [1, 5, 6]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "\n", " the", "é", "🦙", "字"]), max_size=8).map("".join),
    st.lists(st.text("ab\né🦙字", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_are_found_across_tokens_and_in_parts_of_characters(model, text, stops, by_bytes):
    ids = of_bytes(model, text.encode()) if by_bytes else model.encode(text, add_special=False)
    tokens, found, session = said(model, [*ids, named(model, "<end_of_turn>")], dl.SamplingParams(stop=stops))
    wanted, stop = plain(text, stops)
    assert found == wanted
    assert (session.stats.stop, session.stats.stopped_by) == (
        ("stop", stop) if stop else ("eog", named(model, "<end_of_turn>"))
    )
    # The session holds what the model has said, the stop string included, and no token further.
    assert session.tokens + session.pending == [1, *tokens]
    assert tokens == ids[: len(tokens)]
    heard = model.decode(tokens)
    assert heard.rstrip("\ufffd").startswith(wanted + (stop or ""))
    if stop:
        assert stop not in model.decode(tokens[:-1])


def test_text_that_may_begin_a_stop_string_is_held_back_until_the_end(model):
    ids = of_bytes(model, b"ab\nUser")
    session = dl.create_session(model)
    with saying(model, ids):
        pairs = list(session.generate([1], dl.SamplingParams(stop="\nUser:"), len(ids)))
    assert [text for _, text in pairs] == ["a", "b", "", "", "", "", "", "\nUser"]
    assert pairs[-1][0] is None
    assert session.stats.stop == "length"


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"x \xf0\x9f\xa6", "x \ufffd"),  # a character that stays incomplete
        (b"x\xffy", "x\ufffdy"),
        (b"\xf0\x9f z", "\ufffd z"),
        (" 🦙 字".encode(), " 🦙 字"),
    ],
)
def test_characters_are_never_torn(model, raw, wanted):
    tokens, text, _ = said(model, [*of_bytes(model, raw), named(model, "<end_of_turn>")])
    assert text == wanted


def test_the_next_turn_goes_on_behind_a_stop_string(model):
    ids = model.encode("The keeper\nUser: hello", add_special=False)
    stop = dl.SamplingParams(stop="\nUser:")
    tokens, text, session = said(model, ids, stop)
    assert text == "The keeper"
    held = [1, *tokens]
    turn = model.encode(" hello", add_special=False)
    session.prefill(held + turn)
    assert session.stats.reused_tokens == len(held) - 1  # the last token was pending
    with dl.create_session(model) as fresh:
        assert torch.equal(fresh.eval(held + turn), session.logits)


def test_a_text_does_not_go_on_behind_another(model):
    with dl.create_session(model) as session:
        first = session.generate([5, 6], max_tokens=4)
        next(first)
        with session.fork() as fork:
            list(fork.generate([7], max_tokens=4))
        next(first)
        second = session.generate([7], max_tokens=4)
        next(second)
        with pytest.raises(dl.DasllamaError, match="has begun another text meanwhile"):
            next(first)
        assert sum(token is not None for token, _ in second) == 3


def test_the_params_are_checked_before_anything_is_evaluated(model, oracle):
    bare = dl.load_model(oracle / "tiny" / "llama.gguf")
    for which, params, error, text in (
        (model, dict(logit_bias={len(model.tokenizer): 1.0}), ValueError, "logit_bias has token id"),
        (model, dict(stop_ids=[len(model.tokenizer)]), ValueError, "stop_ids has token id"),
        (bare, dict(stop="x"), ValueError, "no vocabulary"),
    ):
        session = dl.create_session(which)
        with pytest.raises(error, match=text):
            next(session.generate([1, 2], dl.SamplingParams(**params)))
        assert session.n_past == 0


def test_logit_bias_is_added_before_all_else(load):
    model = load("llama")
    session = dl.create_session(model)
    session.eval(some_ids(1, 20))
    best = session.logits.topk(2).indices.tolist()
    assert session.sample(dl.SamplingParams(logit_bias={best[0]: -INF})) == best[1]
    assert session.sample(dl.SamplingParams(logit_bias={7: 1000.0})) == 7
    params = dl.SamplingParams(temp=0.7, top_k=20, repetition_penalty=1.3, logit_bias={best[0]: -2.5, 3: 4.0})
    plain = dl.SamplingParams(temp=0.7, top_k=20, repetition_penalty=1.3)
    before = session.logits.clone()
    biased = before.clone()
    biased[best[0]] -= 2.5
    biased[3] += 4.0
    for seed in range(20):
        session.set_seed(seed)
        found = session.sample(params)
        session.set_seed(seed)
        session.logits.copy_(biased)
        assert session.sample(plain) == found
        session.logits.copy_(before)
    banned = dl.SamplingParams(logit_bias=dict.fromkeys(range(256), -INF))
    with pytest.raises(dl.DasllamaError, match="-inf for every token"):
        session.sample(banned)


def test_logprobs_are_those_of_the_models_own_distribution(load):
    """Whatever bias, penalties and temperature make of it."""
    model = load("qwen2")
    params = dl.SamplingParams(temp=1.7, top_k=50, seed=3, logprobs=4, frequency_penalty=1.0, logit_bias={5: 3.0})
    session = dl.create_session(model)
    prompt = some_ids(1, 9)
    tokens = [token for token, _ in session.generate(prompt, params, max_tokens=12)]
    logprobs = session.stats.logprobs
    with dl.create_session(model) as fresh:
        rows = fresh.eval(prompt + tokens, logits="all")[len(prompt) - 1 : -1]
    wanted = rows.double().log_softmax(-1)
    assert [each.token for each in logprobs] == tokens
    for each, row in zip(logprobs, wanted, strict=True):
        assert each.logprob == pytest.approx(row[each.token].item(), abs=1e-9)
        values, ids = row.topk(4)
        assert [token for token, _ in each.top] == ids.tolist()
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-9)
    plain = [token for token, _ in session.generate(prompt, dl.SamplingParams(), max_tokens=2, whole=True)]
    assert session.stats.logprobs == []
    again = list(session.generate(prompt, dl.SamplingParams(logprobs=0), max_tokens=2, whole=True))
    assert [token for token, _ in again] == plain
    assert [each.top for each in session.stats.logprobs] == [(), ()]


def test_the_most_likely_of_equals_are_those_with_lower_ids():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -INF])
    found = token_logprob(logits, 4, 4)
    assert [token for token, _ in found.top] == [1, 3, 2, 4]
    assert [token for token, _ in token_logprob(logits, 0, 50).top] == [1, 3, 2, 4, 5, 0, 6]
    assert found.logprob == found.top[3][1]


def test_a_mask_leaves_only_what_it_allows(load):
    session = dl.create_session(load("llama"))
    session.eval([1, 2, 3])
    allowed = torch.zeros(256, dtype=torch.bool)
    allowed[[9, 200]] = True
    params = dl.SamplingParams(temp=5.0, top_k=2, top_p=0.9999)
    assert {session.sample(params, allowed) for _ in range(40)} == {9, 200}
    with pytest.raises(dl.ConstraintError, match="0 of 256 are allowed"):
        session.sample(params, torch.zeros(256, dtype=torch.bool))
    with pytest.raises(dl.ConstraintError, match="2 of 256 are allowed, and logit_bias"):
        session.sample(dl.SamplingParams(logit_bias={9: -INF, 200: -INF}), allowed)
    masked = restrict(session.logits, dl.SamplingParams(), allowed)
    assert torch.equal(masked.isinf(), ~allowed)
    assert not session.logits.isinf().any()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
def test_n_samples_are_n_forks_alone(load, name):
    model = load(name)
    prompt, params = some_ids(1, 70), dl.SamplingParams(temp=1.2, top_p=0.98, seed=11, logprobs=2)
    session = dl.create_session(model)
    samples = session.generate_n(prompt, params, n=4, max_tokens=20)
    assert session.tokens == prompt
    for i, sample in enumerate(samples):
        with dl.create_session(model) as alone:
            alone.eval(prompt)
            with alone.fork() as fork:
                own = dl.SamplingParams(temp=1.2, top_p=0.98, seed=11 + i, logprobs=2)
                assert [token for token, _ in fork.generate((), own, max_tokens=20)] == sample.tokens
                assert fork.stats.logprobs == sample.stats.logprobs
                assert torch.equal(fork.eval([]), sample.session.eval([]))
        assert (sample.stats.n_prompt, sample.stats.n_generated, sample.stats.stop) == (70, 20, "length")
    assert len({tuple(sample.tokens) for sample in samples}) == 4


def test_samples_end_each_for_itself_and_can_go_on(model):
    prompt = model.encode("The old lighthouse", add_special=False)
    params = dl.SamplingParams(temp=1.0, seed=1, stop=["e", " s"], stop_ids=range(40, 60))
    session = dl.create_session(model)
    samples = session.generate_n(prompt, params, n=6, max_tokens=30)
    assert len({sample.stats.n_generated for sample in samples}) > 2
    for i, sample in enumerate(samples):
        with dl.create_session(model) as alone:
            own = dl.SamplingParams(temp=1.0, seed=1 + i, stop=["e", " s"], stop_ids=range(40, 60))
            pairs = list(alone.generate(prompt, own, max_tokens=30))
            assert sample.tokens == [token for token, _ in pairs if token is not None]
            assert sample.text == "".join(text for _, text in pairs)
            assert (sample.stats.stop, sample.stats.stopped_by) == (alone.stats.stop, alone.stats.stopped_by)
            assert sample.session.tokens + sample.session.pending == alone.tokens + alone.pending
            further = [token for token, _ in sample.session.generate(max_tokens=3)]
            assert further == [token for token, _ in alone.generate(max_tokens=3)]


def test_samples_without_a_seed_differ_and_repeat_with_the_session(load):
    model, params = load("llama"), dl.SamplingParams(temp=1.5)

    def tokens(session):
        return [sample.tokens for sample in session.generate_n([1, 2], params, n=3, max_tokens=8, whole=True)]

    session, other = dl.create_session(model), dl.create_session(model)
    first, second = tokens(session), tokens(session)
    assert len({tuple(each) for each in first + second}) == 6
    assert [tokens(other), tokens(other)] == [first, second]
    assert [sample.tokens for sample in session.generate_n((), dl.SamplingParams(), n=2, max_tokens=0)] == [[], []]
    with pytest.raises(ValueError, match="n is 0"):
        session.generate_n([1], n=0)


def test_samples_stop_at_the_contexts_end_or_shift(load):
    model = load("llama")
    session = dl.create_session(model, n_ctx=12)
    samples = session.generate_n([1, 2, 3, 4, 5, 6, 7, 8], dl.SamplingParams(temp=1.0, seed=0), n=2)
    assert [(sample.stats.stop, len(sample.tokens)) for sample in samples] == [("context", 5)] * 2
    session = dl.create_session(model, n_ctx=12, on_full="shift")
    samples = session.generate_n([1, 2, 3, 4, 5, 6, 7, 8], dl.SamplingParams(temp=1.0, seed=0), n=2, max_tokens=20)
    assert [(sample.stats.stop, sample.stats.shifts > 0) for sample in samples] == [("length", True)] * 2
