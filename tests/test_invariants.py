"""However the tokens are cut into steps, whoever else is in the batch, however many threads: the same results.

Bitwise in native mode on the CPU, to a stated tolerance in fp32 mode.
"""

import numpy as np
import pytest
import torch
from families import TINY
from tolerances import FP32_LOGITS

import dasllama_torch as dl

QUANT = ["q4_1", "q5_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "iq2_xs", "mxfp4", "bf16", "nvfp4", "tq1_0"]
# The families' tiny models have weights in F32, which both modes multiply alike.
CASES = [(f"tiny/{name}", "native") for name in TINY]
CASES += [(f"quant/llama-{name}", mode) for name in QUANT for mode in ("native", "fp32")]


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    return request.param


@pytest.fixture
def model(case, oracle):
    name, mode = case
    return dl.load_model(oracle / f"{name}.gguf", mode=mode)


@pytest.fixture
def mode(case):
    return case[1]


N_CTX = 512  # beyond what some of these files say


def text(seed, n, n_vocab=256):
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def whole(model, ids, kv_dtype):
    with dl.create_session(model, kv_dtype, n_ctx=N_CTX) as session:
        return session.eval(ids, logits="all")


def in_chunks(model, ids, size, kv_dtype):
    with dl.create_session(model, kv_dtype, n_ctx=N_CTX) as session:
        return torch.cat([session.eval(ids[i : i + size], logits="all") for i in range(0, len(ids), size)])


def assert_same(found, wanted, mode):
    if mode == "native":
        assert torch.equal(found, wanted)
    else:
        assert (found - wanted).abs().max() <= FP32_LOGITS * wanted.std()


def test_chunked_prefill(case, model, mode):
    ids = text(1, 131)  # crosses pages, windows and original contexts
    for kv_dtype in ("f16", "f32") if case[0].startswith("tiny/") else ("f16",):
        wanted = whole(model, ids, kv_dtype)
        for size in (1, 3, 64):
            assert_same(in_chunks(model, ids, size, kv_dtype), wanted, mode)


def ragged(model):
    """Three sessions alone, and in one batch: prefill and decode rows mixed, at different positions."""
    texts = text(2, 77), text(3, 5), text(4, 150)
    wanted = [whole(model, ids, "f16") for ids in texts]
    sessions = [dl.create_session(model, n_ctx=N_CTX) for _ in texts]
    cuts = [(0, 70, 77), (0, 4, 5), (0, 1, 150)]
    found = [[], [], []]
    for stage in range(2):
        parts = [ids[cut[stage] : cut[stage + 1]] for ids, cut in zip(texts, cuts, strict=True)]
        for i, logits in enumerate(dl.eval_batch(sessions, parts, logits="all")):
            found[i].append(logits)
    for session in sessions:
        session.close()
    return zip(map(torch.cat, found), wanted, strict=True)


def test_ragged_batch(model, mode):
    for found, wanted in ragged(model):
        assert_same(found, wanted, mode)


def test_thread_count(model, threads):
    ids, results = text(5, 90), []
    for n in (1, 2, 3):
        threads(n)
        results.append(torch.cat([whole(model, ids, "f16"), in_chunks(model, ids[:9], 1, "f16")]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_a_window_larger_than_one_forward(name, oracle):
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf")
    ids = text(6, 510)  # with the next one: more than one window of rows
    other = text(7, 300)
    wanted = whole(model, ids, "f16"), whole(model, other, "f16")
    with dl.create_session(model) as a, dl.create_session(model) as b:
        found = dl.eval_batch([a, b], [ids, other], logits="all")
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
