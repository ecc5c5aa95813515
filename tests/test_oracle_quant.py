"""One small llama in every weight type, and experts of several types: dequantized against transformers, native
arithmetic against llama.cpp."""

import json

import numpy as np
import pytest
import torch
from tolerances import FP32_LOGITS, NATIVE_LOGPROB

import dasllama_torch as dl
from dasllama_torch.ops import ggml_types

TYPES = [
    "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "q1_0", "q2_0", "mxfp4",
    "nvfp4",
]  # fmt: skip


@pytest.fixture(params=TYPES)
def case(request, oracle):
    path = oracle / "quant" / f"llama-{request.param}.gguf"
    return path, np.load(path.with_suffix(".npz"))


def test_the_list_is_complete(oracle):
    index = json.loads((oracle / "quant" / "index.json").read_text())
    assert {f"llama-{name}" for name in TYPES} == {path.stem for path in (oracle / "quant").glob("llama-*.gguf")}
    named = {kind.name for kind in ggml_types.GGML_TYPES.values()}
    assert {name for name in index["models"] if not name.startswith("qwen")} <= named


def test_experts_dequantized(oracle):
    """Q4_K experts whose down stacks and attention outputs are Q5_0 and Q8_0: rows of those are no multiple of 256."""
    test_dequantized(quantized_experts(oracle))


def test_experts_native(oracle):
    test_native(quantized_experts(oracle))


def quantized_experts(oracle):
    path = oracle / "quant" / "qwen3moe-q4_k_m.gguf"
    experts = dl.load_model(path).model.layers[0].mlp.experts
    assert {ggml_types.GGML_TYPES[stack.qtype].name for stack in experts.children()} == {"Q4_K", "Q5_0"}
    return path, np.load(path.with_suffix(".npz"))


@pytest.mark.parametrize("n", [1, 7, 40, 100])
def test_mxfp4_experts(oracle, n):
    """gpt-oss with MXFP4 experts beside Q8_0."""
    path = oracle / "tiny" / "gpt-oss_mxfp4.gguf"
    data = np.load(path.with_suffix(".npz"))
    ids, rows = data[f"ids_s{n}"], data[f"rows_s{n}"]
    wanted = data[f"logits_hf_s{n}"]
    assert np.abs(all_logits(path, "fp32", ids)[rows].numpy() - wanted).max() <= FP32_LOGITS * wanted.std()
    found = all_logits(path, "native", ids)[rows].log_softmax(-1)
    wanted = torch.from_numpy(data[f"logits_lcpp_s{n}"]).log_softmax(-1)
    assert (found - wanted).abs().mean() <= NATIVE_LOGPROB


def all_logits(path, mode, ids):
    model = dl.load_model(path, mode=mode)
    with dl.create_session(model, kv_dtype="f32") as session:
        return session.eval(ids.tolist(), logits="all")


def test_dequantized(case):
    path, data = case
    logits = all_logits(path, "fp32", data["ids"])[data["rows"]].numpy()
    wanted = data["logits_dequant_fp32"]
    assert np.abs(logits - wanted).max() <= FP32_LOGITS * wanted.std()


def test_native(case):
    path, data = case
    found = all_logits(path, "native", data["ids"])[data["rows"]].log_softmax(-1)
    wanted = torch.from_numpy(data["logits_lcpp_kv32"]).log_softmax(-1)
    assert (found - wanted).abs().mean() <= NATIVE_LOGPROB
