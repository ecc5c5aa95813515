"""Tiny random models of each family against transformers (fp32), all stored positions, logits and hidden states."""

import json

import numpy as np
import pytest
import torch
from families import TINY
from tolerances import FP32_LOGITS, GREEDY_MARGIN

import dasllama_torch as dl


@pytest.fixture(params=TINY)
def case(request, oracle):
    path = oracle / "tiny" / f"{request.param}.gguf"
    facts = json.loads(path.with_suffix(".json").read_text())
    # Where the references disagree, transformers is the right side for all of these; see the golden data's README.
    assert facts["verdict"].get("agree") or facts["verdict"]["right"] == "hf"
    return dl.load_model(path, mode="fp32"), np.load(path.with_suffix(".npz")), FP32_LOGITS * TINY[request.param]


N_CTX = 256  # of the golden data's own contexts, twice that for what does not fit: LongRoPE goes by it


def lengths(data):
    return sorted(int(name.removeprefix("ids_s")) for name in data.files if name.startswith("ids_s"))


def assert_logits(found, wanted, tolerance):
    spread = wanted.std()
    worst = np.abs(found - wanted).max()
    assert worst <= tolerance * spread, f"max |difference| {worst:.2e}, spread {spread:.2f}"


def test_forward_without_a_cache(case):
    model, data, tolerance = case
    for n in lengths(data):
        with torch.no_grad():
            logits = model(torch.from_numpy(data[f"ids_s{n}"]).long().unsqueeze(0)).logits[0]
        assert_logits(logits[data[f"rows_s{n}"]].numpy(), data[f"logits_hf_s{n}"], tolerance)


def test_session(case):
    model, data, tolerance = case
    for n in lengths(data):
        with dl.create_session(model, kv_dtype="f32", n_ctx=N_CTX if n <= N_CTX else 2 * N_CTX) as session:
            logits = session.eval(data[f"ids_s{n}"].tolist(), logits="all")
        assert_logits(logits[data[f"rows_s{n}"]].numpy(), data[f"logits_hf_s{n}"], tolerance)


def test_hidden_states(case):
    model, data, tolerance = case
    seen = []
    decoder = model.get_decoder()
    watched = [decoder.embed_tokens, *decoder.layers, decoder.norm]
    hooks = [module.register_forward_hook(lambda m, i, out: seen.append(out)) for module in watched]
    with torch.no_grad():
        model(torch.from_numpy(data["ids_s40"]).long().unsqueeze(0))
    for hook in hooks:
        hook.remove()
    found = torch.cat(seen).numpy()  # embeddings, every layer, after the final norm
    assert_logits(found[-2], data["prenorm_hf_s40"], tolerance)
    # HF's list holds the final norm's output in place of the last layer's.
    for index, wanted in zip(data["hidden_index"], data["hidden_hf_s40"], strict=True):
        last = index == len(model.config.layers)
        assert_logits(found[-1] if last else found[index], wanted, tolerance)


def test_greedy(case):
    model, data, _ = case
    for n in (7, 40):
        margins = data[f"greedy_margin_hf_s{n}"]
        with dl.create_session(model, kv_dtype="f32", n_ctx=N_CTX) as session:
            ids = [token for token, _ in session.generate(data[f"ids_s{n}"].tolist(), max_tokens=24)]
        for step, (found, wanted) in enumerate(zip(ids, data[f"greedy_hf_s{n}"], strict=True)):
            if margins[step] <= GREEDY_MARGIN:
                break
            assert found == wanted, f"step {step}, margin {margins[step]:.4f}"
