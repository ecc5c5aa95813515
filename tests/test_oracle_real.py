"""Published models: prompt ids, natural text and greedy continuations against llama.cpp and transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import (
    KV_NLL,
    REAL_GREEDY_MARGIN,
    REAL_LOGPROB,
    REAL_LOGPROB_PEER,
    REAL_LOGPROBS_FP32,
    REAL_NLL,
    REAL_NLL_RMS,
    REAL_TOP1_MARGIN,
)

import dasllama_torch as dl
from dasllama_torch.ops import registry

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

    def peer_difference(self) -> float:
        """Mean |log-probability difference| of llama.cpp's f16 and f32 caches, while both follow one path; 0 if
        absent.
        """
        differences = []
        for name, prompt in self.prompts.items():
            if f"{name}_top_ids_kv16" not in self.data:
                return 0.0
            for step, (a, b) in enumerate(zip(prompt["kv16"]["greedy"], prompt["kv32"]["greedy"], strict=True)):
                runs = [
                    dict(
                        zip(
                            self.data[f"{name}_top_ids_{run}"][step],
                            self.data[f"{name}_top_logprobs_{run}"][step],
                            strict=True,
                        )
                    )
                    for run in ("kv16", "kv32")
                ]
                differences += [abs(runs[0][token] - runs[1][token]) for token in runs[0].keys() & runs[1].keys()]
                if a != b:
                    break
        return float(np.mean(differences))


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


def logprobs_behind(model, texts, forced):
    """f64 [1 + tokens forced, V] for each text: behind it, and behind each of the tokens that are forced to follow."""
    sessions = [dl.create_session(model, kv_dtype="f32", n_ctx=1024) for _ in texts]
    first, rest = dl.eval_batch(sessions, texts), dl.eval_batch(sessions, forced, logits="all")
    return [torch.cat([row[None], rows]).double().log_softmax(-1) for row, rows in zip(first, rest, strict=True)]


def nll(model, ids, kv_dtype, together=256):
    """f32 [len(ids) - 1], in parts: the logits of all of them would be a gigabyte."""
    found = []
    with dl.create_session(model, kv_dtype=kv_dtype, n_ctx=1024) as session:
        for i in range(0, len(ids) - 1, together):
            rows = session.eval(ids[i : i + together], logits="all")
            following = torch.tensor(ids[i + 1 : i + together + 1])
            found.append(torch.nn.functional.cross_entropy(rows[: len(following)], following, reduction="none"))
    return torch.cat(found).numpy()


def check_natural_text(golden, found, nll_bound, rms_bound):
    """found: what `nll` gives for the passage."""
    hf, peer = golden.nll["hf"], golden.nll["kv32"]
    noise = 2 * (found - hf).std() / np.sqrt(len(hf))  # of the mean over so short a passage
    assert abs(found.mean() - hf.mean()) <= nll_bound * hf.mean() + noise
    rms = lambda x: np.sqrt(np.square(x).mean())  # noqa: E731
    assert rms(found - hf) <= rms_bound * rms(peer - hf)


def check_dequantized(model, golden):
    """A model in fp32 mode: transformers' greedy ids, and of its first step the stored top-10, far tighter than ids."""
    greedy = [prompt["hf_dequant_fp32"]["greedy"] for prompt in golden.prompts.values()]
    found = logprobs_behind(model, [p["ids"] for p in golden.prompts.values()], [tokens[:-1] for tokens in greedy])
    for name, tokens, logprobs in zip(golden.prompts, greedy, found, strict=True):
        margins = golden.data[f"{name}_margin_hf"]
        for step, (best, wanted) in enumerate(zip(logprobs.argmax(-1), tokens, strict=True)):
            if margins[step] <= REAL_GREEDY_MARGIN:
                break
            assert best == wanted, f"{name}, step {step}, margin {margins[step]:.4f}"
        wanted = torch.from_numpy(golden.data[f"{name}_top_logprobs_hf"][0])
        top_ids = torch.from_numpy(golden.data[f"{name}_top_ids_hf"][0]).long()
        assert (logprobs[0, top_ids] - wanted).abs().max() <= REAL_LOGPROBS_FP32


def test_prompt_ids(native):
    model, golden = native
    for prompt in golden.prompts.values():
        assert model.encode(prompt["text"], add_special=True, parse_special=True) == prompt["ids"]


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_natural_text(native, kv_dtype):
    model, golden = native
    check_natural_text(golden, nll(model, golden.prompts["passage"]["ids"], kv_dtype), REAL_NLL, REAL_NLL_RMS)


@pytest.mark.parametrize("fixture", ["demo_model", "gemma_model"])
def test_longer_natural_text(request, fixture):
    """Long enough for the bound itself; `test_dequantized` ties fp32 mode to transformers."""
    path, root = request.getfixturevalue(fixture), Path(__file__).parent.parent
    model, exact = dl.load_model(path), dl.load_model(path, mode="fp32")
    names = ("benchmarks/passage.txt", "README.md", "CONTRIBUTING.md")
    texts = [model.encode((root / name).read_text())[:550] for name in names]
    found, wanted = (np.concatenate([nll(each, text, "f16") for text in texts]) for each in (model, exact))
    assert len(found) > 1500
    assert abs(found.mean() / wanted.mean() - 1) <= REAL_NLL


@pytest.mark.parametrize("fixture", ["demo_model", "gemma_model"])
def test_codecs_of_keys_and_values(request, fixture):
    """Text soup shows after a hundred tokens or two, and on one instruction set alone: ggml-org/llama.cpp#23717."""
    model = dl.load_model(request.getfixturevalue(fixture))
    ids = model.encode((Path(__file__).parent.parent / "benchmarks" / "passage.txt").read_text())[:300]
    for isa in registry.isas()[1:]:
        registry.set_isa(isa)
        try:
            exact, *others = (nll(model, ids, kv_dtype) for kv_dtype in ("f16", *KV_NLL))
        finally:
            registry.set_isa(None)
        for found, bound in zip(others, KV_NLL.values(), strict=True):
            more = found - exact
            noise = 2 * more.std() / np.sqrt(len(more))  # of the mean over so short a text
            assert more.mean() <= bound + noise


def test_teacher_forced(native):
    model, golden = native
    differences = []
    forced = [prompt["kv32"]["greedy"] for prompt in golden.prompts.values()]
    found = logprobs_behind(model, [p["ids"] for p in golden.prompts.values()], [tokens[:-1] for tokens in forced])
    for name, tokens, logprobs in zip(golden.prompts, forced, found, strict=True):
        margins = golden.data[f"{name}_margin_kv32"]
        top_ids = torch.from_numpy(golden.data[f"{name}_top_ids_kv32"]).long()
        wanted = torch.from_numpy(golden.data[f"{name}_top_logprobs_kv32"])
        for step, token in enumerate(tokens):
            if margins[step] > REAL_TOP1_MARGIN:
                assert logprobs[step].argmax() == token, f"{name}, step {step}, margin {margins[step]:.2f}"
        differences.append((logprobs.gather(1, top_ids) - wanted).abs())
    assert torch.cat(differences).mean() <= max(REAL_LOGPROB, REAL_LOGPROB_PEER * golden.peer_difference())


def test_dequantized(fp32):
    check_dequantized(*fp32)
