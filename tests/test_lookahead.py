"""Steps that are begun before the host has seen their token do not show, whatever is done between two tokens. Without a
GPU a recorded step does at once what a captured one would have begun; `test_cuda_models.py` has the real ones."""

from dataclasses import replace

import pytest
import torch
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.engine import graphs, lookahead
from dasllama_torch.modules import base


@pytest.fixture
def begun(monkeypatch):
    """The tokens whose steps were begun, as on a GPU."""
    tokens: list[int] = []
    run = graphs.run

    def begin(sessions, drawn):
        ids = drawn.tolist()
        if min(ids) < 0 or not (rows := run(sessions, ids)):
            return None
        tokens.extend(ids)
        logits, epoch = [row.clone() for row in rows], base.epoch()
        return logits, lambda those: base.epoch() == epoch

    monkeypatch.setattr(lookahead, "is_possible", lambda logits: True)
    monkeypatch.setattr(lookahead, "_sent", lambda sessions, drawn: drawn.tolist)
    monkeypatch.setattr(graphs, "begin", begin)
    return tokens


def interrupted(model, params):
    """A stream of 50 tokens and what its session holds in the end, with much going on in between."""
    session, other = dl.create_session(model, rewind=8), dl.create_session(model)
    other.eval(text(7, 9))
    seen, kept = [], []
    for i, (token, _) in enumerate(session.generate(text(5, 20), params, 50)):
        seen.append(token)
        if i == 10:
            kept.append(session.fork().eval([]).clone())
        if i == 20:
            session.truncate(session.n_past - 3)
            session.eval([1, 2, 3])
        if i == 25:
            session.eval([7, 8])
            session.pending = [token]  # once more, elsewhere
        if i == 30:
            kept.append(other.eval([i]).clone())
        if i == 35:
            hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)
        if i == 40:
            hook.remove()
        if i == 45:
            session.truncate(session.n_past - 2)
            session.pending = [token]
        if i == 47:
            session.pending = [9]
    kept.append(session.eval([1]).clone())
    return seen, session.tokens.copy(), torch.stack(kept)


@pytest.mark.parametrize("params", [dl.SamplingParams(), dl.SamplingParams(temp=2.0, seed=4, repetition_penalty=1.2)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_shows(name, params, load, begun, monkeypatch):
    model = load(name)
    found = interrupted(model, params)
    assert len(begun) > 35
    monkeypatch.setattr(lookahead, "is_possible", lambda logits: False)
    wanted = interrupted(model, params)
    assert found[:2] == wanted[:2]
    assert torch.equal(found[2], wanted[2])


def test_what_was_begun_is_used(load, begun, monkeypatch):
    """A stream evaluates nothing else, and begins nothing behind its last token."""
    model, evaluated = load("llama"), []
    run = graphs.run
    with dl.create_session(model) as session:
        stream = session.generate(text(5, 20), dl.SamplingParams(temp=1.0), 12)
        first, _ = next(stream)

        def noted(sessions, ids, *args, **how):
            evaluated.extend(ids if sessions[0] is session else ())
            return run(sessions, ids, *args, **how)

        monkeypatch.setattr(graphs, "run", noted)
        rest = [token for token, _ in stream]
        assert (begun, evaluated) == ([first, *rest[:-1]], [])


def test_a_stream_that_ends_holds_no_more_than_it_says(load, begun):
    model = load("llama")
    with dl.create_session(model) as session:
        ids = [token for token, _ in session.generate(text(5, 20), dl.SamplingParams(temp=1.5), 20)]
    with dl.create_session(model) as session:
        stopped = dl.SamplingParams(temp=1.5, stop_ids=[ids[12]])
        shorter = [token for token, _ in session.generate(text(5, 20), stopped, 20)]
        assert shorter == ids[: ids.index(ids[12])]
        assert session.ahead is None
        logits = session.eval([3])
        assert session.tokens == [*text(5, 20), *shorter, 3]
    with dl.create_session(model) as session:
        assert torch.equal(session.eval([*text(5, 20), *shorter, 3]), logits)


@pytest.mark.parametrize(
    "params", [dl.SamplingParams(temp=1.5, seed=3), dl.SamplingParams(temp=1.5, frequency_penalty=2.0)]
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_several_streams_end_one_by_one(name, params, load, begun, monkeypatch):
    """What was begun for all of them serves those that go on, and shows in none that has ended."""
    model = load(name)

    def drawn(params, n, count=40):
        with dl.create_session(model) as session:
            return session.generate_n(text(5, 20), params, n, count)

    def held(samples):
        for sample in samples[:2]:
            sample.session.eval([3, 4])
        return [(s.tokens, s.text, s.stats.stop, s.session.tokens, s.session.eval([9]).clone()) for s in samples]

    free = drawn(params, 5)
    ends = [free[1].tokens[7], free[3].tokens[20]]
    stopping = replace(params, stop_ids=ends)
    begun.clear()
    found = held(drawn(stopping, 5))
    assert len(begun) > 60
    monkeypatch.setattr(lookahead, "is_possible", lambda logits: False)
    begun.clear()
    wanted = held(drawn(stopping, 5))
    assert not begun
    assert len({len(tokens) for tokens, *_ in wanted}) > 2
    for one, other in zip(found, wanted, strict=True):
        assert one[:4] == other[:4]
        assert torch.equal(one[4], other[4])


def test_what_was_begun_for_several_is_used(load, begun, monkeypatch):
    model, evaluated = load("llama"), []
    with dl.create_session(model) as session:
        session.eval(text(5, 20), logits=None)
        monkeypatch.setattr(graphs, "run", lambda *args, **how: evaluated.append(args))
        samples = session.generate_n([1, 2], dl.SamplingParams(temp=1.0, seed=5), 3, 12)
    rounds = list(zip(*(sample.tokens[:-1] for sample in samples), strict=True))
    assert begun == [token for each in rounds[1:] for token in each]
    assert len(evaluated) == 1  # the first, for which each has to copy the page that all have begun


def test_a_draw_that_is_refused_leaves_nothing_begun(load, begun, monkeypatch):
    """The step of the first draw was written over by that of the second, which is refused."""
    model = load("llama")
    with dl.create_session(model) as session, dl.create_session(model) as other:
        for each in (session, other):
            each.eval(text(5, 20))
        token = session.sample(dl.SamplingParams(temp=1.0, seed=3), ahead=True)
        monkeypatch.setattr(lookahead.sampling, "checked", raising)
        with pytest.raises(dl.DasllamaError, match="refused"):
            session.sample(dl.SamplingParams(logit_bias={9: 100.0}), ahead=True)
        assert session.ahead is None
        assert torch.equal(session.eval([token]), other.eval([token]))
        assert torch.equal(session.eval([7]), other.eval([7]))


def raising(*args):
    raise dl.DasllamaError("refused")


def test_a_recurrent_state_cannot_be_taken_back(load, begun):
    with dl.create_session(load("qwen35")) as session:
        assert len(list(session.generate(text(5, 20), max_tokens=5))) == 5
    assert not begun


def test_no_distribution_is_refused_as_ever(load, begun):
    model = load("llama")
    with dl.create_session(model) as session:
        session.eval([1])
        session.logits = torch.full_like(session.logits, float("nan"))
        with pytest.raises(dl.DasllamaError, match="the logits hold nan"):
            next(session.generate(max_tokens=3))
