"""Out of the package: state dicts, configs and folders that transformers takes, and gives the golden logits with."""

import json

import hf_twin
import numpy as np
import pytest
import torch
import transformers
from families import TINY
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.config import RopeSpec
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.export.hf_config import _llama3, hf_class, hf_config
from dasllama_torch.export.weights import hf_tensors

SEES = ("qwen2vl", "qwen3vl", "qwen3vlmoe")


def hf_logits(hf, data, n=40):
    with torch.no_grad():
        return hf(input_ids=torch.from_numpy(data[f"ids_s{n}"]).long().unsqueeze(0)).logits[0, data[f"rows_s{n}"]]


def assert_golden(found, data, case, n=40):
    wanted = data[f"logits_hf_s{n}"]
    assert np.abs(found.numpy() - wanted).max() <= FP32_LOGITS * TINY[case] * wanted.std()


@pytest.mark.parametrize("case", TINY)
def test_config_and_weights_make_transformers_model(case, oracle):
    """Of the golden case nothing is used but its file; the logits are those of the model that the file came from."""
    path = oracle / "tiny" / f"{case}.gguf"
    data = np.load(path.with_suffix(".npz"))
    model = dl.load_model(path)
    config = transformers.AutoConfig.for_model(**hf_config(model))
    if case in SEES:
        config.vision_config.depth = 1  # it has no weights to give
    hf = getattr(transformers, hf_class(model.config.arch))(config).eval()
    assert config.architectures == [type(hf).__name__]
    missing, unexpected = hf.load_state_dict(dl.to_hf(model), strict=case not in SEES)
    assert not unexpected
    assert all(name.startswith("model.visual.") for name in missing)
    for n in (40, 300) if case == "phi3_longrope" else (40, 100):
        assert_golden(hf_logits(hf, data, n), data, case, n)


@pytest.mark.parametrize("kind", hf_twin.KINDS)
def test_weights_are_the_very_ones(kind, tmp_path):
    """Rows in transformers' order, norms without the one."""
    twin = hf_twin.make(kind, tmp_path)
    wanted, found = twin.hf.state_dict(), dl.to_hf(dl.load_model(twin.path))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if kind == "gemma3" and "norm" in name:
            assert torch.equal(tensor, (wanted[name] + 1) - 1), name
        else:
            assert torch.equal(tensor, wanted[name]), name
    assert (found["lm_head.weight"] is found["model.embed_tokens.weight"]) == twin.hf.config.tie_word_embeddings


def test_tensors_come_one_by_one(tmp_path):
    twin = hf_twin.make("llama", tmp_path)
    tensors = hf_tensors(dl.load_model(twin.path))
    first = next(tensors)
    assert iter(tensors) is tensors
    assert first[1].dtype == torch.float32
    halves = dl.to_hf(dl.load_model(twin.path), torch.bfloat16)
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("theta", "dim", "factor", "high", "original"),
    [(500000.0, 128, 8.0, 4.0, 8192), (500000.0, 64, 32.0, 4.0, 8192), (10000.0, 64, 4.0, 2.0, 2048)],
)
def test_parameters_of_llama3_are_found_again(theta, dim, factor, high, original):
    """From the divisors in f32, as a converter computes them: those of Llama 3.1, 3.2 and made-up ones."""
    config = transformers.LlamaConfig(
        head_dim=dim,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": high, "original_max_position_embeddings": original,
        },
    )  # fmt: skip
    scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)[0]
    plain = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    spec = RopeSpec(dim=dim, theta=theta, freq_factors=tuple((plain / scaled).tolist()))
    found = _llama3(spec, "a file")
    assert found == {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}


def test_divisors_without_a_rule_are_refused():
    spec = RopeSpec(dim=16, theta=1e4, freq_factors=(1.0, 2.0, 1.5, 3.0, 7.0, 8.0, 8.0, 8.0))
    with pytest.raises(UnsupportedModel, match="follow no rule"):
        _llama3(spec, "a file")


def test_config_states_the_special_tokens(demo_model):
    config = hf_config(dl.load_model(demo_model))
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["model_type"] == "llama"
    json.dumps(config)
