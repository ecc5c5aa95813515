"""What was evaluated and taken back leaves no trace: wrong drafts, and tails behind a shared prefix."""

import pytest
import torch
from test_invariants import text

import dasllama_torch as dl

FAMILIES = ["llama", "gemma3", "gpt-oss", "qwen35", "qwen35moe", "qwen3next"]  # full, windows, recurrent states


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_drafts_change_nothing(load, name):
    """Greedy tokens with drafts of 1 to 5, wrong at chosen places and verified in one forward, of two sessions at once,
    are those without drafts, and so are the logits, to the bit."""
    model, n, prompts = load(name), 36, (text(1, 30), text(2, 11))
    has_states = any(hasattr(layer.cache, "conv_taps") for layer in model.config.layers)
    wanted, logits = [], []
    for prompt in prompts:
        session = dl.create_session(model)
        rows = [session.eval(prompt)]
        for _ in range(n + 6):
            rows.append(session.eval([int(rows[-1].argmax())]))
        wanted.append([int(row.argmax()) for row in rows])
        logits.append(rows)
    sessions = [dl.create_session(model, rewind=0 if has_states else 5) for _ in prompts]
    dl.eval_batch(sessions, prompts)
    said = [0, 0]  # of the tokens wanted, those that were evaluated
    for step in range(n):
        if min(said) >= n:
            break
        right = [(step + i) % 4 for i in range(2)]  # so many of the draft are right
        sizes = [1 + (2 * step + 3 * i) % 5 for i in range(2)]
        spans = []
        for i, session in enumerate(sessions):
            span = wanted[i][said[i] : said[i] + 1 + sizes[i]]
            spans.append([*span[: 1 + right[i]], *((token + 1) % 256 for token in span[1 + right[i] :])])
            if has_states:
                session.checkpoint()
        found = dl.eval_batch(sessions, spans, logits="all")
        for i, session in enumerate(sessions):
            accepted = 1
            while accepted < len(spans[i]) and spans[i][accepted] == int(found[i][accepted - 1].argmax()):
                accepted += 1
            assert accepted == 1 + min(right[i], sizes[i])
            for row, expected in zip(found[i][:accepted], logits[i][said[i] + 1 :], strict=False):
                assert torch.equal(row, expected)
            start = session.n_past - len(spans[i])
            if accepted < len(spans[i]):
                session.truncate(start if has_states else start + accepted)
                if has_states:
                    session.eval(spans[i][:accepted])
            said[i] += accepted
            assert session.tokens == prompts[i] + wanted[i][: said[i]]
    assert min(said) >= n


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
@pytest.mark.parametrize("page_rows", [7, 64, 256])
def test_tails_behind_a_shared_prefix(load, name, page_rows):
    """A prefix of 300 tokens, no multiple of a page; what one tail left must not be seen by the next, whether the
    session goes back for it or a fork takes it."""
    model, prefix, tails = load(name), text(3, 300), (text(4, 23), text(5, 41), text(6, 3))
    with dl.create_session(model, n_ctx=400) as session:
        wanted = []
        for tail in tails:
            session.truncate(0)
            wanted.append(session.eval(prefix + tail, logits="all")[300:])
    pool = dl.create_kv_pool(model, page_rows, max_bytes=1 << 26)
    with dl.create_session(model, n_ctx=400, pool=pool) as session:
        session.eval(prefix)
        session.checkpoint()
        for i, tail in enumerate(tails):
            with dl.fork(session) as fork:
                found = [fork.eval(tail[:-1], logits="all")]
                assert torch.equal(session.eval(tails[i - 1], logits="all"), wanted[i - 1])
                found.append(fork.eval(tail[-1:], logits="all"))
                assert torch.equal(torch.cat(found), wanted[i])
            dl.truncate(session, 300)
    assert pool.used_bytes == 0
