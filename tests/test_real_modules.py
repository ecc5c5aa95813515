"""Published models at every module path, against transformers with their dequantized weights.

What is computed in f32 rounds, in transformers as in ours, and what is large somewhere (the first token's stream) makes
roundings that show elsewhere. So the truth is transformers in float64, from which both are measured.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from exact import called, distances, in_double, outputs, paths_of
from tolerances import FP32_LOGITS, FP32_PEER
from transformers.initialization import no_init_weights

import dasllama_torch as dl

TEXTS = ("The old lighthouse keeper began to write down everything he remembered about the storm.", "A cat sat down,")

# As published with the weights.
SMOLLM2 = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, attn_implementation="eager",
)  # fmt: skip
GEMMA3 = transformers.Gemma3TextConfig(
    vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=32768, sliding_window=512,
    query_pre_attn_scalar=256, tie_word_embeddings=True, attn_implementation="eager",
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
)  # fmt: skip
MODELS = {
    "smollm2": ("demo_model", transformers.LlamaForCausalLM, SMOLLM2),
    "gemma3": ("gemma_model", transformers.Gemma3ForCausalLM, GEMMA3),
}


class Runs(NamedTuple):
    """ids: of each text. paths: of all modules. ours, theirs, exact: what each module gives for each text in our fp32
    mode, and in transformers in f32 and in f64."""

    name: str
    model: Any
    ids: list[list[int]]
    paths: set[str]
    ours: list[dict]
    theirs: list[dict]
    exact: list[dict]


@pytest.fixture(scope="module", params=MODELS)
def runs(request):
    fixture, hf_class, config = MODELS[request.param]
    model = dl.load_model(request.getfixturevalue(fixture), mode="fp32")
    with no_init_weights():
        hf = hf_class(config).eval()
    hf.load_state_dict(dl.to_hf(model))
    ids = [model.encode(text) for text in TEXTS]
    ids = [each[: len(each) - 1 + len(each) % 2] for each in ids]  # odd numbers of tokens
    paths = paths_of(model, hf)

    def each(root):
        return [outputs(root, paths, input_ids=torch.tensor([text]), use_cache=False) for text in ids]

    ours, theirs = each(model), each(hf)
    with in_double(hf):
        exact = each(hf)
    return Runs(request.param, model, ids, paths, ours, theirs, exact)


def apart(found: list[dict], exact: list[dict]) -> dict[tuple[int, str], float]:
    """`distances` of all texts, by text and place."""
    texts = enumerate(zip(found, exact, strict=True))
    return {(i, place): d for i, (a, b) in texts for place, d in distances(a, b).items() if place in called(a)}


def test_every_module(runs):
    found = apart(runs.ours, runs.exact)
    assert runs.exact[0]["logits"].dtype == torch.float64
    for i, exact in enumerate(runs.exact):
        assert {(i, place) for place in called(exact)} <= found.keys()
    assert {place: d for place, d in found.items() if not d <= FP32_LOGITS} == {}


def test_no_farther_than_transformers(runs, measured):
    """In f32, on average. Where each is worst is chance, and theirs another on another machine."""
    figures = []
    for side, found in (("ours", runs.ours), ("transformers", runs.theirs)):
        distance = apart(found, runs.exact).values()
        figures.append((max(distance), math.exp(sum(math.log(d) for d in distance if d) / len(distance))))
        measured(runs.name, f"published largest {side}", figures[-1][0])
        measured(runs.name, f"published typical {side}", figures[-1][1])
    (_, ours), (_, theirs) = figures
    assert ours <= FP32_PEER * theirs


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(runs, side):
    """Each of its rows is at every path what the text alone gives."""
    lengths = [len(ids) for ids in runs.ids]
    n = max(lengths)
    assert min(lengths) < n
    ids, mask = torch.zeros(2, n, dtype=torch.int64), torch.zeros(2, n, dtype=torch.int64)
    for row, text in enumerate(runs.ids):
        at = slice(n - len(text), n) if side == "left" else slice(len(text))
        ids[row, at], mask[row, at] = torch.tensor(text), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = outputs(runs.model, runs.paths, input_ids=ids, attention_mask=mask, position_ids=positions)
    for row, exact in enumerate(runs.exact):
        real = {place: output[row : row + 1, mask[row].bool()] for place, output in found.items()}
        assert {place: d for place, d in distances(real, exact).items() if not d <= FP32_LOGITS} == {}
