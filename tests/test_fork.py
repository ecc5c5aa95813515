"""A fork and its session share what they have in common, and neither sees what becomes of the other."""

import pytest
import torch
from families import TINY
from test_graphs import counted
from test_invariants import text

import dasllama_torch as dl

N_CTX = 512  # beyond what some of these files say


@pytest.fixture
def hybrid(oracle):
    """Three recurrent layers and one with attention."""
    return dl.load_model(oracle / "tiny" / "qwen35.gguf")


@pytest.fixture
def windowed(oracle):
    return dl.load_model(oracle / "tiny" / "gemma3.gguf")


def fresh(model, ids, n):
    """Logits of the last n of ids, by a session that has seen nothing else."""
    with dl.create_session(model, n_ctx=N_CTX) as session:
        return session.eval(ids, logits="all")[-n:]


@pytest.mark.parametrize("name", TINY)
def test_every_family(name, oracle):
    """A session, its fork and the fork's own in one batch; then both ways of going back, each checked against a run
    that has neither forked nor gone back."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf")
    pool = dl.create_kv_pool(model, page_rows=16)
    start, tails = text(1, 75), [text(2, 30), text(3, 30), text(4, 30)]  # the fork is made in the middle of a page
    session = dl.create_session(model, n_ctx=N_CTX, pool=pool)
    session.eval(start)
    session.checkpoint()
    fork = dl.fork(session)
    branches = [session, fork, dl.fork(fork)]

    def go_on():
        """The tails in chunks of several lengths, then as single rows, which are recorded steps."""
        found = [[], [], []]
        cuts = [(0, 5), (5, 21), *((i, i + 1) for i in range(21, 30))]
        for first, last in cuts:
            for rows, logits in zip(found, dl.eval_batch(branches, [t[first:last] for t in tails], "all"), strict=True):
                rows.append(logits)
        return list(map(torch.cat, found))

    wanted = [fresh(model, start + tail, 30) for tail in tails]
    found, steps = counted(go_on)
    assert steps["recorded"] == 8
    for rows, logits in zip(found, wanted, strict=True):
        assert torch.equal(rows, logits)
    fork.truncate(75)  # shares its pages and its checkpoint again with the others, which have gone on
    session.close()
    assert torch.equal(fork.eval(tails[0], logits="all"), wanted[0])
    again = dl.fork(branches[2])
    again.truncate(75)
    assert torch.equal(again.eval(tails[1], logits="all"), wanted[1])
    assert torch.equal(branches[2].eval([7], logits="all"), fresh(model, [*start, *tails[2], 7], 1))
    for each in (fork, branches[2], again):
        each.close()
    assert pool.used_bytes == 0


def test_full_pages_are_shared_and_the_last_is_copied_by_who_writes(windowed):
    pool = dl.create_kv_pool(windowed)
    session = dl.create_session(windowed, n_ctx=N_CTX, pool=pool)
    session.eval(text(1, 300))
    held, page = pool.used_bytes, sum(group.page_bytes for group in pool.groups)
    forks = [dl.fork(session) for _ in range(10)]
    assert pool.used_bytes == held
    for i, fork in enumerate(forks):
        fork.eval([i])
        assert pool.used_bytes == held + (i + 1) * page
    session.eval([10])  # holds its page alone now
    assert pool.used_bytes == held + 10 * page
    for one, other in zip([session, *forks], forks, strict=False):
        for a, b in zip(one.sequence.tables, other.sequence.tables, strict=True):
            assert a[:-1] == b[:-1]
            assert a[-1] != b[-1]
    for each in (session, *forks):
        each.close()
    assert pool.used_bytes == 0


def test_a_prefix_longer_than_a_page_with_two_ends(windowed, hybrid):
    """Shared rows are as many as tokens, not as many as pages have room for."""
    for model in (windowed, hybrid):
        start, ends = text(1, 300), (text(2, 40), text(3, 100))
        with dl.create_session(model, n_ctx=N_CTX) as session:
            session.eval(start)
            with dl.fork(session) as fork:
                for each, end in zip((session, fork), ends, strict=True):
                    assert torch.equal(each.eval(end, logits="all"), fresh(model, start + end, len(end)))


def test_a_full_page_needs_no_copy(windowed):
    pool = dl.create_kv_pool(windowed)
    session = dl.create_session(windowed, n_ctx=N_CTX, pool=pool)
    session.eval(text(1, 128))
    fork = dl.fork(session)
    before = [table.copy() for table in fork.sequence.tables]
    dl.eval_batch([session, fork], [[1], [2]])
    assert [table[: len(old)] for table, old in zip(fork.sequence.tables, before, strict=True)] == before
    fork.truncate(128)
    fork.truncate(127)  # into a page that both read
    assert torch.equal(fork.eval([5]), fresh(windowed, [*text(1, 127), 5], 1)[0])
    assert torch.equal(session.eval([3]), fresh(windowed, [*text(1, 128), 1, 3], 1)[0])


def test_a_pool_too_full_for_a_copy(hybrid):
    """A fork takes nothing; who writes first is refused, goes on when the other has closed, and has lost nothing."""
    pool = dl.create_kv_pool(hybrid)
    room = pool.state_bytes + pool.groups[0].page_bytes
    for spare in (0, pool.state_bytes, pool.groups[0].page_bytes):
        pool = dl.create_kv_pool(hybrid, max_bytes=room + spare)
        session = dl.create_session(hybrid, n_ctx=N_CTX, pool=pool)
        session.eval(text(1, 40))
        fork = dl.fork(session)
        for each in (session, fork):
            with pytest.raises(dl.OutOfPages):
                each.eval([1])
        with pytest.raises(dl.OutOfPages):
            dl.eval_batch([session, fork], [[1], [2]])
        session.close()
        assert torch.equal(fork.eval([1]), fresh(hybrid, [*text(1, 40), 1], 1)[0])
        fork.close()
        assert pool.used_bytes == 0
    pool = dl.create_kv_pool(hybrid, max_bytes=2 * room)  # in a batch the last to write has the original to itself
    session = dl.create_session(hybrid, n_ctx=N_CTX, pool=pool)
    session.eval(text(1, 40))
    fork = dl.fork(session)
    found = dl.eval_batch([session, fork], [[1], [2]])
    assert [torch.equal(row, fresh(hybrid, [*text(1, 40), i], 1)[0]) for i, row in enumerate(found, 1)] == [True, True]


def test_what_a_fork_takes_along(windowed):
    params = dl.SamplingParams(temp=1.5)
    session = dl.create_session(windowed, n_ctx=100, rewind=20)
    session.set_seed(7)
    stream = session.generate([1, 2, 3], params)
    said = [next(stream)[0] for _ in range(3)]
    fork = dl.fork(session)
    assert (fork.tokens, fork.pending) == (session.tokens, session.pending) == ([1, 2, 3, *said[:2]], said[2:])
    assert (fork.n_ctx, fork.sequence.rewind) == (100, 20)
    assert fork.stats.n_generated == 0
    other = dl.fork(session)
    other.set_seed(8)
    wanted = [next(stream)[0] for _ in range(20)]
    assert [token for token, _ in fork.generate((), params, max_tokens=20)] == wanted  # draws of its own, and alike
    assert [token for token, _ in other.generate((), params, max_tokens=20)] != wanted
    again = dl.fork(session)
    again.logits.zero_()
    again.truncate(2)
    again.eval([9])
    assert session.logits.any()
    assert session.tokens[:5] == [1, 2, 3, *said[:2]]


def test_forks_of_nothing(windowed, hybrid):
    for model in (windowed, hybrid):
        with dl.create_session(model) as session, dl.fork(session) as fork:
            assert (fork.tokens, fork.logits) == ([], None)
            assert torch.equal(fork.eval([1, 2]), session.eval([1, 2]))
        with pytest.raises(dl.DasllamaError, match="closed"):
            dl.fork(session)


def test_a_state_between_two_tokens_is_not_forked(hybrid):
    """Nor does an evaluation that fails half way harm those that shared the state."""
    start = text(1, 20)
    with dl.create_session(hybrid) as session:
        session.eval(start)
        session.checkpoint()
        fork = dl.fork(session)
        used = session.pool.used_bytes
        hook = hybrid.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.eval(text(2, 200))
        hook.remove()
        # What the prompt would have filled has gone back; the copies that were made to write in remain.
        assert session.pool.used_bytes == used + session.pool.groups[0].page_bytes + session.pool.state_bytes
        with pytest.raises(dl.CannotRewind, match="no state to fork at 20"):
            dl.fork(session)
        for each in (fork, session):
            each.truncate(20)
            with dl.fork(each) as again:
                assert torch.equal(again.eval([5]), fresh(hybrid, [*start, 5], 1)[0])
