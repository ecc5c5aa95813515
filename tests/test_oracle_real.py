"""Published models: prompt ids, natural text and greedy continuations against llama.cpp and transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import REAL_GREEDY_MARGIN, REAL_LOGPROB, REAL_NLL, REAL_NLL_RMS, REAL_TOP1_MARGIN

import dasllama_torch as dl

# Fixture of the model, golden data's name, and whether the excerpt that lies beside the tests serves.
MODELS = {
    "smollm2-excerpt": ("demo_model", "smollm2-135m-instruct-q4_1", True),
    "smollm2": ("demo_model", "smollm2-135m-instruct-q4_1", False),
    "gemma3": ("gemma_model", "gemma-3-270m-q4_k_m", False),
}


class Golden:
    def __init__(self, folder, name):
        self.prompts = {p["id"]: p for p in json.loads((folder / f"{name}.json").read_text())["prompts"]}
        self.data = np.load(folder / f"{name}.npz")
        self.nll = {run: self.data[f"nll_{run}"] for run in ("hf", "kv32")}


@pytest.fixture(scope="module", params=MODELS)
def path_and_golden(request):
    fixture, name, excerpt = MODELS[request.param]
    folder = Path(__file__).parent / "golden" if excerpt else request.getfixturevalue("oracle") / "real"
    return request.getfixturevalue(fixture), Golden(folder, name)


@pytest.fixture(scope="module")
def native(path_and_golden):
    return dl.load_model(path_and_golden[0]), path_and_golden[1]


@pytest.fixture(scope="module")
def fp32(path_and_golden):
    return dl.load_model(path_and_golden[0], mode="fp32"), path_and_golden[1]


def all_logprobs(model, ids, kv_dtype):
    with dl.create_session(model, kv_dtype=kv_dtype, n_ctx=1024) as session:
        return session.eval(ids, logits="all").double().log_softmax(-1)


def nll(model, ids, kv_dtype):
    logprobs = all_logprobs(model, ids, kv_dtype)[:-1]
    return -logprobs[torch.arange(len(ids) - 1), ids[1:]].numpy()


def test_prompt_ids(native):
    model, golden = native
    for prompt in golden.prompts.values():
        assert model.encode(prompt["text"], add_special=True, parse_special=True) == prompt["ids"]


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_natural_text(native, kv_dtype):
    model, golden = native
    found = nll(model, golden.prompts["passage"]["ids"], kv_dtype)
    hf, peer = golden.nll["hf"], golden.nll["kv32"]
    assert abs(found.mean() / hf.mean() - 1) <= REAL_NLL
    rms = lambda x: np.sqrt(np.square(x).mean())  # noqa: E731
    assert rms(found - hf) <= REAL_NLL_RMS * rms(peer - hf)


def test_teacher_forced(native):
    model, golden = native
    for name, prompt in golden.prompts.items():
        forced = prompt["kv32"]["greedy"]
        margins = golden.data[f"{name}_margin_kv32"]
        top_ids = torch.from_numpy(golden.data[f"{name}_top_ids_kv32"]).long()
        wanted = torch.from_numpy(golden.data[f"{name}_top_logprobs_kv32"])
        n = len(prompt["ids"])
        logprobs = all_logprobs(model, prompt["ids"] + forced[:-1], "f32")[n - 1 :]
        for step, token in enumerate(forced):
            if margins[step] > REAL_TOP1_MARGIN:
                assert logprobs[step].argmax() == token, f"{name}, step {step}, margin {margins[step]:.2f}"
        difference = (logprobs.gather(1, top_ids) - wanted).abs().mean()
        assert difference <= REAL_LOGPROB, f"{name}: mean |difference| {difference:.3f}"


def test_dequantized_greedy(fp32):
    model, golden = fp32
    for name, prompt in golden.prompts.items():
        margins = golden.data[f"{name}_margin_hf"]
        with dl.create_session(model, kv_dtype="f32", n_ctx=1024) as session:
            session.eval(prompt["ids"])
            for step, wanted in enumerate(prompt["hf_dequant_fp32"]["greedy"]):
                if margins[step] <= REAL_GREEDY_MARGIN:
                    break
                assert session.sample() == wanted, f"{name}, step {step}, margin {margins[step]:.4f}"
                session.eval([wanted])


def test_dequantized_logprobs(fp32):
    """The stored top-10 of transformers' own first step: far tighter than greedy ids."""
    model, golden = fp32
    for name, prompt in golden.prompts.items():
        logprobs = all_logprobs(model, prompt["ids"], "f32")[-1]
        wanted = torch.from_numpy(golden.data[f"{name}_top_logprobs_hf"][0])
        found = logprobs[torch.from_numpy(golden.data[f"{name}_top_ids_hf"][0]).long()]
        assert (found - wanted).abs().max() <= 2e-3
