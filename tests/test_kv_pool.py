"""Who holds which page: thousands of random operations over sessions that share a pool and a prefix cache, against a
model of them that counts nothing and looks everything up; and a pool's own limits."""

import functools
import itertools
import os
from collections import Counter
from types import SimpleNamespace

import hf_twin
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import nn

import dasllama_torch as dl
from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.cache.pool import KVPool, PagedKV, RecurrentState
from dasllama_torch.cache.sequence import Sequence
from dasllama_torch.config import CacheSpec, StateSpec
from dasllama_torch.engine import runner
from dasllama_torch.engine.prefix_cache import PrefixCache
from dasllama_torch.engine.scheduler import plan_windows
from dasllama_torch.engine.session import Session

N_SESSIONS, N_CTX, N_VOCAB = 16, 80, 1000
ROWS = 4  # of a page
MAX_ROWS = 6  # of a forward, so that batches take several
FULL = CacheSpec(n_kv_heads=1, k_dim=1, v_dim=1)
LOCAL, NARROW = (CacheSpec(n_kv_heads=1, k_dim=2, v_dim=1, window=window) for window in (9, 2))
STATE = StateSpec(conv_taps=2, conv_channels=1, n_heads=1, k_dim=3, v_dim=1)
REWINDS = 0, 0, 5, N_CTX  # of the sessions in turn


class Scribe(nn.Module):
    """A model that keeps a token's id where others keep its keys, and a hash of all ids where others have a state."""

    config = SimpleNamespace(n_vocab=N_VOCAB, layers=())

    def forward(self, input_ids, step):
        ids = input_ids[0].numpy()
        for layer in step.cache:
            if isinstance(layer, PagedKV):
                page, row = np.divmod(step.tables[layer.group].slots.numpy(), step.cache.page_rows)
                layer.k.numpy()[page, 0, row] = ids[:, None]
                layer.v.numpy()[page, 0, row] = -ids[:, None]
            elif isinstance(layer, RecurrentState):
                for slot, token in zip(step.state_slots.tolist(), ids.tolist(), strict=True):
                    layer.conv[slot] = token
                    layer.delta[slot] = hashed(layer.delta[slot, 0, 0, 0].item(), token)
        return SimpleNamespace(logits=torch.zeros(1, len(step.logit_rows), N_VOCAB))

    def get_input_embeddings(self):
        return nn.Identity()

    def get_decoder(self):
        return lambda ids, step: self(ids, step).logits


def hashed(value, token):
    return (31 * value + token + 1) % 65521


def agreed(ids, others):
    """How many of the first are the same."""
    return len(os.path.commonprefix([ids, others]))


class Stream:
    """What one session should hold: tokens, a page (any object) for each block of each group, a state, checkpoints."""

    def __init__(self, pool, rewind):
        self.pool, self.rewind = pool, rewind
        self.tokens, self.pages = [], [[] for _ in pool.groups]
        self.state, self.marks = None, {}

    def copy(self):
        other = Stream(self.pool, self.rewind)
        other.tokens, other.pages = self.tokens.copy(), [pages.copy() for pages in self.pages]
        other.state, other.marks = self.state, self.marks.copy()
        return other

    def states(self):
        return [state for state in (self.state, *self.marks.values()) if state is not None]

    def write(self, ids, holders):
        """holders: of every page and state there is."""
        if len(self.tokens) % ROWS:
            for pages in self.pages:
                if holders[pages[-1]] > 1:
                    pages[-1] = object()
        self.tokens += ids
        for pages in self.pages:
            while len(pages) * ROWS < len(self.tokens):
                pages.append(object())
        if self.pool.states and (self.state is None or holders[self.state] > 1):
            self.state = object()

    def forget(self):
        """Lose the pages that nobody can come to see."""
        n = min(len(self.tokens) - self.rewind, len(self.tokens), *self.marks, N_CTX)
        for group, pages in zip(self.pool.groups, self.pages, strict=True):
            for block in range(len(pages)):
                if group.window and (block + 1) * ROWS <= n - group.window + 1:
                    pages[block] = None

    def reaches(self, n):
        """Whether it can go back to n."""
        if self.pool.states and n != len(self.tokens) and n not in (0, *self.marks):
            return False
        return all(
            pages[position // ROWS] is not None
            for group, pages in zip(self.pool.groups, self.pages, strict=True)
            for position in range(max(0, n - group.window + 1) if group.window else 0, n)
        )

    def truncate(self, n):
        if n < len(self.tokens):
            self.state = self.marks.get(n)
        self.marks = {mark: state for mark, state in self.marks.items() if mark <= n}
        del self.tokens[n:]
        for pages in self.pages:
            del pages[-(-n // ROWS) :]


def holders(streams):
    """How many hold each page and state."""
    held = (each for stream in streams for each in itertools.chain(*stream.pages, stream.states()) if each is not None)
    return Counter(held)


def nbytes(pool, streams):
    pages = sum(
        group.page_bytes * len({page for stream in streams for page in stream.pages[g]} - {None})
        for g, group in enumerate(pool.groups)
    )
    return pages + pool.state_bytes * len({state for stream in streams for state in stream.states()})


class Pool(RuleBasedStateMachine):
    """Random operations on `N_SESSIONS` sessions; `done` counts them, and what was refused.

    Most sessions have a prefix cache. It must not show: sessions get the memory that they would have without it.
    """

    layers: list  # of the model
    done: Counter = Counter()
    which = st.integers(0, N_SESSIONS - 1)

    @initialize(
        room=st.sampled_from([20_000, 2345, 20_000, 1000]),
        share=st.sampled_from([1, 0.2, 1, 0]),
        every=st.integers(1, 3),
    )
    def start(self, room, share, every):
        self.model, self.pool = Scribe(), KVPool(self.layers, "f32", room, "cpu", ROWS)
        self.cache = PrefixCache(self.model, self.pool, int(room * share), every)
        self.sessions, self.streams = [None] * N_SESSIONS, [None] * N_SESSIONS
        for i in range(N_SESSIONS):
            self.open(i)
        self.next_id = 0
        self.said = [[]]  # by sessions of the cache
        self.evicted = 0
        self.cache._tree.evict = self.count_evictions(self.cache._tree.evict)

    def count_evictions(self, evict):
        def counted():
            self.evicted += 1
            return evict()

        return counted

    def open(self, i):
        rewind = REWINDS[i % len(REWINDS)]
        cache = self.cache if i % 5 else None
        self.sessions[i] = Session(self.model, self.pool, N_CTX, rewind, cache)
        self.streams[i] = Stream(self.pool, rewind)

    def ids(self, n):
        self.next_id += n
        return [(7 * i) % N_VOCAB for i in range(self.next_id - n, self.next_id)]

    @rule(i=which, n=st.integers(1, 40))
    def prefill(self, i, n):
        self.eval({i: n})

    @rule(those=st.sets(which, min_size=1, max_size=N_SESSIONS))
    def decode(self, those):
        self.eval(dict.fromkeys(those, 1))

    @rule(batch=st.dictionaries(which, st.integers(1, 20), min_size=2, max_size=5))
    def eval(self, batch):
        """batch: how many tokens at the end of which session."""
        self.done["eval"] += 1
        self.eval_ids({i: self.ids(n) for i, n in batch.items()})

    def eval_ids(self, batch):
        sessions = [self.sessions[i] for i in batch]
        texts = [self.sessions[i].pending + ids for i, ids in batch.items()]
        if any(session.n_past + len(ids) > N_CTX for session, ids in zip(sessions, texts, strict=True)):
            with pytest.raises(dl.ContextFull):
                dl.eval_batch(sessions, list(batch.values()), "all")
            return
        streams, most = [stream.copy() for stream in self.streams], 0
        marks = {
            k: self.cache.marks(session, len(ids))
            for k, (session, ids) in enumerate(zip(sessions, texts, strict=True))
            if session.prefix_cache
        }
        for window in plan_windows(list(map(len, texts)), MAX_ROWS, marks=marks):
            chunks = [(streams[list(batch)[c.index]], texts[c.index][c.start : c.stop]) for c in window]
            for stream, ids in chunks:
                stream.write(ids, holders(streams))
            most = max(most, nbytes(self.pool, streams))
            for stream, _ in chunks:
                stream.forget()
        if self.fits(most, lambda: dl.eval_batch(sessions, list(batch.values()), "all")):
            self.streams = streams
            self.said += [session.tokens.copy() for session in sessions if session.prefix_cache]

    def fits(self, most, call):
        """Whether a call for which sessions must hold so many bytes is done; one byte less, and it must not be."""
        room = self.pool.max_bytes
        if most > self.pool.used_bytes - self.pool.spare_bytes:
            self.pool.max_bytes = min(room, most - 1)
            with pytest.raises(dl.OutOfPages):
                call()
        # Not a byte more empties the prefix cache, so there sometimes are.
        self.pool.max_bytes = room if self.next_id % 4 else min(room, most)
        if most <= room:
            call()
        self.done["out of pages"] += most > room
        self.pool.max_bytes = room
        return most <= room

    @rule(i=which, further=st.integers(1, N_SESSIONS - 1))
    def fork(self, i, further):
        self.done["fork"] += 1
        into = (i + further) % N_SESSIONS
        self.sessions[into].close()
        self.sessions[into], self.streams[into] = dl.fork(self.sessions[i]), self.streams[i].copy()

    @rule(i=which, skip=st.integers(0, 2))
    def truncate_to_a_checkpoint(self, i, skip):
        marks = [0, *self.streams[i].marks]
        self.truncate(i, self.sessions[i].n_past - marks[max(0, len(marks) - 1 - skip)])

    @rule(i=which, back=st.sampled_from([0, 1, 2, 3, 4, 5, 9, 20, N_CTX]))
    def truncate(self, i, back):
        self.done["truncate"] += 1
        session, stream = self.sessions[i], self.streams[i]
        n = max(0, session.n_past - back)
        if stream.reaches(n):
            session.truncate(n)
            stream.truncate(n)
        else:
            self.done["cannot rewind"] += 1
            with pytest.raises(dl.CannotRewind):
                session.truncate(n)

    @rule(i=which, keep=st.sampled_from([0, 1, 6, 30]), n=st.integers(1, 40))
    def shift(self, i, keep, n):
        """What is left to be evaluated anew waits for whatever is done next."""
        session, stream = self.sessions[i], self.streams[i]
        if held := session.tokens + session.pending:
            self.done["shift"] += 1
            keep = session.keep = min(keep, len(held) - 1)
            n = min(n, len(held) - keep)
            start = next(k for k in range(min(keep, session.n_past), -1, -1) if stream.reaches(k))
            session.shift(n)
            stream.truncate(start)
            assert session.pending == held[start:keep] + held[keep + n :]

    @rule(i=which)
    def checkpoint(self, i):
        self.done["checkpoint"] += 1
        session, stream = self.sessions[i], self.streams[i]
        is_new = session.n_past and session.n_past not in stream.marks
        most = nbytes(self.pool, self.streams) + (self.pool.state_bytes if is_new else 0)
        if self.fits(most, session.checkpoint) and is_new:
            stream.marks[session.n_past] = object() if self.pool.states else None

    @rule(i=which)
    def close(self, i):
        self.done["close"] += 1
        self.sessions[i].close()
        self.open(i)

    @rule(i=which, source=st.integers(1, 30), n=st.sampled_from([N_CTX, 33, 12, 4]))
    def repeat(self, i, source, n):
        """Evaluate again what was said, without reuse."""
        self.close(i)
        if ids := self.said[-source % len(self.said)][:n]:
            self.eval_ids({i: ids})

    @rule(i=which)
    def insert(self, i):
        if self.sessions[i].prefix_cache:
            self.done["insert"] += 1
            dl.prefix_insert(self.sessions[i])

    @rule(i=which, source=st.integers(1, 30), n=st.sampled_from([N_CTX, 33, 12, 4]), tail=st.integers(0, 10))
    def attach(self, i, source, n, tail):
        self.close(i)
        session, ids = self.sessions[i], self.prompt(source, n, tail)
        if session.prefix_cache:
            used, wanted = self.pool.used_bytes, self.longest_kept(ids)
            assert dl.prefix_attach(session, ids) == session.stats.reused_tokens == wanted
            assert session.tokens == ids[:wanted]
            assert self.pool.used_bytes == used
            self.follow(i)
            self.done["attach"] += 1
            self.done["attached"] += wanted > 0

    @rule(i=which, source=st.integers(1, 30), n=st.sampled_from([N_CTX, 33, 12, 4]), tail=st.integers(0, 40))
    def turn(self, i, source, n, tail):
        """Of a prompt that may go on from what the session holds, from what is kept, from both or from neither."""
        session, ids = self.sessions[i], self.prompt(source, n, tail)
        common = agreed(ids, session.tokens)
        own = next(k for k in range(min(common, len(ids) - 1), -1, -1) if self.streams[i].reaches(k))
        if ids == session.tokens and session.logits is not None:
            own = len(ids)
        wanted = max(own, self.longest_kept(ids) if session.prefix_cache else 0)
        try:
            session.prefill(ids)
            assert session.tokens == ids
            assert session.stats.reused_tokens == wanted
        except dl.OutOfPages:
            assert session.tokens == ids[:wanted]
        self.streams[i].marks = {k: state for k, state in self.streams[i].marks.items() if k <= own == wanted}
        self.follow(i)
        self.said += [session.tokens.copy()] * bool(session.prefix_cache)
        self.done["turn"] += 1

    def prompt(self, source, n, tail):
        return (self.said[-source % len(self.said)][:n] + self.ids(tail))[:N_CTX] or self.ids(1)

    def follow(self, i):
        """The stream holds what its session does; the invariants tell whether it may."""
        pages, states = {}, {}  # of the others
        for k, (session, stream) in enumerate(zip(self.sessions, self.streams, strict=True)):
            if k != i:
                for g, table in enumerate(session.sequence.tables):
                    pages.update(((g, page), each) for page, each in zip(table, stream.pages[g], strict=True))
                states[session.sequence.state] = stream.state
            for mark, slot in session.sequence.checkpoints.items():
                states[slot] = stream.marks[mark]
        sequence, stream = self.sessions[i].sequence, self.streams[i]
        stream.tokens = self.sessions[i].tokens.copy()
        stream.pages = [
            [None if page < 0 else pages.setdefault((g, page), object()) for page in table]
            for g, table in enumerate(sequence.tables)
        ]
        stream.state = None if sequence.state < 0 else states.setdefault(sequence.state, object())

    def kept(self):
        """History -> what the cache keeps of its last page."""
        found = {}
        for block in self.cache._tree._blocks.values():
            ids, at = (), block
            while at.parent:
                ids, at = at.content.ids + ids, at.parent
            found[ids] = block
        return found

    def longest_kept(self, ids):
        """How much of a prompt an attach should take."""
        kept = self.kept()

        def resumes(n):
            return (not self.pool.states or kept[tuple(ids[:n])].state >= 0) and all(
                kept[tuple(ids[: (position // ROWS + 1) * ROWS])].pages[g] >= 0
                for g, group in enumerate(self.pool.groups)
                for position in range(max(0, n - group.window + 1) if group.window else 0, n)
            )

        ends = [n for n in range(ROWS, len(ids), ROWS) if tuple(ids[:n]) in kept]
        found = max((n for n in ends if resumes(n)), default=0)
        if not self.evicted:
            step = ROWS * (self.cache._tree.state_every if self.pool.states else 1)
            for said in self.said:
                assert found >= min(agreed(ids, said), len(ids) - 1) // step * step
        return found

    @invariant()
    def what_is_kept_is_what_was_said(self):
        tree, kept = self.cache._tree, self.kept()
        used = self.pool.state_bytes * sum(block.state >= 0 for block in kept.values())
        for g, group in enumerate(self.pool.groups):
            found = {block.pages[g]: ids[-ROWS:] for ids, block in kept.items() if block.pages[g] >= 0}
            used += group.page_bytes * len(found)
            pages, ids = np.array([*found], int), np.array([*found.values()]).reshape(-1, ROWS, 1)
            for layer in (layer for layer in self.pool if isinstance(layer, PagedKV) and layer.group == g):
                assert (layer.k.numpy()[pages, 0] == ids).all()
                assert (layer.v.numpy()[pages, 0] == -ids).all()
        for layer in (layer for layer in self.pool if isinstance(layer, RecurrentState)):
            for ids, block in kept.items():
                if block.state >= 0:
                    assert (layer.delta.numpy()[block.state] == functools.reduce(hashed, ids, 0)).all()
                    assert (layer.conv.numpy()[block.state] == ids[-1]).all()
        assert used == tree.used_bytes <= tree.max_bytes

    @invariant()
    def every_page_has_its_holders(self):
        assert self.pool.used_bytes <= self.pool.max_bytes
        assert self.pool.used_bytes - self.pool.spare_bytes == nbytes(self.pool, self.streams)
        wanted = holders(self.streams)
        for g, group in enumerate(self.pool.groups):
            pairs = set()
            for session, stream in zip(self.sessions, self.streams, strict=True):
                found = [None if page < 0 else page for page in session.sequence.tables[g]]
                pairs.update(zip(found, stream.pages[g], strict=True))
            self.match(group.pages, pairs - {(None, None)}, wanted)
        if self.pool.states:
            pairs = set()
            for session, stream in zip(self.sessions, self.streams, strict=True):
                sequence = session.sequence
                assert list(sequence.checkpoints) == list(stream.marks)
                pairs.add((None if sequence.state < 0 else sequence.state, stream.state))
                pairs.update(zip(sequence.checkpoints.values(), stream.marks.values(), strict=True))
            self.match(self.pool.states, pairs - {(None, None)}, wanted)

    def match(self, allocator, pairs, wanted):
        """One number for each object, and for each object one number, with as many holders."""
        assert len(pairs) == len({page for page, _ in pairs}) == len({each for _, each in pairs})
        assert len(pairs) == allocator.in_use - allocator.spare
        for page, each in pairs:
            assert allocator.holders(page) == wanted[each]

    @invariant()
    def every_session_finds_what_it_wrote(self):
        for session, stream in zip(self.sessions, self.streams, strict=True):
            assert session.tokens == stream.tokens
            n, tables = session.n_past, [np.array(table, int) for table in session.sequence.tables]
            for layer in self.pool:
                if isinstance(layer, PagedKV):
                    table = tables[layer.group]
                    live = (table >= 0).repeat(ROWS)[:n]
                    for memory, sign in ((layer.k, 1), (layer.v, -1)):
                        found = memory.numpy()[table, 0].reshape(-1, memory.shape[-1])[:n]
                        assert (found[live] == sign * np.array(session.tokens, int)[live, None]).all()
                elif n:
                    value = 0
                    for i, token in enumerate(session.tokens, 1):
                        value = hashed(value, token)
                        if i in session.sequence.checkpoints:
                            slot = session.sequence.checkpoints[i]
                            assert (layer.delta[slot] == value).all()
                            assert (layer.conv[slot] == token).all()
                    assert (layer.delta[session.sequence.state] == value).all()

    def teardown(self):
        for session in self.sessions:
            session.close()
        assert self.pool.used_bytes == self.pool.spare_bytes == self.cache.used_bytes
        self.cache.close()
        assert self.pool.used_bytes == self.pool.spare_bytes == 0
        for pages in (*(group.pages for group in self.pool.groups), self.pool.states):
            if pages:
                assert sorted(pages.take(pages.capacity)) == list(range(pages.capacity))


@pytest.mark.parametrize("layers", [[LOCAL, FULL, NARROW], [STATE, FULL], [LOCAL, STATE, FULL, STATE]], ids=len)
def test_whatever_is_done_to_many_sessions(layers, monkeypatch):
    """10,000 operations: the pages are those of the model, with as many holders, and hold what was written."""
    monkeypatch.setattr(runner, "MAX_ROWS", MAX_ROWS)
    monkeypatch.setattr(Pool, "layers", layers, raising=False)
    monkeypatch.setattr(Pool, "done", Counter())
    monkeypatch.setattr(PrefixCache, "_state", lambda cache: 0)  # which takes modules of the package only
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    few = settings(max_examples=31, stateful_step_count=150, deadline=None, suppress_health_check=health)
    run_state_machine_as_test(Pool, settings=few)
    kinds = "eval", "fork", "truncate", "shift", "checkpoint", "close", "insert", "attach", "turn"
    assert sum(map(Pool.done.get, kinds)) >= 3334
    assert min(map(Pool.done.get, (*kinds, "out of pages", "cannot rewind", "attached"))) > 0


def test_backing_comes_before_pages_go_out():
    """Where memory has to be put behind pages: those that are handed out, and none of them if it fails."""
    pages, backed = PageAllocator(5), []
    pages.backing.append(backed.append)
    first = pages.take(3)
    pages.give_back(first[1:])
    assert (backed, pages.in_use) == (first, 1)

    def fail(page):
        raise dl.OutOfPages("no memory")

    pages.backing.append(fail)
    with pytest.raises(dl.OutOfPages, match="no memory"):
        pages.take(4)
    assert pages.in_use == 1
    pages.backing.remove(fail)
    assert sorted(pages.take(4)) == [1, 2, 3, 4]


def test_holders():
    pages = PageAllocator(3)
    first, second = pages.take(2)
    pages.share([first, first, second])
    pages.give_back([first, second])
    assert (pages.holders(first), pages.holders(second), pages.in_use) == (2, 1, 2)
    pages.give_back([second, first, first])
    assert pages.in_use == 0
    assert pages.take(1) == [first]  # the last that came back
    assert pages.holders(first) == 1
    for call in (pages.share, pages.give_back):
        with pytest.raises(AssertionError, match=f"page {second} is free"):
            call([second])


# ---- pools of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dl.load_model(hf_twin.make("gemma3", tmp_path_factory.mktemp("twin")).path)


def ids(n, seed=0):
    return torch.randint(0, 301, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("page_rows", [1, 7, 16, 128])
def test_page_size_changes_no_result(model, page_rows, kv_dtype):
    text = ids(150)
    wanted = dl.create_session(model, kv_dtype).eval(text, logits="all")
    pool = dl.create_kv_pool(model, page_rows, kv_dtype, 1 << 24)
    with dl.create_session(model, pool=pool) as session:
        found = [session.eval(text[:100], logits="all"), session.eval(text[100:149], logits="all")]
        assert torch.equal(torch.cat([*found, session.eval(text[149:])[None]]), wanted)
        assert session.sequence.tables[0][-1] == 149 // page_rows
    assert pool.used_bytes == 0


def test_out_of_pages_loses_no_session(model):
    """What is refused while another session holds pages can be done as soon as that has closed."""
    texts, more = (ids(100, 1), ids(100, 2)), ids(300, 3)
    wanted = dl.create_session(model, n_ctx=500).eval([*texts[0], *more])
    needed = Sequence(dl.create_kv_pool(model)).bytes_for(100, 400)  # of one session
    pool = dl.create_kv_pool(model, max_bytes=needed)
    a, b = (dl.create_session(model, n_ctx=500, pool=pool) for _ in texts)
    before = dl.eval_batch([a, b], texts)
    for call in (lambda: a.eval(more), lambda: dl.eval_batch([b, a], [[1], more])):
        with pytest.raises(dl.OutOfPages, match=r"the KV pool has \d+ of \d+ bytes left, wanted \d+"):
            call()
        assert (a.tokens, b.tokens) == texts
        assert all(map(torch.equal, (a.logits, b.logits), before))
    b.close()
    assert torch.equal(a.eval(more), wanted)
    a.close()
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: dl.create_kv_pool(m, page_rows=0), "page_rows is 0, wanted 1 or more"),
        (lambda m: dl.create_kv_pool(m, kv_dtype="q9"), "'q9' is unknown"),
        (lambda m: dl.create_kv_pool(m, max_bytes=10), r"max_bytes is 10, wanted \d+ or more"),
        (lambda m: dl.create_session(m, "f16", pool=dl.create_kv_pool(m, kv_dtype="f32")), "'f16', and the pool's"),
        (lambda m: dl.create_session(m, pool=KVPool([FULL], "f16", 1 << 20, "cpu")), "layers of other sizes"),
    ],
)  # fmt: skip
def test_wrong_pools_are_refused(model, call, text):
    with pytest.raises(ValueError, match=text):
        call(model)
