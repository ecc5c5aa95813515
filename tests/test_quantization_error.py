"""Errors of packed matrices against float64 sums over what the `gguf` package makes of both files."""

import json
import math

import gguf
import numpy as np
import pytest

import dasllama_torch as dl
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops.ggml_types import GGML_TYPES


def values(path):
    """Of each matrix of a file, f64, by GGUF name."""
    found = {}
    for tensor in GGUFFile(path).tensors.values():
        if len(tensor.shape) > 1 and GGML_TYPES[tensor.qtype].is_weight:
            data = gguf.quants.dequantize(np.array(tensor.data), gguf.GGMLQuantizationType(tensor.qtype))
            found[tensor.name.removesuffix(".weight")] = data.astype(np.float64).ravel()
    return found


def formula(found, wanted):
    error = found - wanted
    rms = math.sqrt((error**2).mean() / (wanted**2).mean())
    cosine = (found * wanted).sum() / math.sqrt((found**2).sum() * (wanted**2).sum())
    return rms, abs(error).max(), cosine


@pytest.mark.parametrize("name", ["llama", "qwen35moe", "gpt-oss", "gemma4_e"])
def test_against_the_parent(name, oracle, q8_0):
    """Rows in another order, columns in another order, stacks of experts: the figures are those of the files."""
    parent = oracle / "tiny" / f"{name}.gguf"
    model = dl.load_model(q8_0(name))
    found, ours, theirs = dl.quantization_error(model, parent), values(q8_0(name)), values(parent)
    by_path = {row.name: row for row in found.tensors}
    assert len(by_path) > 8
    for path, row in by_path.items():
        module = model.get_submodule(path)
        rms, largest, cosine = formula(ours[module.gguf_name], theirs[module.gguf_name])
        assert row.n == ours[module.gguf_name].size
        assert row.rms == pytest.approx(rms, rel=1e-6)
        assert row.largest == pytest.approx(largest, rel=1e-6)
        assert row.cosine == pytest.approx(cosine, abs=1e-9)
        assert row.sqnr == pytest.approx(-20 * math.log10(rms), abs=1e-4) if rms else row.sqnr == math.inf
    for layer in found.layers:
        names = [model.get_submodule(row.name).gguf_name for row in found.tensors if row.layer == layer.layer]
        rms, largest, cosine = formula(*(np.concatenate([side[n] for n in names]) for side in (ours, theirs)))
        assert (layer.rms, layer.largest) == (pytest.approx(rms, rel=1e-6), pytest.approx(largest, rel=1e-6))
        assert layer.cosine == pytest.approx(cosine, abs=1e-9)
    assert [layer.layer for layer in found.layers] == [None, *range(len(model.config.layers))]
    again = dl.quantization_error(model, dl.load_model(parent))
    assert again == found


@pytest.mark.parametrize("name", ["llama", "qwen35"])  # the latter's file has rows and columns in another order
def test_against_itself_and_a_state_dict(name, load, q8_0):
    model, coarse = load(name), dl.load_model(q8_0(name))
    assert all(row.rms == 0 and row.sqnr == math.inf for row in dl.quantization_error(model, model).tensors)
    weights = {f"{path}.weight": m.weight for path, m in model.named_modules() if hasattr(m, "qweight")}
    assert dl.quantization_error(coarse, weights) == dl.quantization_error(coarse, model)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"the reference has no model.layers.1.mlp.up_proj.weight, wanted one of shape"
    ):
        dl.quantization_error(coarse, weights)
    with pytest.raises(ValueError, match="shape"):
        dl.quantization_error(coarse, load("qwen2moe"))


def test_what_it_shows(load, q8_0):
    found = dl.quantization_error(dl.load_model(q8_0("gemma3")), load("gemma3"))
    lines = str(found).splitlines()
    assert any("model.layers.1.mlp.down_proj" in line and "Q8_0" in line for line in lines)
    assert any("layer 3" in line for line in found.table("layer").text().splitlines())
    assert "<table>" in found._repr_html_()
    data = json.loads(json.dumps(found.to_dict()))
    assert data["tensors"][0]["name"] == "model.embed_tokens"
    exact = dl.quantization_error(load("gemma3"), load("gemma3"))
    assert json.loads(json.dumps(exact.to_dict(), allow_nan=False))["layers"][0]["sqnr"] is None
    assert 30 < data["layers"][1]["sqnr"] < 60
    assert sum(row["n"] for row in data["layers"]) == sum(row["n"] for row in data["tensors"])
    names = [row.name for row in found.tensors]
    assert "lm_head" not in names  # it is the embedding table


def test_rows_at_a_time(load, q8_0, monkeypatch):
    model = dl.load_model(q8_0("qwen3moe"))
    wanted = dl.quantization_error(model, load("qwen3moe"))
    monkeypatch.setattr("dasllama_torch.inspect.quantization.ROWS", 7)
    for found, other in zip(dl.quantization_error(model, load("qwen3moe")).tensors, wanted.tensors, strict=True):
        assert (found.n, found.largest) == (other.n, other.largest)
        assert found.rms == pytest.approx(other.rms, rel=1e-9)
