"""Folders for transformers: it loads them, without a word about missing weights, and gives the golden logits."""

import numpy as np
import pytest
import small_llama
import torch
import transformers
from test_export import assert_golden, hf_logits
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.errors import FolderError, UnsupportedModel


@pytest.mark.parametrize("case", ["llama_rope3", "qwen3moe", "gpt-oss", "gemma3", "qwen35"])
def test_a_folder_that_transformers_loads(case, oracle, tmp_path):
    path = oracle / "tiny" / f"{case}.gguf"
    folder = dl.save_safetensors(dl.load_model(path), tmp_path / case, max_shard_bytes=100_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert hf.dtype == torch.float32
    data = np.load(path.with_suffix(".npz"))
    assert_golden(hf_logits(hf.eval(), data), data, case)


def test_one_file_of_halves(oracle, tmp_path):
    model = dl.load_model(oracle / "tiny" / "llama_tied.gguf")
    folder = dl.save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert hf.dtype == torch.bfloat16
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert torch.equal(hf.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())


def test_a_folder_has_the_tokenizer(tmp_path):
    model = dl.load_model(small_llama.write(tmp_path / "small.gguf"))
    folder = dl.save_safetensors(model, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The old lighthouse keeper began to write, in 1911."
    assert tokenizer(text)["input_ids"] == model.encode(text)
    ids = torch.tensor([model.encode(text)])
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = hf(ids).logits
        found = dl.load_model(tmp_path / "small.gguf", mode="fp32")(ids).logits
    assert (found - wanted).abs().max() <= FP32_LOGITS * wanted.std()


def test_a_tower_that_the_file_lacks_is_refused(oracle, tmp_path):
    model = dl.load_model(oracle / "tiny" / "qwen2vl.gguf")
    with pytest.raises(UnsupportedModel, match="has a tower for pictures, which the file lacks; to_hf gives"):
        dl.save_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_comes_back(oracle, tmp_path):
    """Through our own reader: the same model to the bit, or nearly where norms lost and got back their one."""
    for case in ("qwen3moe", "gpt-oss"):
        model = dl.load_model(oracle / "tiny" / f"{case}.gguf", mode="fp32")
        again = dl.load_model(dl.save_safetensors(model, tmp_path / case), mode="fp32")
        ids = torch.arange(20).unsqueeze(0)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_folder_with_weights_is_left_alone(oracle, tmp_path):
    model = dl.load_model(oracle / "tiny" / "llama_tied.gguf")
    dl.save_safetensors(model, tmp_path)
    with pytest.raises(FolderError, match="holds model.safetensors already"):
        dl.save_safetensors(model, tmp_path)


def test_what_is_refused(oracle, tmp_path):
    """Before anything is written."""
    model = dl.load_model(oracle / "tiny" / "llama_tied.gguf")
    file = tmp_path / "a file"
    file.write_text("")
    with pytest.raises(FolderError, match="a file: is a file, wanted a folder or a new name"):
        dl.save_safetensors(model, file)
    with pytest.raises(ValueError, match="dtype is torch.int8, wanted one of torch.float32"):
        dl.save_safetensors(model, tmp_path / "out", dtype=torch.int8)
    with pytest.raises(ValueError, match="max_shard_bytes is 0, wanted 1 or more"):
        dl.save_safetensors(model, tmp_path / "out", max_shard_bytes=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_what_is_interrupted_can_be_done_again(oracle, tmp_path):
    """A value that the type cannot hold shows when its tensor comes; the files before it go."""
    model = dl.load_model(oracle / "tiny" / "llama_tied.gguf")
    weight = model.model.norm.weight.data
    weight[5] = 1e30
    with pytest.raises(UnsupportedModel, match=r"norm.weight holds 1e\+30, beyond torch.float16: wanted bfloat16"):
        dl.to_hf(model, torch.float16)
    with pytest.raises(UnsupportedModel, match="model.norm.weight holds"):
        dl.save_safetensors(model, tmp_path, dtype=torch.float16, max_shard_bytes=1)
    assert not list(tmp_path.iterdir())
    dl.save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    weight[5] = float("inf")  # no more than the file says
    assert dl.to_hf(model, torch.float16)["model.norm.weight"][5] == float("inf")
