"""The commands compare, eval and requantize: what they print, and their exit codes."""

import json

import pytest
import small_llama

import dasllama_torch as dl
from dasllama_torch import cli
from dasllama_torch.cli.exits import BAD_INPUT, OVER_TOLERANCE
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops.ggml_types import Q8_0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    right = small_llama.write(folder / "right.gguf")
    wrong = small_llama.write(folder / "wrong.gguf", **{"rope.freq_base": 10100.0})
    text = folder / "text.txt"
    text.write_text("The old lighthouse keeper began to write down everything he remembered. " * 6, "utf-8")
    return folder, right, wrong, text


def run(*args) -> int:
    return cli.main([str(arg) for arg in args])


def test_compare_tells_by_its_exit_code(files, capsys):
    _, right, wrong, _ = files
    assert run("compare", right, right) == 0
    assert "all 35 modules are within 0.001 of their spread" in " ".join(capsys.readouterr().out.split())
    assert run("compare", wrong, right, "--prompt", "A storm over the sea") == OVER_TOLERANCE == 1
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn.rope" in out
    assert "v_proj" not in out
    assert run("compare", wrong, right, "--tolerance", "10", "--all") == 0
    assert "v_proj" in capsys.readouterr().out


def test_compare_prints_json(files, capsys):
    _, right, wrong, _ = files
    assert run("compare", wrong, right, "--json") == OVER_TOLERANCE
    figures = json.loads(capsys.readouterr().out)
    assert figures["first"] == "model.layers.0.self_attn.rope"
    assert len(figures["kl"]) == len(figures["ids"])


def test_compare_modes(files, capsys):
    _, right, _, _ = files
    assert run("compare", right, right, "--mode", "q8", "--other-mode", "fp32") == OVER_TOLERANCE
    assert run("compare", right, right, "--mode", "q8", "--other-mode", "fp32", "--tolerance", "0.5") == 0


def test_compare_with_a_folder_of_transformers(files, capsys):
    folder, right, wrong, _ = files
    dl.save_safetensors(dl.load_model(right), folder / "hf")
    capsys.readouterr()
    assert run("compare", right, folder / "hf") == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert run("compare", wrong, folder / "hf") == OVER_TOLERANCE
    (folder / "empty").mkdir(exist_ok=True)
    capsys.readouterr()
    assert run("compare", right, folder / "empty") == BAD_INPUT
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_eval(files, capsys):
    _, right, wrong, text = files
    assert run("eval", right, "--text", text, "--ctx", "16", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["nll"]["low"] < alone["nll"]["mean"] < alone["nll"]["high"]
    assert run("eval", wrong, "-t", text, "--against", right, "--ctx", "16", "--windows", "3") == 0
    out, err = capsys.readouterr()
    assert "KL divergence" in out
    assert err == ""
    assert run("eval", right, "-t", text, "--ctx", "16", "--convention", "hf", "--stride", "8") == 0


def test_eval_says_what_is_wrong(files, capsys):
    folder, right, _, text = files
    assert run("eval", right, "-t", text, "--ctx", "16", "--stride", "8") == BAD_INPUT
    assert "stride is of convention 'hf'" in capsys.readouterr().err
    assert run("eval", right, "-t", text, "--ctx", "200") == BAD_INPUT
    assert "tokens, wanted at least 200" in capsys.readouterr().err
    assert run("eval", right, "-t", folder / "nosuch.txt") == BAD_INPUT
    assert "nosuch.txt" in capsys.readouterr().err


def test_requantize(files, capsys):
    folder, right, _, _ = files
    out = folder / "out.gguf"
    assert (
        run("requantize", right, out, "--type", "Q8_0", "--tensor", "*.ffn_down*=Q4_0", "--tensor", "*attn_v*=F16") == 0
    )
    text = capsys.readouterr().out
    assert "blk.1.ffn_down.weight" in text
    file = GGUFFile(out)
    assert file.tensors["token_embd.weight"].qtype == Q8_0
    assert run("requantize", right, out, "--tensor", "token_embd.weight=Q8_0", "--json") == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["before"], change["after"]) == ("F32", "Q8_0")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--tensor", "Q8_0"], "--tensor is 'Q8_0', wanted PATTERN=TYPE"),
        (["--type", "Q3_S"], "cannot write type 'Q3_S'; possible: F32"),
        (["--tensor", "nosuch*=Q8_0"], "has no tensor 'nosuch*'"),
    ],
)
def test_requantize_says_what_is_wrong(files, capsys, args, wanted):
    folder, right, _, _ = files
    assert run("requantize", right, folder / "never.gguf", *args) == BAD_INPUT
    assert wanted in capsys.readouterr().err
    assert not (folder / "never.gguf").exists()
