"""Attention patterns against transformers' eager attention, and against what the kernels do with any cache."""

import contextlib

import pytest
import torch
from families import TINY
from hf_pairs import live_pair
from test_invariants import text
from tolerances import ATTENTION

import dasllama_torch as dl
from dasllama_torch.errors import CannotRewind, DasllamaError
from dasllama_torch.ops.kv_codecs import KV_CODECS

IDS = text(41, 37)
# Every kind: windows, bounds, sinks, shared keys, scaled queries, partial rotation, no positions, layers without any.
CASES = (
    "llama", "gemma2", "gemma3", "gemma4", "gemma4_e", "gpt-oss", "mistral3_yarn", "phi3", "qwen3moe", "glm4moe",
    "smollm3", "qwen35",
)  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request, oracle):
    return live_pair(oracle, request.param)


def close(found, wanted):
    """f32 of two implementations of several layers, as probabilities."""
    return found.shape == wanted.shape and (found - wanted).abs().max() < 10 * ATTENTION


def hf_patterns(hf, ids):
    """Of each layer with attention, by layer."""
    with torch.no_grad():
        found = hf(input_ids=ids, output_attentions=True).attentions
    layers = [i for i, layer in enumerate(hf.get_decoder().layers) if hasattr(layer, "self_attn")]
    found = [pattern for pattern in found if pattern is not None]
    return dict(zip(layers, found, strict=True))


def test_a_model_s_patterns_are_those_of_transformers(case):
    x = torch.tensor([IDS, text(42, 37)])
    found, wanted = dl.attention_pattern(case.model, x), hf_patterns(case.hf, x)
    assert found.keys() == wanted.keys()
    for layer, pattern in found.items():
        assert close(pattern.weights, wanted[layer]), layer
        total = pattern.weights.sum(-1) + (0 if pattern.sink is None else pattern.sink)
        assert (total - 1).abs().max() < 1e-6


def test_a_session_s_patterns_are_those_of_transformers(case):
    """Of rows that are evaluated at its end, over keys in its pool: prompts, and single tokens."""
    wanted = hf_patterns(case.hf, torch.tensor([IDS]))
    with dl.create_session(case.model, kv_dtype="f32", n_ctx=256) as session:
        session.eval(IDS[:20])
        for start, stop in ((20, 36), (36, 37)):
            for layer, pattern in dl.attention_pattern(session, IDS[start:stop]).items():
                assert close(pattern.weights, wanted[layer][:, :, start:stop, :stop]), layer


def test_sinks(oracle):
    """Their share, by the formula on queries and keys."""
    model = dl.load_model(oracle / "tiny" / "gpt-oss.gguf", mode="fp32")
    names = ["blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_rot_k"]
    _, cache = dl.run_with_cache(model, IDS, names)
    q, k = (cache[name][0].double().transpose(0, 1) for name in names)  # [H, T, D], [G, T, D]
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(len(IDS), len(IDS)).triu(1).bool(), -torch.inf)  # layer 1 has no window
    sinks = model.model.layers[1].self_attn.sinks.double()
    wanted = torch.cat([scores, sinks[:, None, None].expand(-1, len(IDS), 1)], -1).softmax(-1)[..., -1]
    pattern = dl.attention_pattern(model, IDS, layers=[1])[1]
    assert (pattern.sink[0] - wanted).abs().max() < ATTENTION
    assert pattern.sink.max() > 0.05


@pytest.mark.parametrize("keys", KV_CODECS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_any_codec(name, keys, load):
    """What the kernel weighs is what the pattern says: values kept in f32 and weighed by it are attention's output."""
    model = load(name)
    with dl.create_session(model, kv_dtype=(keys, "f32"), n_ctx=256) as session:
        _, before = dl.run_with_cache(session, IDS[:29], "blocks.1.attn.hook_v")
        _, cache = dl.run_with_cache(session, IDS[29:], ["blocks.1.attn.*"])
    v = torch.cat([before["blocks.1.attn.hook_v"], cache["blocks.1.attn.hook_v"]], 1).double()
    z = cache["blocks.1.attn.hook_z"].double()
    v = v.repeat_interleave(z.shape[2] // v.shape[2], 2)
    pattern = cache["blocks.1.attn.hook_pattern"].double()
    assert pattern.shape == (1, z.shape[2], 8, 37)
    assert (torch.einsum("bhts,bshd->bthd", pattern, v) - z).abs().max() < ATTENTION * v.abs().max()


def test_padding_and_batches(load):
    """Rows of a sequence are told apart by it, and padding has none."""
    model = load("llama")
    mask = torch.ones(2, 37, dtype=torch.int64)
    mask[1, :9] = 0
    with dl.inspect.record(model, "blocks.0.attn.hook_pattern") as cache, torch.no_grad():
        model(torch.tensor([IDS, [0] * 9 + IDS[9:]]), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
    found = cache["blocks.0.attn.hook_pattern"]
    assert found[1, :, :9].abs().max() == 0
    assert found[1, :, :, :9].abs().max() == 0
    alone = dl.attention_pattern(model, IDS[9:], layers=[0])[0].weights
    assert (found[1:, :, 9:, 9:] - alone).abs().max() < ATTENTION
    a, b = dl.create_session(model), dl.create_session(model)
    with dl.inspect.record(model, "blocks.0.attn.hook_pattern", sessions=b) as cache:
        dl.eval_batch([a, b], [IDS[:7], IDS[9:]])
    assert (cache["blocks.0.attn.hook_pattern"] - alone).abs().max() < 1e-3  # keys in f16


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "gemma4_e"])
def test_several_sessions_in_one_forward(name, load):
    """Of different lengths, in one batch: prompts beside single tokens, each over its own keys, windows left behind."""
    model = load(name)
    texts, past = [text(51, 90), text(52, 21), text(53, 40)], (87, 0, 39)
    wanted = [dl.attention_pattern(model, ids) for ids in texts]
    sessions = [dl.create_session(model, kv_dtype="f32", n_ctx=128) for _ in texts]
    for session, ids, n in zip(sessions, texts, past, strict=True):
        if n:
            session.eval(ids[:n])
    with contextlib.ExitStack() as stack:
        seen = [
            stack.enter_context(dl.inspect.record(model, "blocks.*.attn.pattern", sessions=session))
            for session in sessions
        ]
        dl.eval_batch(sessions, [ids[n:] for ids, n in zip(texts, past, strict=True)])
    for cache, patterns, ids, n in zip(seen, wanted, texts, past, strict=True):
        for layer, pattern in patterns.items():
            weights, sink = cache[f"blocks.{layer}.attn.pattern"]
            assert close(weights[..., : len(ids)], pattern.weights[:, :, n:])
            assert not weights[..., len(ids) :].any()
            assert pattern.sink is None if sink is None else close(sink, pattern.sink[:, :, n:])


def test_pages_that_a_window_has_left(load):
    """A window's pages go back to the pool; keys of others' are not read."""
    model = load("gemma3")
    ids = text(43, 150)
    pool = dl.create_kv_pool(model, page_rows=4, kv_dtype="f32")
    with dl.create_session(model, pool=pool, n_ctx=256) as session, dl.create_session(model, pool=pool) as other:
        for start in range(0, 144, 12):
            session.eval(ids[start : start + 12])
            other.eval(ids[:12])
        found = dl.attention_pattern(session, ids[144:])
    wanted = dl.attention_pattern(model, ids)
    assert any(-1 in table for table in session.sequence.tables) or session._closed
    for layer, pattern in found.items():
        assert (pattern.weights - wanted[layer].weights[:, :, 144:]).abs().max() < 10 * ATTENTION


def test_the_last_token_again(load):
    model = load("llama")
    with dl.create_session(model, kv_dtype="f32") as session:
        session.eval(IDS)
        logits = session.logits.clone()
        found = dl.attention_pattern(session, layers=[1], heads=[2, 0])[1]
        assert (session.n_past, session.tokens[-1]) == (37, IDS[-1])
        assert torch.equal(session.logits, logits)
    wanted = dl.attention_pattern(model, IDS)[1].weights[:, [2, 0], -1:]
    assert found.heads == (2, 0)
    assert (found.weights - wanted).abs().max() < ATTENTION
    hybrid = load("qwen35")
    with dl.create_session(hybrid) as session:
        session.eval(IDS)
        with pytest.raises(CannotRewind):
            dl.attention_pattern(session)
        session.truncate(0)
        with pytest.raises(DasllamaError, match="wanted a prompt"):
            dl.attention_pattern(session)


def test_what_there_is_not(load):
    with pytest.raises(ValueError, match=r"layer 0 has no attention, wanted some of \[3"):
        dl.attention_pattern(load("qwen35"), IDS, layers=[0])
    with pytest.raises(ValueError, match="layer 2 has no attention"):
        dl.attention_pattern(load("llama"), IDS, layers=[2])
    with pytest.raises(ValueError, match="head is 9"):
        dl.attention_pattern(load("llama"), IDS, heads=[9])
    assert set(TINY) >= set(CASES)
