"""Batches: whoever else is in a forward, a session gets what it would have got alone, to the bit, and it loses nothing
when the batch fails."""

import pytest
import torch
from families import TINY
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.engine import runner

LENGTHS = 1, 19, 7, 33, 5, 12, 2, 26
N_CTX = 200


def alone(model, ids, logits="last"):
    with dl.create_session(model, n_ctx=N_CTX) as session:
        return session.eval(ids, logits)


@pytest.mark.parametrize("name", TINY)
def test_eight_sessions_are_eight_single_runs(load, name, monkeypatch):
    """Prompts cut over many windows, then single tokens, then chunks and single tokens in one."""
    monkeypatch.setattr(runner, "MAX_ROWS", 24)
    model = load(name)
    steps = [1] * 8, [9, 1, 1, 31, 1, 5, 1, 1]  # the fourth goes on into a second page
    texts = [text(i, n + sum(step[i] for step in steps)) for i, n in enumerate(LENGTHS)]
    sessions = [dl.create_session(model, n_ctx=N_CTX) for _ in texts]
    found, at = [[] for _ in texts], [0] * 8
    for step in (LENGTHS, *steps):
        parts = [ids[i : i + n] for ids, i, n in zip(texts, at, step, strict=True)]
        at = [i + n for i, n in zip(at, step, strict=True)]
        for rows, logits in zip(found, dl.eval_batch(sessions, parts, logits="all"), strict=True):
            rows.append(logits)
    for session, rows, ids in zip(sessions, found, texts, strict=True):
        assert session.tokens == ids
        assert torch.equal(torch.cat(rows), alone(model, ids, "all"))
        session.close()


def test_more_rows_than_a_forward_takes(load):
    """Five windows of 512 rows, each of several sessions or of a part of one."""
    model = load("llama")
    texts = [text(i, n) for i, n in enumerate((700, 3, 900, 1, 450))]
    sessions = [dl.create_session(model, n_ctx=1000) for _ in texts]
    found = dl.eval_batch(sessions, texts)
    for session, logits, ids in zip(sessions, found, texts, strict=True):
        with dl.create_session(model, n_ctx=1000) as single:
            assert torch.equal(logits, single.eval(ids))
        assert torch.equal(session.logits, logits)


def consistent(pool, sessions):
    """Each session's tokens and positions agree, and the pool holds no page that none of them does."""
    held = [set() for _ in pool.groups]
    for session in sessions:
        assert session.sequence.length == session.n_past
        for pages, table in zip(held, session.sequence.tables, strict=True):
            pages.update(page for page in table if page >= 0)
    assert [len(pages) for pages in held] == [group.pages.in_use for group in pool.groups]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_failure_in_a_later_window(load, name, window, monkeypatch):
    """Sessions hold the tokens of the forwards that were done, and go on from there; where a recurrent state may have
    changed, they say so until they are truncated."""
    monkeypatch.setattr(runner, "MAX_ROWS", 16)
    model, texts = load(name), [text(i, n) for i, n in enumerate((20, 1, 25, 14))]
    pool = dl.create_kv_pool(model, max_bytes=1 << 26)
    sessions = [dl.create_session(model, n_ctx=N_CTX, pool=pool) for _ in texts]
    first = dl.eval_batch(sessions, [[3]] * 4)
    forwards = []

    def fail(module, args):
        forwards.append(1)
        if len(forwards) == window:
            raise RuntimeError("out of luck")

    with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="out of luck"):
        dl.eval_batch(sessions, texts)
    done, left = 16 * (window - 1), []
    for ids in texts:
        left.append(ids[done:])
        done = max(0, done - len(ids))
    assert [session.tokens for session in sessions] == [
        [3, *ids[: len(ids) - len(rest)]] for ids, rest in zip(texts, left, strict=True)
    ]
    consistent(pool, sessions)
    for session, logits, ids, rest in zip(sessions, first, texts, left, strict=True):
        if len(rest) == len(ids) and not session.sequence.torn:
            assert torch.equal(session.logits, logits)
        if session.sequence.torn:
            assert name == "qwen35"
            with pytest.raises(dl.CannotRewind, match="failed half way"):
                session.eval([1])
            session.truncate(0)
            rest = [3, *ids]
        assert not rest or torch.equal(session.eval(rest), alone(model, [3, *ids]))
        session.close()
    assert pool.used_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
@pytest.mark.parametrize("take", [1, 2, 3, 6])
def test_a_page_that_is_not_to_be_had_loses_no_session(load, name, take, monkeypatch):
    """Whatever was foretold: the page of any session in any window may fail, as memory of a device can."""
    monkeypatch.setattr(runner, "MAX_ROWS", 16)
    model, texts = load(name), [text(i, n) for i, n in enumerate((20, 1, 25, 14))]
    pool = dl.create_kv_pool(model, 16, max_bytes=1 << 26)
    sessions = [dl.create_session(model, n_ctx=N_CTX, pool=pool) for _ in texts]
    original, calls = PageAllocator.take, []

    def fail(self, n):
        calls.append(n) if n else None
        if n and len(calls) == take:
            raise dl.OutOfPages("none left")
        return original(self, n)

    monkeypatch.setattr(PageAllocator, "take", fail)
    with pytest.raises(dl.OutOfPages, match="none left"):
        dl.eval_batch(sessions, texts)
    consistent(pool, sessions)
    for session, ids in zip(sessions, texts, strict=True):
        if session.sequence.torn:
            session.truncate(0)
        rest = ids[session.n_past :]
        assert not rest or torch.equal(session.eval(rest), alone(model, ids))


def test_what_cannot_stand_in_a_batch(load):
    model, other = load("llama"), load("qwen2")
    a, b, closed = (dl.create_session(model) for _ in range(3))
    closed.close()
    dl.eval_batch([a, b], [[1, 2], [3]])
    foreign = dl.create_session(model, pool=dl.create_kv_pool(model, max_bytes=1 << 24))
    for sessions, ids, error, match in (
        ([a, b, a], [[1], [2], [3]], ValueError, "once only"),
        ([a, closed], [[1], [2]], dl.DasllamaError, "closed"),
        ([a, foreign], [[1], [2]], ValueError, "one model and one pool"),
        ([a, dl.create_session(other)], [[1], [2]], ValueError, "one model and one pool"),
        ([a, b], [[1], []], ValueError, "no ids"),
        ([a, b], [[1], [256 * 256]], ValueError, "outside the vocabulary"),
        ([a, b], [[1]], ValueError, "2 sessions and 1 lists"),
        ([], [], ValueError, "0 sessions and 0 lists"),
        ([a, b], [[1], [2] * 4096], dl.ContextFull, "1 tokens of the session and 4096 new"),
    ):
        with pytest.raises(error, match=match):
            dl.eval_batch(sessions, ids)
        assert (a.tokens, b.tokens) == ([1, 2], [3])
    assert torch.equal(dl.eval_batch([a, b], [[5], [6]])[1], alone(model, [3, 6]))


def test_a_pending_token_comes_first_for_each(load):
    model = load("qwen2")
    a, b = dl.create_session(model), dl.create_session(model)
    (said, _) = next(a.generate(text(1, 5)))
    b.eval(text(2, 3))
    found = dl.eval_batch([a, b], [[], [9]])
    assert torch.equal(found[0], alone(model, [*text(1, 5), said]))
    assert torch.equal(found[1], alone(model, [*text(2, 3), 9]))
    assert a.pending == []
