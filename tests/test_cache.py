"""Windowed pages, recurrent states and rewinding: the memory of local layers stays bounded, states belong to their
sequence alone, and going back is exact or refused."""

import random

import hf_twin
import pytest
import torch

import dasllama_torch as dl
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.sequence import Sequence
from dasllama_torch.config import CacheSpec
from dasllama_torch.engine.runner import MAX_ROWS
from dasllama_torch.engine.session import Session

WINDOW = 9  # of the twin's local layers
ROWS = 64  # of a page


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dl.load_model(hf_twin.make("gemma3", tmp_path_factory.mktemp("twin")).path)


def ids(n, seed=0):
    return torch.randint(0, 301, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_use(pool):
    """Pages of the layers that see all, and of those with a window."""
    full, local = pool.groups
    assert (full.window, local.window) == (0, WINDOW)
    return full.pages.in_use, local.pages.in_use


def own_pool(model, max_bytes=1 << 26):
    return dl.create_kv_pool(model, max_bytes=max_bytes)


def held_bytes(session):
    """Bytes of the pages and slots that a session holds, alone or with others."""
    sequence, pool = session.sequence, session.pool
    slots = len({sequence.state, *sequence.checkpoints.values()} - {-1})  # a state may be the checkpoint's
    pages = (
        group.page_bytes * sum(page >= 0 for page in table)
        for group, table in zip(pool.groups, sequence.tables, strict=True)
    )
    return sum(pages) + slots * pool.state_bytes


def test_pages_of_windowed_layers_do_not_grow(model):
    pool = own_pool(model)
    session = Session(model, pool, n_ctx=2000)
    session.eval(ids(1100), logits=None)
    assert in_use(pool) == (18, 1)
    peaks = []
    for token in ids(200, seed=1):
        session.eval([token], logits=None)
        peaks.append(in_use(pool)[1])
    assert set(peaks) == {1, 2}  # two while the window crosses from one page to the next
    session.close()
    assert in_use(pool) == (0, 0)


def test_a_long_prompt_needs_no_more_than_its_window_and_one_forward(model):
    """A pool that could not hold the local layers' keys of the whole prompt serves it; one byte less is refused."""
    sequence = Sequence(own_pool(model))
    n = 4 * MAX_ROWS
    needed = sequence.bytes_for(n - MAX_ROWS, n)
    full, local = sequence.pool.groups
    assert needed == n // ROWS * full.page_bytes + (MAX_ROWS // ROWS + 1) * local.page_bytes
    wanted = Session(model, own_pool(model), n).eval(ids(n))
    session = Session(model, own_pool(model, needed), n)
    assert torch.equal(session.eval(ids(n)), wanted)
    refused = Session(model, own_pool(model, needed - 1), n)
    with pytest.raises(dl.OutOfPages):
        refused.eval(ids(n))
    assert refused.n_past == refused.pool.used_bytes == 0


def test_results_do_not_depend_on_pages_given_back(model):
    """Equal to a session that keeps every page because a checkpoint at its start might want them."""
    text = ids(400, seed=2)
    with dl.create_session(model, n_ctx=600) as session, dl.create_session(model, n_ctx=600, rewind=400) as keeps_all:
        for start in range(0, 400, 50):
            found, wanted = (s.eval(text[start : start + 50], logits="all") for s in (session, keeps_all))
            assert torch.equal(found, wanted)
        assert session.sequence.tables[1][0] == -1
        assert min(keeps_all.sequence.tables[1]) >= 0


def fresh(model, tokens, more):
    with dl.create_session(model, n_ctx=600) as session:
        session.eval(tokens)
        return session.eval(more, logits="all")


@pytest.mark.parametrize("n", [0, 60, 64, 130, 139, 140])
def test_truncate_and_continue(model, n):
    text, more = ids(140, seed=3), ids(30, seed=4)
    with dl.create_session(model, n_ctx=600, rewind=140) as session:
        session.eval(text)
        session.truncate(n)
        assert session.tokens == text[:n]
        assert (session.logits is None) == (n < 140)
        assert torch.equal(
            session.eval(more, logits="all"), fresh(model, text[:n], more) if n else fresh_start(model, more)
        )


def fresh_start(model, more):
    with dl.create_session(model, n_ctx=600) as session:
        return session.eval(more, logits="all")


def test_rewind_is_how_far_truncate_reaches(model):
    """Two pages of the window's past are kept for 100 tokens; what lies before is refused, not guessed."""
    text, more = ids(500, seed=5), ids(5, seed=6)
    with dl.create_session(model, n_ctx=600, rewind=100) as session:
        session.eval(text)
        with pytest.raises(dl.CannotRewind, match="position 300 sees through a window of 9 are gone: 500 tokens"):
            session.truncate(300)
        assert session.n_past == 500
        session.truncate(400)
        assert torch.equal(session.eval(more, logits="all"), fresh(model, text[:400], more))


def test_a_checkpoint_keeps_the_window_before_it(model):
    text, more = ids(400, seed=7), ids(20, seed=8)
    with dl.create_session(model, n_ctx=600) as session:
        session.eval(text[:100])
        session.checkpoint()
        session.eval(text[100:])
        session.truncate(100)
        assert torch.equal(session.eval(more, logits="all"), fresh(model, text[:100], more))
        session.truncate(80)  # the checkpoint's pages reach that far back
        session.eval(text)
        assert session.sequence.checkpoints == {}
        assert session.sequence.tables[1][0] == -1
    assert held_bytes(session) == 0


def test_a_pending_token_is_forgotten_by_truncate(model):
    with dl.create_session(model, n_ctx=600) as session:
        next(session.generate([1, 2, 3]))
        session.truncate(3)
        assert session.pending == []
        assert session.logits is not None


def test_layers_that_keep_nothing_have_no_pages():
    spec = CacheSpec(n_kv_heads=2, k_dim=8, v_dim=8)
    pool = KVPool([spec, None], "f32", 1 << 20, "cpu", page_rows=4)
    assert pool[1] is None
    assert [group.page_bytes for group in pool.groups] == [4 * 2 * 16 * 4]


# ---- recurrent states -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(oracle):
    """Three recurrent layers and one with attention; vocabulary of 256."""
    return dl.load_model(oracle / "tiny" / "qwen35.gguf")


def few_ids(n, seed):
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_slot_comes_with_the_first_token_and_goes_back(hybrid):
    pool = own_pool(hybrid)
    session, other = Session(hybrid, pool, 100), Session(hybrid, pool, 100)
    assert pool.states.in_use == pool.used_bytes == 0
    session.eval(few_ids(3, 0))
    other.eval(few_ids(3, 1))
    assert pool.states.in_use == 2
    assert pool.used_bytes == 2 * (pool.state_bytes + pool.groups[0].page_bytes)
    session.close()
    assert pool.states.in_use == 1
    # The next session takes the same slot, and finds nothing in it.
    text = few_ids(20, 2)
    reused = Session(hybrid, pool, 100)
    assert torch.equal(reused.eval(text), fresh_start(hybrid, text)[-1])
    assert reused.sequence.state == 0


def test_a_pool_without_room_for_a_state_is_out_of_pages(hybrid):
    pool = own_pool(hybrid)
    pool = own_pool(hybrid, pool.state_bytes + pool.groups[0].page_bytes)
    session, other = Session(hybrid, pool, 100), Session(hybrid, pool, 100)
    wanted = session.eval(few_ids(5, 0))
    with pytest.raises(dl.OutOfPages, match="0 of .* bytes left"):
        other.eval([1])
    with pytest.raises(dl.OutOfPages, match="0 of .* bytes left"):
        session.checkpoint()
    assert torch.equal(session.logits, wanted)
    assert session.sequence.checkpoints == {}


def test_a_recurrent_state_goes_back_to_a_checkpoint_only(hybrid):
    """Keys can be cut off anywhere; a state that stayed ahead of them would drift without a sign."""
    text, more = few_ids(90, 3), few_ids(12, 4)
    with dl.create_session(hybrid, n_ctx=600, rewind=90) as session:
        session.eval(text[:40])
        session.checkpoint()
        session.eval(text[40:70])
        session.checkpoint()
        session.eval(text[70:])
        for n in (1, 39, 41, 89):
            with pytest.raises(dl.CannotRewind, match=f"from 90 to {n}, only to a checkpoint: 0, 40, 70"):
                session.truncate(n)
        assert session.tokens == text
        for n in (90, 70, 40, 40):
            session.truncate(n)
            assert torch.equal(session.eval(more, logits="all"), fresh(hybrid, text[:n], more))
            session.eval(few_ids(7, 5))
        assert list(session.sequence.checkpoints) == [40]
        session.truncate(0)
        assert torch.equal(session.eval(more, logits="all"), fresh_start(hybrid, more))
    assert held_bytes(session) == 0


def test_a_failed_evaluation_leaves_no_state_between_two_tokens(hybrid):
    text = few_ids(30, 6)
    with dl.create_session(hybrid) as session, dl.create_session(hybrid) as bystander:
        session.eval(text[:10])
        session.checkpoint()
        session.eval(text[10:20])
        bystander.eval(text)

        def fail(*_):
            raise KeyboardInterrupt

        hook = hybrid.model.layers[2].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            session.eval(text[20:])
        hook.remove()
        assert session.tokens == text[:20]
        for call in (lambda: session.eval([1]), lambda: session.truncate(20), session.checkpoint):
            with pytest.raises(dl.CannotRewind):
                call()
        assert torch.equal(bystander.eval([1]), fresh(hybrid, text, [1])[-1])
        session.truncate(10)
        assert torch.equal(session.eval(text[10:], logits="all"), fresh(hybrid, text[:10], text[10:]))


def test_a_failed_evaluation_over_pages_alone_is_as_if_it_had_not_been(model):
    text = ids(30, seed=9)
    with dl.create_session(model) as session:
        session.eval(text[:10])
        hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.eval(text[10:])
        hook.remove()
        assert session.tokens == text[:10]
        assert torch.equal(session.eval(text[10:], logits="all"), fresh(model, text[:10], text[10:]))


@torch.no_grad()
def test_padding_leaves_states_alone(hybrid):
    """Rows of a batch with padding on either side give what each gives alone, bit for bit."""
    rows = [few_ids(n, seed) for seed, n in enumerate((4, 23, 11))]
    alone = [hybrid(torch.tensor([row])).logits[0] for row in rows]
    for left in (True, False):
        batch, mask = torch.randint(0, 256, (3, 23)), torch.zeros(3, 23, dtype=torch.long)
        for i, row in enumerate(rows):
            place = slice(23 - len(row), 23) if left else slice(len(row))
            batch[i, place], mask[i, place] = torch.tensor(row), 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = hybrid(batch, attention_mask=mask, position_ids=positions).logits
        for i, wanted in enumerate(alone):
            assert torch.equal(logits[i][mask[i].bool()], wanted)


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_whatever_is_done_to_sessions_that_share_a_pool(name, oracle):
    """Random evaluations, checkpoints, ways back and ends: results are those of fresh sessions, and nothing is lost."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf")
    pool, choose = own_pool(model), random.Random(1)
    sessions = [Session(model, pool, 500, rewind) for rewind in (0, 30, 500)]
    refused = gone_back = 0
    for step in range(250):
        i = choose.randrange(3)
        session, tokens = sessions[i], list(sessions[i].tokens)
        action = choose.choice(["eval", "eval", "eval", "checkpoint", "truncate", "truncate", "close"])
        if action == "eval" and len(tokens) < 400:
            some = choose.sample(sessions, choose.randint(1, 3))
            dl.eval_batch(some, [few_ids(choose.choice([1, 1, 5, 70]), step + j) for j in range(len(some))], None)
        elif action == "checkpoint":
            session.checkpoint()
        elif action == "truncate" and tokens:
            n = choose.choice([*session.sequence.checkpoints, choose.randrange(len(tokens)), max(0, len(tokens) - 20)])
            try:
                session.truncate(n)
                gone_back += 1
                assert session.tokens == tokens[:n]
            except dl.CannotRewind:
                refused += 1
                assert session.tokens == tokens
        elif action == "close" and step % 5 == 0:
            session.close()
            sessions[i] = Session(model, pool, 500, session.sequence.rewind)
        assert pool.used_bytes == sum(map(held_bytes, sessions))
        if step % 10 == 9 and session.n_past < 480:
            found = session.eval([3, 1, 4], logits="all")
            wanted = (
                fresh(model, session.tokens[:-3], [3, 1, 4]) if session.n_past > 3 else fresh_start(model, [3, 1, 4])
            )
            assert torch.equal(found, wanted)
    assert refused > 3
    assert gone_back > 10
    for session in sessions:
        session.close()
    assert pool.used_bytes == 0


def test_more_context_than_memory_is_refused(model, hybrid):
    for each in (model, hybrid):
        with pytest.raises(dl.OutOfPages, match="n_ctx is 1000000000000, which takes .* bytes of f16 cache"):
            dl.create_session(each, n_ctx=10**12)
