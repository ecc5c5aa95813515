"""Windowed pages and rewinding: the memory of local layers stays bounded, and going back is exact or refused."""

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
    return KVPool([layer.cache for layer in model.config.layers], "f16", max_bytes, "cpu")


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
    assert session.sequence.held_bytes == 0


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
