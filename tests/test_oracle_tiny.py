"""Tiny random models of each family against transformers (fp32), all stored positions, logits and hidden states."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from families import TINY
from tolerances import FP32_LOGITS, GREEDY_MARGIN

import dasllama_torch as dl
from dasllama_torch.ops import registry


class Case(NamedTuple):
    name: str
    model: torch.nn.Module
    data: np.lib.npyio.NpzFile
    tolerance: float


@pytest.fixture(params=TINY)
def case(request, oracle):
    path = oracle / "tiny" / f"{request.param}.gguf"
    facts = json.loads(path.with_suffix(".json").read_text())
    # Where the references disagree, transformers is the right side for all of these; see the golden data's README.
    assert facts["verdict"].get("agree") or facts["verdict"]["right"] == "hf"
    model, data = dl.load_model(path, mode="fp32"), np.load(path.with_suffix(".npz"))
    return Case(request.param, model, data, FP32_LOGITS * TINY[request.param])


N_CTX = 256  # of the golden data's own contexts, twice that for what does not fit: LongRoPE goes by it


def lengths(data):
    return sorted(int(name.removeprefix("ids_s")) for name in data.files if name.startswith("ids_s"))


def assert_near(case, measured, what, found, wanted):
    """The largest difference, relative to the spread of what is wanted."""
    worst = float(np.abs(found - wanted).max() / wanted.std())
    measured(case.name, what, worst)
    assert worst <= case.tolerance


def test_forward_without_a_cache(case, measured):
    model, data = case.model, case.data
    for n in lengths(data):
        with torch.no_grad():
            logits = model(torch.from_numpy(data[f"ids_s{n}"]).long().unsqueeze(0)).logits[0]
        assert_near(case, measured, "logits", logits[data[f"rows_s{n}"]].numpy(), data[f"logits_hf_s{n}"])


def test_session(case, measured):
    model, data = case.model, case.data
    for n in lengths(data):
        with dl.create_session(model, kv_dtype="f32", n_ctx=N_CTX if n <= N_CTX else 2 * N_CTX) as session:
            logits = session.eval(data[f"ids_s{n}"].tolist(), logits="all")
        assert_near(case, measured, "logits", logits[data[f"rows_s{n}"]].numpy(), data[f"logits_hf_s{n}"])


def test_hidden_states(case, measured):
    model, data = case.model, case.data
    seen = []
    decoder = model.get_decoder()
    watched = [decoder.embed_tokens, *decoder.layers, decoder.norm]
    hooks = [module.register_forward_hook(lambda m, i, out: seen.append(out)) for module in watched]
    with torch.no_grad():
        model(torch.from_numpy(data["ids_s40"]).long().unsqueeze(0))
    for hook in hooks:
        hook.remove()
    found = torch.cat(seen).numpy()  # embeddings, every layer, after the final norm
    assert_near(case, measured, "hidden states", found[-2], data["prenorm_hf_s40"])
    # HF's list holds the final norm's output in place of the last layer's.
    for index, wanted in zip(data["hidden_index"], data["hidden_hf_s40"], strict=True):
        last = index == len(model.config.layers)
        assert_near(case, measured, "hidden states", found[-1] if last else found[index], wanted)


def test_greedy(case, measured):
    model, data = case.model, case.data
    for n in (7, 40):
        margins = data[f"greedy_margin_hf_s{n}"]
        with dl.create_session(model, kv_dtype="f32", n_ctx=N_CTX) as session:
            ids = [token for token, _ in session.generate(data[f"ids_s{n}"].tolist(), max_tokens=24)]
        clear = int(np.argmax([*(margins <= GREEDY_MARGIN), True]))  # steps before the first near tie
        same = int(np.argmax([*(np.array(ids) != data[f"greedy_hf_s{n}"]), True]))
        measured(case.name, f"greedy {n}", same)
        assert same >= clear, f"differs at step {same}, margin {margins[same]:.4f}"


def test_every_op_of_a_session_agrees_with_its_reference(case):
    with dl.create_session(case.model, kv_dtype="f32", n_ctx=N_CTX) as session:
        wanted = session.eval(case.data["ids_s40"].tolist())
        session.truncate(0)
        with registry.compare_to_reference(rtol=1e-4, atol=1e-4) as compared:
            session.eval(case.data["ids_s40"][:39].tolist())
            found = session.eval(case.data["ids_s40"][39:].tolist())
    assert {"quant_linear", "rms_norm"} <= set(compared.worst)
    assert torch.equal(found, wanted)  # what the references wrote was taken back
