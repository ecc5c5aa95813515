"""Steps that are begun before the host has seen their token do not show, whatever is done between two tokens. Without a
GPU a recorded step does at once what a captured one would have begun; `test_cuda_models.py` has the real ones."""

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

    def begin(session, token):
        if token < 0 or not (rows := run([session], [int(token)])):
            return None
        tokens.append(int(token))
        logits, epoch = rows[0].clone(), base.epoch()
        return logits, lambda: base.epoch() == epoch

    monkeypatch.setattr(lookahead, "is_possible", lambda logits: True)
    monkeypatch.setattr(lookahead, "_sent", lambda session, token: lambda: int(token))
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
        logits = session.eval([3])
        assert session.tokens == [*text(5, 20), *shorter, 3]
    with dl.create_session(model) as session:
        assert torch.equal(session.eval([*text(5, 20), *shorter, 3]), logits)


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
