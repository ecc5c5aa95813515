"""Sessions in files: going on from one is going on, whatever the layers keep; what is no session is refused."""

import contextlib
import json

import pytest
import torch
from families import TINY
from safetensors import safe_open
from safetensors.torch import save_file
from test_embeddings import grid, picture
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.engine import session_file

N_CTX = 512  # beyond what some of these files say


@pytest.fixture
def load(oracle):
    return lambda name, mode="native": dl.load_model(oracle / "tiny" / f"{name}.gguf", mode=mode)


def same(found, wanted, ids):
    """Two sessions say the same of further ids: a chunk of all but four, and these as single tokens."""
    for part in (ids[:-4], *([token] for token in ids[-4:])):
        assert torch.equal(found.eval(part, "all"), wanted.eval(part, "all"))


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*((name, "f16") for name in TINY), *((name, ("q8_0", "tq4")) for name in ("gemma3", "gemma4", "qwen35"))],
    ids=str,
)
def test_every_family(name, kv_dtype, load, tmp_path):
    """Behind windows, in the middle of a page, into pages of another size; then both back to a checkpoint. The original
    is held against a run that was never interrupted."""
    model = load(name)
    ids, path = text(1, 110), tmp_path / "a.session"
    small, large = (dl.create_kv_pool(model, page_rows=rows, kv_dtype=kv_dtype) for rows in (16, 64))
    session = dl.create_session(model, n_ctx=N_CTX, rewind=3, pool=small)
    session.eval(ids[:40])
    session.checkpoint()
    session.eval(ids[40:74])
    session.eval(ids[74:75])
    session.save(path)
    found = dl.load_session(model, path, pool=large)
    assert torch.equal(found.logits, session.logits)
    assert (found.tokens, found.n_ctx, found.sequence.rewind) == (ids[:75], N_CTX, 3)
    fresh = dl.create_session(model, kv_dtype, n_ctx=N_CTX)
    fresh.eval(ids[:75])
    whole = fresh.eval(ids[75:], "all")
    same(found, session, ids[75:])
    assert torch.equal(found.logits, whole[-1])
    for each in (found, session):
        each.truncate(40)
    same(found, session, ids[60:90])
    found.close()
    assert large.used_bytes == 0


def test_generation_goes_on(load, tmp_path):
    """With the next draws, and a token that was said and not evaluated."""
    model, params = load("gemma3"), dl.SamplingParams(temp=1.3, repetition_penalty=1.2)
    session = dl.create_session(model, n_ctx=N_CTX)
    session.set_seed(7)
    said = [token for token, _ in session.generate([1, 2, 3], params, max_tokens=9)]
    session.save(tmp_path / "a.session")
    found = dl.load_session(model, tmp_path / "a.session")
    assert (found.tokens, found.pending) == ([1, 2, 3, *said[:-1]], said[-1:])
    assert found.pool is session.pool
    wanted = [token for token, _ in session.generate((), params, max_tokens=20)]
    assert [token for token, _ in found.generate((), params, max_tokens=20)] == wanted


def test_a_context_that_shifts(load, tmp_path):
    """Saved behind a shift, whose tokens are still to be evaluated, and shifting on."""
    model = load("gemma3")
    session = dl.create_session(model, n_ctx=40, on_full="shift", keep=3)
    session.eval(text(1, 38))
    session.shift()
    session.save(tmp_path / "a.session")
    found = dl.load_session(model, tmp_path / "a.session")
    assert (found.on_full, found.keep, found.pending) == ("shift", 3, session.pending)
    assert len(found.pending) > 1
    wanted = [token for token, _ in session.generate([1], max_tokens=60)]
    assert [token for token, _ in found.generate([1], max_tokens=60)] == wanted
    assert found.tokens == session.tokens


def test_a_loaded_session_shares_a_prefix_cache(load, tmp_path):
    """It takes what others have left there, and leaves its own pages, once it begins anew. Nothing of the file is kept:
    it may have been evaluated under hooks."""
    model, ids, path = load("gemma3"), text(1, 200), tmp_path / "a.session"
    cache = dl.create_prefix_cache(model, dl.create_kv_pool(model, 16))
    session = dl.create_session(model, n_ctx=N_CTX)
    session.eval(ids[:60])
    session.save(path)
    dl.create_session(model, prefix_cache=cache).eval(ids[100:180])
    found = dl.load_session(model, path, prefix_cache=cache)
    kept = cache.chains()
    same(found, session, ids[60:100])
    assert cache.chains() == kept
    logits = found.prefill(ids[100:])
    assert found.stats.reused_tokens == 80
    assert torch.equal(logits, dl.create_session(model).eval(ids[100:]))
    assert [list(chain.ids) for chain in cache.chains()] == [ids[100:196]]
    other = dl.create_prefix_cache(model, dl.create_kv_pool(model, kv_dtype="f32"))
    with pytest.raises(dl.SessionFileError, match="kept as f16, and in the pool as f32"):
        dl.load_session(model, path, prefix_cache=other)


def test_an_empty_session(load, tmp_path):
    for name in ("gemma3", "qwen35"):
        model = load(name)
        dl.create_session(model, n_ctx=100).save(tmp_path / "a.session")
        found = dl.load_session(model, tmp_path / "a.session")
        assert (found.tokens, found.logits, found.n_ctx) == ([], None, 100)
        same(found, dl.create_session(model), text(1, 20))


def test_rows_of_embeddings(load, tmp_path):
    model = load("qwen3vl")
    session = dl.create_session(model, n_ctx=N_CTX)
    given = dl.Embeddings(picture(model, 20), positions=grid(5, 4))
    session.eval([1, 2, 3])
    session.eval(given)
    session.eval_embd_span(picture(model, 6))
    session.eval(given)
    session.eval([4])
    session.save(tmp_path / "a.session")
    found = dl.load_session(model, tmp_path / "a.session")
    assert (found.tokens, found.spans, found.rope_delta) == (session.tokens, session.spans, session.rope_delta)
    same(found, session, text(1, 20))
    with pytest.raises(dl.CannotRewind, match="lies in a span"):
        found.truncate(25)
    for each in (found, session):
        each.truncate(12)
    assert found.spans == session.spans
    same(found, session, text(1, 20))


@pytest.mark.parametrize("page_rows", [1, 5, 16, 100])
def test_back_behind_a_window_in_pages_of_another_size(page_rows, load, tmp_path):
    """A truncate to any position is right or refused, and never refused where `rewind` or a checkpoint allow it."""
    model, ids = load("gemma3"), text(1, 90)
    pool = dl.create_kv_pool(model, page_rows=7)
    session = dl.create_session(model, n_ctx=N_CTX, rewind=9, pool=pool)
    session.eval(ids[:50])
    session.checkpoint()
    session.eval(ids[50:88])
    session.eval(ids[88:])
    session.save(tmp_path / "a.session")
    wanted = dl.create_session(model, n_ctx=N_CTX).eval(ids, "all")
    refused = []
    other = dl.create_kv_pool(model, page_rows=page_rows)
    for n in range(90):
        with dl.load_session(model, tmp_path / "a.session", pool=other) as found:
            try:
                found.truncate(n)
            except dl.CannotRewind:
                refused.append(n)
                continue
            assert torch.equal(found.eval(ids[n : n + 2], "all"), wanted[n : n + 2])
            found.truncate(0)
            assert torch.equal(found.eval(ids[:2], "all"), wanted[:2])
            found.truncate(1)
    assert refused
    assert max(refused) < 50  # everything from the checkpoint's window on is there
    assert other.used_bytes == 0


def test_only_what_is_held_is_written(load, tmp_path):
    sizes = []
    for n in (30, 330):
        session = dl.create_session(load("gemma3"), n_ctx=N_CTX)
        session.eval(text(1, n))
        session.save(tmp_path / "a.session")
        with safe_open(tmp_path / "a.session", framework="pt") as file:
            sizes.append([len(file.get_tensor(f"layers.{i}.k")) for i in (0, 5)])
    assert sizes == [[30, 30], [330 - 256, 330]]


def test_a_state_between_two_tokens_is_not_saved(load, tmp_path):
    model = load("qwen35")
    session = dl.create_session(model)
    session.eval([1, 2, 3])
    hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.eval([4])
    hook.remove()
    with pytest.raises(dl.CannotRewind, match="no state to save at 3"):
        session.save(tmp_path / "a.session")
    session.close()
    with pytest.raises(dl.DasllamaError, match="closed"):
        session.save(tmp_path / "a.session")
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(load, tmp_path, monkeypatch):
    session = dl.create_session(load("llama"))
    session.eval([1, 2, 3])
    path = tmp_path / "a.session"
    session.save(path)
    before = path.read_bytes()
    session.eval([4])
    monkeypatch.setattr(session_file.os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises((OSError, dl.SessionFileError)):
        session.save(tmp_path / "none" / "a.session")


@pytest.fixture
def saved(load, tmp_path):
    """A model with M-RoPE, and the file of a session of it: tokens, rows with positions, a checkpoint, logits."""
    model = load("qwen3vl")
    session = dl.create_session(model, n_ctx=N_CTX)
    session.eval([1, 2, 3])
    session.checkpoint()
    session.eval_embd_span_mrope(picture(model, 6), grid(2, 3))
    session.eval([4, 5])
    session.save(tmp_path / "a.session")
    return model, tmp_path / "a.session"


def test_other_models_and_pools(saved, load, tmp_path):
    model, path = saved
    for other in (load("qwen3vl", "fp32"), load("llama"), load("qwen3")):
        with pytest.raises(dl.SessionFileError, match="another model"):
            dl.load_session(other, path)
    changed = load("qwen3vl")
    changed.get_decoder().norm.weight[3] += 1e-6
    with pytest.raises(dl.SessionFileError, match="another model"):
        dl.load_session(changed, path)
    with pytest.raises(dl.SessionFileError, match="kept as f16, and in the pool as f32"):
        dl.load_session(model, path, pool=dl.create_kv_pool(model, kv_dtype="f32"))
    with pytest.raises(dl.SessionFileError, match="layers of other sizes"):
        dl.load_session(model, path, pool=dl.create_kv_pool(load("llama")))
    pool = dl.create_kv_pool(model, page_rows=8, max_bytes=dl.create_kv_pool(model, page_rows=8).groups[0].page_bytes)
    with pytest.raises(dl.OutOfPages):
        dl.load_session(model, path, pool=pool)
    assert pool.used_bytes == 0


def rewrite(path, change):
    """Let `change` alter the facts and the tensors of a file."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[session_file.KEY])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(facts, tensors)
    save_file(tensors, path, {session_file.KEY: json.dumps(facts)})


def fact(*keys):
    """Set facts[key]...[key] to the last of them."""

    def change(facts, tensors):
        for key in keys[:-2]:
            facts = facts[key]
        facts[keys[-2]] = keys[-1]

    return change


def tensor(name, make):
    """Replace a tensor; None takes it away."""

    def change(facts, tensors):
        made = make(tensors.pop(name, None))
        if made is not None:
            tensors[name] = made

    return change


HOSTILE = {
    "version": (fact("version", 2), "version 2, wanted 1"),
    "no facts": (lambda facts, tensors: facts.clear(), "version None"),
    "model": (fact("model", None), "model is None, wanted str"),
    "a true n_ctx": (fact("n_ctx", True), "n_ctx is True, wanted int"),
    "n_ctx 0": (fact("n_ctx", 0), "n_ctx is 0, wanted 1 to"),
    "n_ctx too small": (fact("n_ctx", 10), "11 tokens .* too many for n_ctx=10"),
    "rewind": (fact("rewind", -1), "rewind is -1"),
    "huge rewind": (fact("rewind", 10**30), "rewind is 1000"),
    "kv_dtype": (fact("kv_dtype", "f16"), "kv_dtype is 'f16', wanted list"),
    "codecs": (fact("kv_dtype", ["f16", "f64"]), "'f64' is unknown"),
    "one codec": (fact("kv_dtype", ["f16"]), "wanted a name or a pair"),
    "a codec of numbers": (fact("kv_dtype", [1, 2]), "wanted a list of str"),
    "another codec": (fact("kv_dtype", ["f16", "q8_0"]), "'layers.0.v' is torch.float16"),
    "checkpoints": (fact("checkpoints", [3, 3]), r"checkpoints \[3, 3\] of 11"),
    "checkpoint ahead": (fact("checkpoints", [12]), r"checkpoints \[12\] of 11"),
    "checkpoint at 0": (fact("checkpoints", [0]), r"checkpoints \[0\]"),
    "a checkpoint of text": (fact("checkpoints", ["3"]), "wanted a list of int"),
    "groups": (fact("first", [0, 0]), "2 kinds of layers, wanted 1"),
    "first of a layer that sees all": (fact("first", [1]), "keys from position 1"),
    "first behind": (fact("first", [-1]), "keys from position -1"),
    "span's kind": (fact("spans", 0, "start", 3.0), "span 0 is"),
    "span's end": (fact("spans", 0, "stop", 12), r"span 0 is \[3, 12\)"),
    "span's beginning": (fact("spans", 0, "start", -1), r"span 0 is \[-1, 9\)"),
    "span too long": (fact("spans", 0, "stop", 10), r"positions.* wanted torch.int64 \[7, 3\]"),
    "digest": (fact("spans", 0, "digest", "xy"), "64 hexadecimal"),
    "no span": (fact("spans", []), "do not agree on which rows"),
    "span's position": (tensor("spans.0.positions", lambda t: t - 9), "positions that no session"),
    "span's positions' shape": (tensor("spans.0.positions", lambda t: t[:, :2].clone()), "wanted torch.int64"),
    "an id": (tensor("tokens", lambda t: t + 256 * (t == 4)), "outside the vocabulary of 256"),
    "a negative id": (tensor("tokens", lambda t: t - 6 * (t == 4)), "outside the vocabulary"),
    "another -1": (tensor("tokens", lambda t: t - 5 * (t == 4)), "do not agree"),
    "tokens' dtype": (tensor("tokens", lambda t: t.int()), "'tokens' is torch.int32"),
    "tokens' rank": (tensor("tokens", lambda t: t[None]), "'tokens' is"),
    "more tokens": (tensor("tokens", lambda t: torch.cat([t, t[-1:]])), "layers.0.k"),
    "no tokens": (tensor("tokens", lambda t: None), "'tokens' is missing"),
    "pending": (tensor("pending", lambda t: torch.ones(503, dtype=torch.int64)), "503 pending"),
    "on_full": (fact("on_full", "wrap"), "on_full is 'wrap'"),
    "keep": (fact("keep", N_CTX), "keep is 512"),
    "pending id": (tensor("pending", lambda t: torch.tensor([256])), "outside the vocabulary"),
    "keys' rows": (tensor("layers.1.k", lambda t: t[1:]), r"'layers.1.k' is torch.float16 \[10, "),
    "keys' dtype": (tensor("layers.1.k", lambda t: t.float()), "'layers.1.k' is torch.float32"),
    "keys missing": (tensor("layers.1.v", lambda t: None), "'layers.1.v' is missing"),
    "logits": (tensor("logits", lambda t: t[:-1]), "'logits' is"),
    "generator": (tensor("generator", lambda t: t[:-1]), "'generator'"),
    "generator's state": (tensor("generator", lambda t: t | 255), "'generator'"),
    "a tensor too many": (tensor("layers.9.k", lambda t: torch.zeros(1)), "'layers.9.k' belongs to no session"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_what_a_file_says_is_checked(change, saved):
    model, path = saved
    alter, message = HOSTILE[change]
    dl.load_session(model, path).close()
    rewrite(path, alter)
    pool = dl.create_kv_pool(model)
    with pytest.raises(dl.SessionFileError, match=message) as error:
        dl.load_session(model, path, pool=None if change == "another codec" else pool)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert pool.used_bytes == 0


def test_broken_and_foreign_files(saved, tmp_path, oracle):
    model, path = saved
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for n in (0, 7, 8, 100, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(dl.SessionFileError):
            dl.load_session(model, path)
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(dl.SessionFileError, match="wanted one of Session.save"):
        dl.load_session(model, path)
    for other in (oracle / "tiny" / "llama.gguf", tmp_path, tmp_path / "none"):
        with pytest.raises(dl.SessionFileError, match="no session can be read"):
            dl.load_session(model, other)
    facts = json.loads(whole[8 : 8 + header])
    facts["pending"]["dtype"] = "F6_E2M3"
    other = json.dumps(facts).encode()
    path.write_bytes(len(other).to_bytes(8, "little") + other + whole[8 + header :])
    with pytest.raises(dl.SessionFileError, match="'pending': "):
        dl.load_session(model, path)
    pool = dl.create_kv_pool(model)
    for i in range(8, 8 + header, 7):  # a byte of the header: read as it is, or refused
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with contextlib.suppress(dl.SessionFileError):
            dl.load_session(model, path, pool=pool).close()
        assert pool.used_bytes == 0


def test_where_nothing_can_be_written(load, tmp_path):
    with dl.create_session(load("llama")) as session:
        session.eval([1, 2])
        with pytest.raises(dl.SessionFileError, match="cannot be written"):
            session.save(tmp_path)  # a folder
    assert not list(tmp_path.parent.glob("*.part"))
