"""The end of a session's context: an error, or a shift after which all is as if the forgotten tokens had never been."""

import pytest
import torch
from families import TINY
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.engine import runner


def fresh(model, ids, n_ctx=60, logits="last"):
    with dl.create_session(model, n_ctx=n_ctx) as session:
        return session.eval(ids, logits)


@pytest.mark.parametrize("name", TINY)
def test_a_shift_leaves_what_a_fresh_session_would_hold(load, name):
    model, held, more = load(name), text(1, 57), text(2, 9)
    with dl.create_session(model, n_ctx=60, on_full="shift", keep=5) as session:
        session.eval(held)
        found = session.eval(more, logits="all")
        left = held[:5] + held[5 + 26 :]
        assert session.tokens == left + more
        assert torch.equal(found, fresh(model, left + more, logits="all")[len(left) :])
        assert session.stats.shifts == 1
        assert session.stats.reevaluated_tokens in (len(left), len(left) - 5)
        session.shift(3)
        left = session.eval([1])
        assert session.tokens == held[:5] + (held[5 + 26 :] + more)[3:] + [1]
        assert torch.equal(left, fresh(model, session.tokens))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "qwen35"])
def test_generate_goes_on_across_shifts(load, name):
    model, n_ctx, keep, n = load(name), 24, 2, 36
    held, wanted, shifts = text(3, 20), [], 0
    for _ in range(n):
        if len(held) > n_ctx:
            del held[keep : keep + (len(held) - keep) // 2]
            shifts += 1
        wanted.append(int(fresh(model, held, n_ctx).argmax()))
        held.append(wanted[-1])
    with dl.create_session(model, n_ctx=n_ctx, on_full="shift", keep=keep) as session:
        found = [token for token, _ in session.generate(text(3, 20), max_tokens=n)]
        assert found == wanted
        assert session.tokens + session.pending == held
        assert (session.stats.shifts, session.stats.stop) == (shifts, "length")
    assert shifts == 3


@pytest.mark.parametrize("kv_dtype", ["f32", "q8_0", "tq4"])
def test_quantized_keys_shift(load, kv_dtype):
    """Keys at their new positions are those of the tokens there, not the old ones turned and rounded again."""
    model, ids = load("llama"), text(4, 70)
    with dl.create_session(model, kv_dtype, n_ctx=64, on_full="shift") as session:
        found = session.eval(ids[:64]), session.eval(ids[64:])
        with dl.create_session(model, kv_dtype, n_ctx=64) as other:
            assert not torch.equal(found[0], found[1])
            assert torch.equal(other.eval(session.tokens), found[1])


def test_several_sessions_of_a_batch_shift(load):
    model = load("gemma3")
    sessions = [dl.create_session(model, n_ctx=n, on_full=how, keep=1) for n, how in ((40, "shift"), (90, "error"))]
    sessions.append(dl.create_session(model, n_ctx=30, on_full="shift", keep=0))
    dl.eval_batch(sessions, [text(i, 30) for i in range(3)])
    found = dl.eval_batch(sessions, [text(i, 20) for i in range(3, 6)])
    assert [session.stats.shifts for session in sessions] == [1, 0, 1]
    for session, logits in zip(sessions, found, strict=True):
        assert torch.equal(logits, fresh(model, session.tokens, session.n_ctx))
    # One that cannot: nothing happens to the others either.
    before = [session.tokens.copy() for session in sessions]
    with pytest.raises(dl.ContextFull, match="50 tokens of the session and 41 new ones exceed its context, n_ctx=90$"):
        dl.eval_batch(sessions, [[1] * 30, [1] * 41, [1]])
    assert [session.tokens for session in sessions] == before
    assert [session.stats.shifts for session in sessions] == [1, 0, 1]


def test_what_does_not_fit_behind_the_kept_tokens_is_refused(load):
    session = dl.create_session(load("llama"), n_ctx=20, on_full="shift", keep=8)
    logits = session.eval(text(1, 15))
    with pytest.raises(dl.ContextFull, match="15 tokens .* 13 new .* n_ctx=20, of which the first 8 stay"):
        session.eval(text(2, 13))
    assert torch.equal(session.logits, logits)
    session.eval(text(2, 12))
    assert session.tokens == text(1, 8) + text(2, 12)


def test_a_prompt_beyond_the_context_is_refused_where_the_session_shifts_too(load):
    session = dl.create_session(load("llama"), n_ctx=20, on_full="shift")
    logits = session.eval(text(1, 15))
    for whole in (session.prefill, lambda ids: list(session.generate(ids, whole=True))):
        with pytest.raises(dl.ContextFull, match="21 tokens exceed the session's context, n_ctx=20"):
            whole(text(2, 21))
    assert session.tokens == text(1, 15)
    assert torch.equal(session.logits, logits)


def test_a_full_session_without_a_shift_stops(load):
    session = dl.create_session(load("llama"), n_ctx=20)
    assert len(list(session.generate(text(1, 18)))) == 3
    assert (session.stats.stop, session.stats.shifts) == ("context", 0)
    with pytest.raises(dl.ContextFull):
        session.eval([])


def test_no_room_after_a_shift_loses_nothing(load):
    """The forgotten tokens' pages are still held by a fork. What is left to be evaluated waits."""
    model, held = load("llama"), text(5, 64)
    needed = dl.create_kv_pool(model, 16, max_bytes=1 << 24).groups[0].page_bytes * 5
    pool = dl.create_kv_pool(model, 16, max_bytes=needed)
    session = dl.create_session(model, n_ctx=64, pool=pool, on_full="shift", keep=0)
    session.eval(held)
    fork = dl.fork(session)
    with pytest.raises(dl.OutOfPages):
        session.eval([3, 4, 5])
    assert session.tokens + session.pending == held[32:]
    fork.close()
    assert torch.equal(session.eval([3, 4, 5]), fresh(model, [*held[32:], 3, 4, 5], 64))


def test_a_failure_while_it_is_evaluated_anew_loses_nothing(load, monkeypatch):
    monkeypatch.setattr(runner, "MAX_ROWS", 16)
    model, held = load("llama"), text(6, 64)
    session = dl.create_session(model, n_ctx=64, on_full="shift", keep=4)
    session.eval(held)
    left, seen = held[:4] + held[4 + 30 :], []

    def fail(module, args):
        seen.append(1)
        if len(seen) == 2:
            raise RuntimeError("in the second window")

    with pytest.raises(RuntimeError, match="second window"), model.model.layers[1].register_forward_pre_hook(fail):
        session.eval([7])
    assert session.tokens == left[:20]
    assert session.tokens + session.pending == left
    assert torch.equal(session.eval([7]), fresh(model, [*left, 7], 64))


def test_rows_of_embeddings_are_never_evaluated_anew(load):
    model = load("llama")
    rows = torch.randn(6, model.config.n_embd, generator=torch.Generator().manual_seed(1))
    session = dl.create_session(model, n_ctx=30, on_full="shift", keep=2)
    session.eval(text(1, 4))
    logits = session.eval_embd(rows)
    with pytest.raises(dl.CannotRewind, match="rows of embeddings"):
        session.shift(1)
    with pytest.raises(dl.CannotRewind, match="a shift by 4 tokens would evaluate rows of embeddings"):
        session.eval(text(2, 24))
    assert torch.equal(session.logits, logits)
    assert session.stats.shifts == 0
    session.shift(8)  # they go
    assert torch.equal(session.eval(text(2, 24)), fresh(model, text(1, 2) + text(2, 24), 30))
    # Kept ones stay, where the layers can go back to behind them.
    other = dl.create_session(model, n_ctx=30, on_full="shift", keep=6)
    other.eval_embd(rows)
    other.eval(text(3, 20))
    found = other.eval(text(4, 10))
    with dl.create_session(model, n_ctx=30) as wanted:
        wanted.eval_embd(rows)
        assert torch.equal(found, wanted.eval(other.tokens[6:]))


def test_what_a_shift_takes_by_itself(load):
    model = load("llama")
    session = dl.create_session(model, n_ctx=30, keep=3)
    assert dl.create_session(model).keep == int(model.tokenizer.add_bos)
    with pytest.raises(ValueError, match="n is 1, wanted 1 to -3"):
        session.shift()
    session.eval(text(1, 10))
    session.shift()
    assert (session.n_past, session.pending, session.logits) == (3, text(1, 10)[6:], None)
    session.shift(4)
    assert (session.tokens, session.pending) == (text(1, 3), [])
    for n in (0, 1):
        with pytest.raises(ValueError, match=f"n is {n}, wanted 1 to 0"):
            session.shift(n)
    session.close()
    with pytest.raises(dl.DasllamaError, match="closed"):
        session.shift()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(on_full="slide"), "on_full is 'slide', wanted 'error' or 'shift'"),
        (dict(n_ctx=8, keep=8), "keep is 8, wanted 0 to 7"),
        (dict(keep=-1), "keep is -1"),
    ],
)
def test_wrong_arguments_are_refused(load, arguments, text):
    with pytest.raises(ValueError, match=text):
        dl.create_session(load("llama"), **arguments)


def test_all_logits_are_those_of_the_ids_alone(load):
    """Not those of a pending token before them."""
    model = load("llama")
    session = dl.create_session(model)
    next(session.generate(text(1, 5)))
    (token,) = session.pending
    rows = []
    with model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[-2])):
        found = session.eval([8, 9], logits="all")
    assert rows == [2]
    assert torch.equal(found, fresh(model, [*text(1, 5), token, 8, 9], logits="all")[-2:])
    next(session.generate())
    assert session.eval([], logits="all").shape == (0, model.config.n_vocab)
    assert torch.equal(session.logits, fresh(model, session.tokens))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
def test_a_shift_beside_a_prefix_cache(load, name):
    """What the cache keeps of either history serves that one only, and ids behind a shift are not its beginning."""
    model, ids = load(name), text(1, 96)
    with dl.create_prefix_cache(model, dl.create_kv_pool(model, 16, max_bytes=1 << 26), checkpoint_every=1) as cache:

        def session(**how):
            return dl.create_session(model, n_ctx=80, prefix_cache=cache, **how)

        shifting = session(on_full="shift", keep=5)
        shifting.eval(ids[:80])
        shifting.shift()
        found = shifting.eval(ids[:20])  # which the cache knows
        assert shifting.tokens == ids[:5] + ids[5 + 37 : 80] + ids[:20]
        assert torch.equal(found, fresh(model, shifting.tokens, 80))
        for history in (shifting.tokens, ids[:80]):
            other = session()
            assert torch.equal(other.eval(history), fresh(model, history, 80))
            assert other.stats.reused_tokens >= 48
