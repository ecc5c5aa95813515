"""What a session takes from others in place of evaluating it: the results are those of a session that evaluates all,
whatever was reused, given back or rendered anew."""

import dataclasses
import gc

import hf_twin
import pytest
import torch
from families import TINY
from test_embeddings import grid, picture
from test_fork import fresh
from test_graphs import counted
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch import ops
from dasllama_torch.cache import prefix
from dasllama_torch.cache.sequence import Sequence
from dasllama_torch.engine.scheduler import plan_windows

N_CTX = 512  # beyond what some of these files say
ROWS = 16  # of a page
KINDS = ["llama", "gemma3", "qwen35"]  # layers that see all, layers with a window, recurrent layers
HYBRIDS = ["qwen35", "qwen35moe", "qwen3next"]


@pytest.fixture
def load(oracle):
    return lambda name: dl.load_model(oracle / "tiny" / f"{name}.gguf")


@pytest.fixture(params=KINDS)
def model(request, load):
    return load(request.param)


def create(model, page_rows=ROWS, checkpoint_every=2, max_bytes=1 << 30, pool_bytes=None):
    pool = dl.create_kv_pool(model, page_rows, max_bytes=pool_bytes)
    return dl.create_prefix_cache(model, pool, max_bytes, checkpoint_every)


def opened(cache, n_ctx=N_CTX, **how):
    return dl.create_session(cache.model, n_ctx=n_ctx, prefix_cache=cache, **how)


def last(model, ids):
    return fresh(model, ids, 1)[0]


def page_bytes(cache):
    """Of all layers' pages for the same tokens."""
    return sum(group.page_bytes for group in cache.pool.groups)


@pytest.mark.parametrize("name", TINY)
def test_every_family(name, load):
    """The same prompt again, one with another end, both after everything was given back, and steps behind them."""
    model = load(name)
    cache = create(model)
    start, ends = text(1, 75), [text(2, 30), text(3, 41)]
    wanted = {tuple(end): last(model, start + end) for end in ends}
    held = []

    def check(end, reused):
        session = opened(cache)
        assert torch.equal(session.eval(start + end), wanted[tuple(end)])
        assert session.stats.reused_tokens == reused
        held.append(session)

    check(ends[0], 0)
    check(ends[0], 96)
    check(ends[1], 64)  # of 75 that are the same
    check(ends[1], 112)
    cache.clear()
    check(ends[1], 0)
    check(ends[1], 112)
    check(ends[0], 64)
    more = text(4, 20)
    found, steps = counted(lambda: torch.stack([held[1].eval([token]) for token in more]))
    assert steps["recorded"] >= 18
    assert torch.equal(found, fresh(model, start + ends[0] + more, 20))
    for session in held:
        session.close()
    assert cache.pool.used_bytes == cache.pool.spare_bytes == cache.used_bytes > 0
    cache.close()
    assert cache.pool.used_bytes == 0


def test_the_last_token_is_always_evaluated(model):
    """Its logits are wanted, also of a prompt that ends with a page that is kept."""
    with create(model) as cache:
        for n in (ROWS, 5 * ROWS, 5 * ROWS + 1, ROWS - 1, 1):
            ids = text(n, n)
            for _ in range(2):
                with opened(cache) as session:
                    assert torch.equal(session.eval(ids), last(model, ids))
            assert session.stats.reused_tokens == (n - 1) // ROWS * ROWS
            assert (session.stats.n_prompt, session.stats.prefilled_tokens) == (n, n - (n - 1) // ROWS * ROWS)


def test_replies_are_kept_too(model):
    """A page that single tokens have filled serves like one of a prompt."""
    with create(model) as cache, opened(cache) as first:
        said = [token for token, _ in first.generate(text(1, 40), max_tokens=100)]
        ids = text(1, 40) + said + [7]
        with opened(cache) as second:
            assert torch.equal(second.eval(ids), last(model, ids))
            # `said` ends with a token that was not evaluated. States are kept every second page.
            assert second.stats.reused_tokens == 128


def test_batches(model):
    """Prompts that begin alike, and one that does not, of sessions with a prefix cache and of one without."""
    prompts = [text(1, 100) + text(seed, n) for seed, n in ((2, 1), (3, 60), (4, 17))] + [text(5, 90)]
    wanted = [last(model, ids) for ids in prompts]
    with create(model) as cache:
        for reused in ([0] * 4, [96, 144, 112, 80]):
            sessions = [opened(cache) for _ in prompts] + [dl.create_session(model, n_ctx=N_CTX, pool=cache.pool)]
            found = dl.eval_batch(sessions, [*prompts, prompts[0]])
            assert all(map(torch.equal, found, [*wanted, wanted[0]]))
            assert [session.stats.reused_tokens for session in sessions[:-1]] == reused
            assert sessions[-1].stats.reused_tokens == 0
            found = dl.eval_batch(sessions, [[9]] * 5)
            assert all(map(torch.equal, found, [last(model, [*ids, 9]) for ids in [*prompts, prompts[0]]]))


@pytest.mark.parametrize("kv_dtype", ["f32", "q8_0", "tq4", ("q8_0", "tq4")])
def test_every_codec(model, kv_dtype):
    """Pages are shared as they are, and copied as they are."""
    pool, ids = dl.create_kv_pool(model, ROWS, kv_dtype), text(1, 100)
    with dl.create_prefix_cache(model, pool, checkpoint_every=1) as cache:
        for prompt, reused in ((ids, 0), (ids, 96), (ids[:70] + text(2, 30), 64)):
            with opened(cache) as session, dl.create_session(model, kv_dtype, N_CTX) as alone:
                assert torch.equal(session.eval(prompt), alone.eval(prompt))
                assert session.stats.reused_tokens == reused
                assert torch.equal(session.prefill([*prompt[:90], 7]), alone.prefill([*prompt[:90], 7]))


def test_all_logits_means_no_reuse(model):
    ids = text(1, 100)
    with create(model) as cache, opened(cache) as first, opened(cache) as second:
        first.eval(ids)
        assert torch.equal(second.eval(ids, logits="all"), fresh(model, ids, 100))


# ---- turns of a chat ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_a_second_turn_evaluates_only_its_own_tokens(model, cached):
    cache = create(model)
    session = opened(cache) if cached else dl.create_session(model, n_ctx=N_CTX)
    turns, ids = [text(1, 70), text(2, 33), text(3, 20)], []
    for turn in turns:
        ids += turn
        ids += [token for token, _ in session.generate(ids, max_tokens=12, whole=True)]
        # The last token of a reply was not evaluated.
        assert session.stats.prefilled_tokens == len(turn) + (turn is not turns[0])
        assert session.stats.n_prompt == len(ids) - 12
        assert session.stats.first_difference is None
    assert torch.equal(session.prefill([*ids, 5]), last(model, [*ids, 5]))


@pytest.mark.parametrize("stripped", [0, 1, 5, 20])
def test_a_history_that_is_rendered_differently(model, stripped):
    """The next prompt holds the reply without what it began with (thoughts), and other tokens for it: what is reused
    ends there, and the results are those of the new rendering."""
    with create(model) as cache, opened(cache) as session:
        prompt = text(1, 83)
        reply = [token for token, _ in session.generate(prompt, max_tokens=30, whole=True)]
        again = prompt + [(token + 1) % 256 for token in reply[stripped:]] + text(2, 25)
        assert torch.equal(session.prefill(again), last(model, again))
        assert session.tokens == again
        assert session.stats.first_difference == 83 + (again[83] == reply[0])
        assert 64 <= session.stats.reused_tokens <= 84
        assert torch.equal(session.prefill(again), last(model, again))
        assert session.stats.prefilled_tokens == 0


def test_first_difference(load):
    model = load("llama")
    ids = text(1, 100)

    def difference(prompt):
        with opened(cache) as session:
            session.eval(prompt)
            return session.stats.first_difference

    with create(model) as cache:
        assert difference(ids) is None  # nothing is kept
        assert difference(ids[:50]) is None  # nothing in it differs
        assert difference([*ids, 1, 2, 3]) is None  # what is kept ends before
        other = ids.copy()
        other[37] += 1
        assert difference(other) == 37
        assert difference(text(2, 10)) == 0
        with opened(cache) as session:
            session.eval(other)
            session.prefill(ids)  # the cache agrees longer than the session
            assert (session.stats.first_difference, session.stats.reused_tokens) == (None, 96)
            changed = [*ids[:90], 1, 2]
            session.prefill(changed)
            assert (session.stats.first_difference, session.stats.reused_tokens) == (90, 90)
            cache.clear()
            session.prefill([*ids[:70], 1, 2])
            assert (session.stats.first_difference, session.stats.reused_tokens) == (70, 70)


@pytest.mark.parametrize("name", KINDS)
def test_prefill_without_a_prefix_cache(name, load):
    """A session alone goes back as far as it must, at most to the beginning."""
    model, ids = load(name), text(1, 90)
    with dl.create_session(model, n_ctx=N_CTX) as session:
        session.prefill(ids[:40])
        session.checkpoint()  # keeps the window before it, and what follows
        recurrent = name == "qwen35"
        turns = (ids, 40), ([*ids[:60], 3, 4], 40 if recurrent else 60), ([*ids[:30], 5], 0 if recurrent else 30)
        for prompt, reused in turns:
            assert torch.equal(session.prefill(prompt), last(model, prompt))
            assert session.stats.reused_tokens == reused
        with pytest.raises(ValueError, match="no ids"):
            session.prefill([])
        with pytest.raises(dl.ContextFull, match="600 tokens exceed .* n_ctx=512"):
            session.prefill(text(2, 600))
        assert session.tokens == [*ids[:30], 5]


# ---- faults that others shipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
@pytest.mark.parametrize("cached", [False, True])
def test_no_state_is_left_behind_by_a_rewind(name, cached, load):
    """40 tokens, back to 25, others from there: not what a recurrent state that saw the 40 would say."""
    model, ids, more = load(name), text(1, 40), text(2, 17)
    with create(model, page_rows=8) as cache:
        session = opened(cache) if cached else dl.create_session(model, n_ctx=N_CTX)
        session.prefill(ids)
        found = session.prefill(ids[:25] + more)
        assert torch.equal(found, last(model, ids[:25] + more))
        if name in HYBRIDS:
            assert session.stats.reused_tokens == (16 if cached else 0)
            with pytest.raises(dl.CannotRewind, match="only to a checkpoint: 0"):
                session.truncate(25)
        else:
            assert session.stats.reused_tokens == 25


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_reuse_what_is_repeated(name, load):
    """With pages and spacing as they are by default, and prompts shorter than the spacing."""
    model = load(name)
    for n in (65, 100, 128, 300, 511):
        with create(model, page_rows=64, checkpoint_every=8) as cache:
            for reused in (0, (n - 1) // 64 * 64):
                with opened(cache) as session:
                    session.eval(text(1, n))
                    assert session.stats.reused_tokens == reused
                    assert cache.why_not() == ""


@pytest.mark.parametrize("length", [128, 129, 131, 139, 143])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 16, 17])
def test_a_hybrid_prompt_that_departs_before_an_entry_ends(length, before, load):
    """It goes on from the last boundary at which a state was kept: not from the entry's end, and not from nothing."""
    model = load("qwen35")
    with create(model, checkpoint_every=3) as cache:
        ids = text(1, length)
        with opened(cache) as session:
            session.eval(ids)
        changed = ids.copy()
        changed[-before] = (ids[-before] + 1) % 256
        with opened(cache) as session:
            assert torch.equal(session.eval(changed), last(model, changed))
            kept = [n for n in (48, 96, (length - 1) // ROWS * ROWS) if n <= length - before]
            assert session.stats.reused_tokens == kept[-1]
            assert session.stats.first_difference in (length - before, None)


def test_a_prefix_longer_than_pages_with_many_ends(model):
    """Six sessions at a time, whose ends are not confused with one another's nor with an earlier answer."""
    start = text(1, 300)
    with create(model, page_rows=64) as cache:
        with opened(cache) as session:
            session.eval(start)
        sessions = [opened(cache) for _ in range(6)]
        ends = [text(seed, 20 + seed) for seed in range(2, 8)]
        for session, end in zip(sessions, ends, strict=True):
            session.eval(start + end)
            assert session.stats.reused_tokens == 256
        for _ in range(3):
            for end in ends:
                end.append(len(end))
            found = dl.eval_batch(sessions, [end[-1:] for end in ends])
        for logits, end in zip(found, ends, strict=True):
            assert torch.equal(logits, last(model, start + end))


@pytest.mark.parametrize("digest", [lambda key, content: b"", lambda key, content: bytes([sum(content.ids) % 3])])
def test_digests_that_collide(model, digest, monkeypatch):
    """What a digest finds is compared before it is believed."""
    monkeypatch.setattr(prefix, "_digest", digest)
    with create(model) as cache:
        prompts = [text(1, 100), text(2, 100), text(1, 50) + text(3, 50), text(2, 100)]
        for ids in [*prompts, *prompts]:
            with opened(cache) as session:
                assert torch.equal(session.eval(ids), last(model, ids))
        assert session.stats.reused_tokens in (0, 16, 32, 48, 64, 80, 96)
        assert cache.held_groups() < 13  # more would be there if none collided


# ---- what is kept, and for how long ---------------------------------------------------------------------------------


def test_the_budget(model):
    """The least recently used goes first, from its end on; what sessions hold counts."""
    with create(model) as measure, opened(measure) as session:
        session.eval(text(1, 6 * ROWS))
        one = measure.used_bytes
    with create(model, max_bytes=2 * one) as cache:
        for seed in (1, 2, 1, 3):  # 2 is used less recently than 1
            with opened(cache) as session:
                session.eval(text(seed, 6 * ROWS))
            assert cache.used_bytes <= 2 * one
        reused = []
        for seed in (1, 3, 2):
            with opened(cache) as session:
                session.eval(text(seed, 6 * ROWS))
                reused.append(session.stats.reused_tokens)
        # A window's pages go one by one, those of the histories' beginnings first: there is room for the end of all.
        assert reused == [80, 80, 80 if cache.pool.groups[-1].window else 0]
    with create(model, max_bytes=one // 2) as cache, opened(cache) as session:
        session.eval(text(1, 6 * ROWS))
        assert 0 < cache.used_bytes <= one // 2
        with opened(cache) as again:
            assert torch.equal(again.eval(text(1, 6 * ROWS)), session.logits)
    with create(model, max_bytes=0) as cache, opened(cache) as session:
        session.eval(text(1, 6 * ROWS))
        assert (cache.used_bytes, cache.held_groups(), cache.chains()) == (0, 0, [])


def test_the_beginning_outlives_the_end(load):
    """A chain too long for the budget is kept from its beginning on: its end alone would be of no use."""
    model = load("llama")
    with create(model) as cache:
        cache = create(model, max_bytes=3 * page_bytes(cache))
        with opened(cache) as session:
            session.eval(text(1, 200))
        assert [chain.resume_points for chain in cache.chains()] == [(16, 32, 48)]


def test_windows_and_states_go_before_the_pages_that_lead_to_them(load):
    """They can be had again, and only the ones of the place where sessions go on are wanted."""
    for name in ("gemma3", "qwen35"):
        model = load(name)
        with create(model) as cache, opened(cache) as session:
            session.eval(text(1, 160))
            whole, points = cache.used_bytes, cache.chains()[0].resume_points
            cache = create(model, max_bytes=whole * 3 // 4)
            with opened(cache) as session:
                session.eval(text(1, 160))
            chain = cache.chains()[0]
            assert len(chain.ids) == 160
            assert chain.resume_points
            assert set(chain.resume_points) < set(points)
            assert chain.resume_points[-1] == 160


def test_sessions_go_before_the_prefix_cache(model):
    """A pool full of what is kept serves a session as an empty one would; what can never be served costs nothing."""
    ids, other = text(1, 150), text(2, 150)
    pool = dl.create_kv_pool(model, ROWS)
    room = Sequence(pool).bytes_for(0, 150) + pool.state_bytes
    with create(model, pool_bytes=room) as cache:
        for prompt in (ids, other, ids, other):
            with opened(cache) as session:
                assert torch.equal(session.eval(prompt), last(model, prompt))
                used = cache.used_bytes, cache.pool.used_bytes
                with opened(cache) as refused, pytest.raises(dl.OutOfPages):
                    refused.eval(text(3, 400))
                assert (cache.used_bytes, cache.pool.used_bytes) == used
            assert cache.pool.used_bytes <= room
            assert cache.used_bytes > 0


def test_a_refused_prompt_leaves_the_session_empty(load):
    model = load("llama")
    with create(model, pool_bytes=1 << 16) as cache:
        with opened(cache) as session:
            session.eval(text(1, 60))
        for more, error in ((400, dl.OutOfPages), (500, dl.ContextFull)):
            with opened(cache) as session:
                with pytest.raises(error):
                    session.eval(text(1, 60) + text(2, more))
                assert (session.n_past, session.sequence.length) == (0, 0)
        with opened(cache) as session:
            with pytest.raises(ValueError, match="outside the vocabulary"):
                session.eval([*text(1, 60), 999])
            assert torch.equal(session.eval(text(1, 60)), last(model, text(1, 60)))
            assert session.stats.reused_tokens == 48


def test_who_holds_what(model):
    """Sessions give back what they hold, the prefix cache what it keeps, in any order and by any way."""
    cache = create(model)
    pool = cache.pool
    first, second = opened(cache), opened(cache)
    first.eval(text(1, 100))
    held = pool.used_bytes
    assert dl.prefix_attach(second, text(1, 100)) == 96
    assert pool.used_bytes == held
    fork = dl.fork(second)
    assert fork.prefix_cache is cache
    first.close()
    del second
    gc.collect()
    cache.clear()
    assert cache.used_bytes == 0
    assert pool.used_bytes > 0  # the fork's
    assert torch.equal(fork.eval(text(1, 140)[96:]), last(model, text(1, 140)))
    assert cache.held_groups() == 8  # what the fork holds has come back
    del cache, fork, first
    gc.collect()
    assert pool.used_bytes == 0
    assert pool.prefix_tree is None


def test_a_session_that_goes_back_into_a_kept_page_leaves_it_as_it_is(load):
    model, ids = load("llama"), text(1, 64)
    with create(model) as cache:
        with opened(cache) as session:
            session.eval(ids)
            session.truncate(40)
            session.eval(text(2, 24))
        for prompt in (ids, ids[:40] + text(2, 24)):
            with opened(cache) as session:
                assert torch.equal(session.eval(prompt), last(model, prompt))
                assert session.stats.reused_tokens == 48


def test_explicit_verbs(load):
    model = load("llama")
    cache = create(model)
    with opened(cache) as session:
        session.eval(text(1, 70))
        dl.prefix_release(cache)
        assert dl.prefix_held_groups(cache) == 0
        dl.prefix_insert(session)
        assert dl.prefix_held_groups(cache) == 4
    for end in (text(2, 40), text(3, 5)):
        with opened(cache) as session:
            session.eval(text(1, 64) + end)
    (chain,) = dl.prefix_chain_list(cache)
    assert chain.ids == tuple(text(1, 64) + text(2, 40)[:32])
    assert (chain.hits, chain.resume_points) == (2, (16, 32, 48, 64, 80, 96))
    cache.close()
    with opened_without(model, cache) as session:
        assert torch.equal(session.eval(text(1, 70)), last(model, text(1, 70)))  # without
        assert cache.why_not() == "the prefix cache is closed"
        for call in (lambda: dl.prefix_attach(session, [1]), lambda: dl.prefix_insert(session)):
            with pytest.raises(dl.DasllamaError, match="closed"):
                call()
    cache.close()


def opened_without(model, cache):
    return dl.create_session(model, n_ctx=N_CTX, prefix_cache=cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, c: dl.create_prefix_cache(m, c.pool), "has a prefix cache already"),
        (lambda m, c: create(m, max_bytes=-1), "max_bytes is -1"),
        (lambda m, c: create(m, checkpoint_every=0), "checkpoint_every is 0"),
        (lambda m, c: opened(c, pool=dl.create_kv_pool(m)), "another pool"),
        (lambda m, c: opened(c, kv_dtype="f32"), "'f32', and the pool's 'f16'"),
        (lambda m, c: dl.create_session(None, n_ctx=9, prefix_cache=c), "another model's"),
        (lambda m, c: dl.prefix_attach(dl.create_session(m), [1]), "has no prefix cache"),
        (lambda m, c: c.attach(dl.create_session(m), [1]), "none of this prefix cache"),
        (lambda m, c: c.insert(dl.create_session(m)), "none of this prefix cache"),
        (lambda m, c: attach_twice(c), "an empty session, found one of 1 tokens"),
    ],
)
def test_wrong_calls_are_refused(load, call, message):
    model = load("llama")
    with create(model) as cache, pytest.raises(ValueError, match=message):
        call(model, cache)


def attach_twice(cache):
    session = opened(cache)
    session.eval([1])
    cache.attach(session, [1, 2])


# ---- pictures and sound ---------------------------------------------------------------------------------------------


def conversation(model, name, seed):
    """Text, 40 rows that stand for a picture or for sound, text. The rows of gemma3 see each other, those of qwen2vl
    have positions on three axes."""
    rows = picture(model, 40, seed)
    media = {
        "llama": dl.Embeddings(rows),
        "gemma3": dl.Embeddings(rows, causal=False),
        "qwen2vl": dl.Embeddings(rows, positions=grid(5, 8)),
        "qwen35": dl.Embeddings(rows),
    }
    return [*text(1, 37), media[name], *text(2, 60)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "qwen35"])
def test_another_picture_in_the_same_prompt(name, load):
    """All pictures look alike among ids. Only what they were made from tells them apart; reuse ends in none of them."""
    model = load(name)
    wanted = [dl.create_session(model, n_ctx=N_CTX).prefill(conversation(model, name, seed)) for seed in (1, 2)]
    assert not torch.equal(*wanted)
    with create(model, checkpoint_every=1) as cache:
        for seed, reused, difference in ((1, 0, None), (2, 32, 37), (1, 128, None), (2, 128, None)):
            with opened(cache) as session:
                found = session.prefill(conversation(model, name, seed))
                assert torch.equal(found, wanted[seed - 1])
                assert (session.stats.reused_tokens, session.stats.first_difference) == (reused, difference)
                assert session.stats.n_prompt == session.n_past == 137
                (span,) = session.spans
                assert (span.start, span.stop) == (37, 77)
        prompt = conversation(model, name, 1)
        for parts, reused in ((prompt[:38], 32), (prompt[:40], 32), (prompt[:41], 32), ([*prompt[:44], 0], 80)):
            with opened(cache) as session, dl.create_session(model, n_ctx=N_CTX) as alone:
                assert torch.equal(session.prefill(parts), alone.prefill(parts))
                assert session.stats.reused_tokens == reused


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl"])
def test_a_chat_about_pictures(name, load):
    """Its next turn evaluates its own tokens, and the picture no more; another picture is not taken for the first."""
    model = load(name)
    prompt = conversation(model, name, 1)
    with create(model) as cache:
        for session in (opened(cache), dl.create_session(model, n_ctx=N_CTX)):
            reply = [token for token, _ in session.generate(prompt, max_tokens=9, whole=True)]
            turn = [*prompt, *reply, *text(3, 20), conversation(model, name, 2)[37], 5]
            found = session.prefill(turn)
            assert session.stats.prefilled_tokens == 1 + 20 + 40 + 1
            assert torch.equal(found, dl.create_session(model, n_ctx=N_CTX).prefill(turn))
            changed = [*turn[:37], conversation(model, name, 2)[37], *turn[38:]]
            found = session.prefill(changed)
            assert session.stats.first_difference == 37
            assert session.stats.reused_tokens <= 37
            assert torch.equal(found, dl.create_session(model, n_ctx=N_CTX).prefill(changed))
            found = session.prefill(changed[:38])  # ends with the picture, whose last row is not evaluated alone
            assert session.stats.reused_tokens <= 37
            assert torch.equal(found, dl.create_session(model, n_ctx=N_CTX).prefill(changed[:38]))
            session.close()


def test_rows_that_nothing_tells_apart_are_never_reused(load):
    """Placeholders without the digest of what they stand for: in the request, and in what was evaluated."""
    model = load("llama")
    prompt = conversation(model, "llama", 1)
    ids, known = [*text(1, 37), *[-1] * 40, *text(2, 60)], prompt[37].span(37)
    unknown = dataclasses.replace(known, digest=b"")
    with create(model) as cache, opened(cache) as session:
        session.prefill(prompt)
        with opened(cache) as other:
            assert dl.prefix_attach(other, ids) == 32
        for span, length in ((unknown, 32), (known, 128)):
            assert cache._tree.find(b"", ids, [span]).length == length
        cache.clear()
        session.set_spans([unknown])
        dl.prefix_insert(session)
        assert [len(chain.ids) for chain in cache.chains()] == [32]


# ---- what must not be reused ----------------------------------------------------------------------------------------


def test_what_hooks_have_changed_is_neither_kept_nor_reused(model):
    ids = text(1, 100)
    with create(model) as cache:
        with opened(cache) as session:
            session.eval(ids)
        steered, mixed = opened(cache), opened(cache)
        mixed.eval(text(3, 20))
        hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
        wanted = last(model, ids)
        assert "a hook of model.layers.0" in cache.why_not()
        assert torch.equal(steered.eval(ids), wanted)
        mixed.eval(text(4, 20))
        hook.remove()
        assert not torch.equal(wanted, last(model, ids))
        assert cache.why_not() == ""
        for each in (steered, mixed):
            each.eval([1] * 40)
            dl.prefix_insert(each)
        assert cache.held_groups() == 7  # what was there before
        with opened(cache) as session:
            assert torch.equal(session.eval(ids), last(model, ids))
            assert session.stats.reused_tokens == 96
        steered.truncate(0)
        steered.eval(ids)
        assert steered.stats.reused_tokens == 96
        with ops.use_reference():
            assert "dispatch mode" in cache.why_not()
            with opened(cache) as session:
                session.eval(ids)
                assert session.stats.reused_tokens == 0


def change_a_number(model):
    model.model.layers[0].self_attn.attn.scale *= 2


def change_a_weight(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2, requires_grad=False)


def change_a_module(model):
    model.model.layers[0].mlp = model.model.layers[1].mlp


@pytest.mark.parametrize("change", [change_a_number, change_a_weight, change_a_module])
def test_a_changed_model_empties_it(load, change):
    model, ids = load("llama"), text(1, 100)
    with create(model) as cache, opened(cache) as session:
        before = session.eval(ids)
        load("qwen2").half()  # another model's changes are none of its own
        with opened(cache) as other:
            other.eval(ids)
            assert other.stats.reused_tokens == 96
        change(model)
        with opened(cache) as other:
            found = other.eval(ids)
            assert torch.equal(found, last(model, ids))
            assert not torch.equal(found, before)
            assert other.stats.reused_tokens == 0
            session.eval(text(2, 100))  # has seen both
            assert max(len(chain.ids) for chain in cache.chains()) == 96


def test_contexts_with_other_frequencies_do_not_mix(load):
    """LongRoPE: keys depend on what the session may come to hold."""
    model, ids = load("phi3_longrope"), text(1, 60)
    original = model.config.layers[0].rope.long.original_context
    with create(model) as cache:
        for n_ctx, reused in ((N_CTX, 0), (original, 0), (N_CTX, 48), (original, 48)):
            with opened(cache, n_ctx) as session, dl.create_session(model, n_ctx=n_ctx) as alone:
                assert torch.equal(session.eval(ids), alone.eval(ids))
                assert session.stats.reused_tokens == reused


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_windows_end_at_marks():
    windows = plan_windows([9, 2, 5], 8, marks={0: [3, 8], 2: [5]})
    assert [[(c.index, c.start, c.stop, c.last, c.marked) for c in w] for w in windows] == [
        [(0, 0, 3, False, True)],
        [(0, 3, 8, False, True)],
        [(0, 8, 9, True, False), (1, 0, 2, True, False), (2, 0, 5, True, True)],
    ]
    # Rows that see each other stay together.
    windows = plan_windows([10], 8, {0: (2, 9)}, {0: [1, 4, 8, 9]})
    assert [[(c.start, c.stop, c.marked) for c in w] for w in windows] == [
        [(0, 1, True)],
        [(1, 9, True)],
        [(9, 10, False)],
    ]
    # A mark at the end of a sequence does not keep others out of its window.
    assert [len(window) for window in plan_windows([1] * 8, 8, marks={i: [1] for i in range(0, 8, 2)})] == [8]


def test_where_states_are_kept(load):
    cache = create(load("qwen35"), checkpoint_every=3)
    marks = cache._tree.marks
    assert marks(0, 100) == [48, 96]
    assert marks(0, 112) == [48, 96, 112]
    assert marks(0, 130) == [48, 96, 128]
    assert marks(0, 16) == [16]
    assert marks(0, 15) == []
    assert marks(100, 130) == [128]
    assert marks(100, 113) == [112]
    assert [n for n in range(200) if marks(n, n + 1)] == [47, 95, 143, 191]  # single tokens
    assert create(load("gemma3"))._tree.marks(0, 1000) == []


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return dl.load_model(hf_twin.make("gemma3", tmp_path_factory.mktemp("twin")).path)


def test_a_prompt_of_several_forwards(twin):
    """Windows leave pages behind while a prompt is evaluated: they are kept before they go."""
    ids = text(1, 1300)
    with create(twin, page_rows=64) as cache:
        with opened(cache, 2000) as session:
            wanted = session.eval(ids)
        (chain,) = cache.chains()
        assert chain.resume_points == tuple(range(64, 1300, 64))
        for n, reused in ((1300, 1280), (700, 640), (64, 0), (65, 64)):
            with opened(cache, 2000) as session:
                found = session.eval(ids[:n])
                assert session.stats.reused_tokens == reused
                assert torch.equal(found, wanted if n == 1300 else last(twin, ids[:n]) if n < 512 else found)
