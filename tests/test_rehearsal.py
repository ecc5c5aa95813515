"""What a backend that compiles kernels is given to find out which ones a forward wants: the forward once more, on rows
that are inert."""

import contextlib

import pytest
import torch
from families import TINY
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.ops import registry


@pytest.fixture
def rehearsed(monkeypatch):
    """The CPU has each forward of the modules rehearsed, before it and again behind it. Counts the forwards."""
    done = []

    @contextlib.contextmanager
    def preparing(rehearse):
        with registry.counting():
            rehearse()
        yield
        with registry.counting():
            rehearse()
        done.append(1)

    monkeypatch.setitem(registry._preparations, "cpu", preparing)
    return done


def logits_of(load, name):
    """Of prompts behind each other and of single tokens, in two sessions side by side."""
    model = load(name)
    sessions = [dl.create_session(model, n_ctx=256) for _ in range(2)]
    found = [row for ids in (text(1, 20), text(2, 3)) for row in dl.eval_batch(sessions, [ids, ids[1:]], logits="all")]
    found += [row[None] for row in dl.eval_batch(sessions, [[5], [6]])]
    return torch.cat([*found, sessions[0].eval(text(3, 70), logits="all")])


@pytest.mark.parametrize("name", TINY)
def test_nothing_is_changed(name, load, request):
    wanted = logits_of(load, name)
    done = request.getfixturevalue("rehearsed")
    assert torch.equal(logits_of(load, name), wanted)
    assert len(done) == 3


def test_embeddings_that_are_placed(load, rehearsed, monkeypatch):
    """Their step is changed on the way."""
    model = load("qwen3vl")
    rows, at = torch.randn(6, model.config.n_embd), torch.arange(6)[:, None].repeat(1, 3)
    found = []
    for _ in range(2):
        with dl.create_session(model) as session:
            session.eval(text(1, 5))
            found.append(session.eval(dl.Embeddings(rows, causal=False, positions=at)))
        monkeypatch.delitem(registry._preparations, "cpu", raising=False)
    assert len(rehearsed) == 2
    assert torch.equal(*found)


def test_nobody_who_watches_sees_it(load, rehearsed):
    seen = []
    model = load("llama")
    hook = model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    try:
        with dl.create_session(model) as session:
            session.eval(text(1, 5))
    finally:
        hook.remove()
    assert len(seen) == 1
    assert not rehearsed
