"""The command line: what it prints, and that wrong input is one line on standard error and exit code 2."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from dasllama_torch import cli, hub
from dasllama_torch.gguf.writer import write_gguf

GOLDEN = json.loads((ROOT / "tests/golden/smollm2-135m-instruct-q4_1.json").read_text())
F32, Q8_0 = 0, 8  # ids of ggml's types
COMMAND = [sys.executable, "-m", "dasllama_torch.cli"]


@pytest.fixture
def small(tmp_path) -> Path:
    """A readable file of an architecture that nobody implements, with values that are awkward to print."""
    path = tmp_path / "small.gguf"
    metadata = {
        "general.name": "esc \x1b[31m red\nnext",
        "general.tags": ["a", "b"],
        "nosuch.block_count": 2,
        "nosuch.scale": float("nan"),
        "nosuch.widths": np.arange(40, dtype=np.int32),
        "other.flag": True,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "x"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.chat_template": "{{ bos_token }}\n\t{{ messages }}\x07",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    tensors = {
        "token_embd.weight": (np.zeros((3, 64), np.float32), F32),
        "blk.0.ffn_down.weight": (np.zeros((2, 5, 34), np.uint8), Q8_0),
    }
    write_gguf(path, "nosuch", metadata, tensors)
    return path


def run(*args: str) -> int:
    return cli.main([str(arg) for arg in args])


def fails(capsys, *args: str) -> str:
    """The line that a failing command prints, without `error: `."""
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["--nosuch"], "No such option: --nosuch"),
        (["run", "m.gguf", "x", "--nosuch"], "No such option: --nosuch"),
        (["run"], "Missing argument"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["run", "m.gguf", "x", "--max-tokens", "0"], "--max-tokens"),
        (["run", "m.gguf", "x", "--max-tokens", "many"], "--max-tokens"),
        (["run", "m.gguf", "x", "--ctx", "0"], "--ctx"),
        (["run", "m.gguf", "x", "--threads", "0"], "--threads"),
        (["run", "m.gguf", "x", "--mode", "q5"], "'q5' is not one of 'native', 'fp32', 'q8', 'q4_0'"),
        (["run", "m.gguf", "x", "--kv", "q4_0"], "'q4_0' is not one of 'f16', 'f32', 'q8_0', 'tq4'"),
        (["run", "m.gguf", "x", "--top-p", "1.5"], "top_p is 1.5, wanted in (0, 1]"),
        (["run", "m.gguf", "x", "--min-p", "-0.1"], "min_p is -0.1, wanted in [0, 1]"),
        (["run", "m.gguf", "x", "--top-k", "-1"], "top_k is -1, wanted 0 or more"),
        (["run", "m.gguf", "x", "--temp", "nan"], "temp is nan, wanted a finite number"),
        (["run", "m.gguf", "x", "--repeat-penalty", "0"], "repetition_penalty is 0.0, wanted above 0"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, args, wanted):
    assert wanted in fails(capsys, *args)


@pytest.mark.parametrize("command", ["run", "inspect", "tokenize"])
def test_a_wrong_model_is_one_line(capsys, tmp_path, command):
    text = [] if command == "inspect" else ["text"]
    assert "'none.gguf' is no file" in fails(capsys, command, "none.gguf", *text)
    assert "smollm2-135m-instruct, gemma-3-270m" in fails(capsys, command, "nosuch-model", *text)
    assert "is no file" in fails(capsys, command, tmp_path, *text)
    other = tmp_path / "two\nlines.txt"
    other.write_text("no model at all")
    assert "lines.txt: not a GGUF file: it starts with b'no m'" in fails(capsys, command, other, *text)
    other.write_bytes(b"GGUF\x03\0\0\0")
    assert "truncated" in fails(capsys, command, other, *text)


def test_pull_of_an_unknown_name_is_one_line(capsys):
    assert "'nosuch' is no file, no hub reference owner/repo:file.gguf" in fails(capsys, "pull", "nosuch")


def test_a_folder_that_cannot_be_written_is_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DASLLAMA_HOME", str(tmp_path / "file"))
    assert "Not a directory" in fails(capsys, "pull", "smollm2")


def test_an_architecture_that_is_not_implemented_is_one_line(capsys, small):
    assert "architecture 'nosuch' is not implemented; implemented: " in fails(capsys, "run", small, "text")


@pytest.mark.parametrize(
    ("device", "wanted"),
    [("nosuch", "is unknown, wanted 'cpu', 'cuda' or 'auto'"), ("meta", "has no kernels"), ("cuda:99", "is not there")],
)
def test_a_device_that_cannot_serve_is_one_line(capsys, small, device, wanted):
    for command in (
        ["run", small, "text"],
        ["bench", small],
        ["compare", small, small],
        ["eval", small, "-t", __file__],
    ):
        assert f"device {device!r} {wanted}" in fails(capsys, *command, "--device", device)


def test_a_profile_is_of_the_cpu(capsys, small):
    assert "--device is cuda" in fails(capsys, "bench", small, "--profile", "--device", "cuda")


def test_text_for_a_file_without_a_vocabulary_is_one_line(capsys, oracle):
    for command in ("run", "tokenize"):
        assert "no vocabulary" in fails(capsys, command, oracle / "tiny/llama.gguf", "text")


def test_text_that_is_not_utf8_is_one_line(capsys, monkeypatch, small):
    pipe(monkeypatch, b"ab\xff")
    assert "standard input is not UTF-8 text: byte 2 is 0xff" in fails(capsys, "tokenize", small)


def test_help_and_version(capsys):
    assert run() == run("--help") == run("-h") == 0
    out = capsys.readouterr().out
    assert out.count("Usage: dasllama-torch") == 3
    assert run("run", "--help") == 0
    assert "--repeat-penalty" in capsys.readouterr().out
    assert run("--version") == 0
    assert capsys.readouterr().out[0].isdigit()


def test_choices_are_those_of_the_api():
    from dasllama_torch import api
    from dasllama_torch.cli.options import Mode

    assert tuple(mode.value for mode in Mode) == api.MODES


def test_list_and_pull(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DASLLAMA_HOME", str(tmp_path))
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [model.name for model in hub.CATALOGUE]
    assert all(line.endswith("not pulled") for line in lines)
    assert "apache-2.0" in lines[0]
    monkeypatch.setattr(hub, "is_pulled", lambda model: True)
    assert run("list") == run("pull", "smollm2") == 0
    out = capsys.readouterr().out
    assert out.count(str(hub.CATALOGUE[0].path)) == 2


def test_inspect_json_of_every_golden_file(capsys, oracle):
    """Of all architectures: those that are implemented and those that are not."""
    files = sorted((oracle / "tiny").glob("*.gguf"))
    assert len(files) > 20
    for path in files:
        wanted = json.loads(path.with_suffix(".json").read_text())
        assert run("inspect", path, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["architecture"] == wanted["arch"]
        assert found["bytes"] == path.stat().st_size
        tensors = {t["name"]: [t["type"], *reversed(t["shape"])] for t in found["tensors"]}
        assert tensors == wanted["gguf_tensors"]
        weights = sum(int(np.prod(shape)) for _, *shape in wanted["gguf_tensors"].values())
        assert found["parameters"] == weights
        # as the golden JSON tells them, f32 values in more digits than the file has
        shown = {k: v for k, v in found["metadata"].items() if isinstance(v, int | float | bool)}
        assert shown == {k: v for k, v in wanted["gguf_metadata"].items() if k in shown}


def test_inspect_bits_per_weight(capsys, oracle):
    for name, bits in {"q4_k": 4.5, "iq2_xxs": 2.0625, "mxfp4": 4.25, "q8_0": 8.5}.items():
        assert run("inspect", oracle / f"quant/llama-{name}.gguf", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        kinds = {t["type"]: t["bits_per_weight"] for t in found["tensors"]}
        assert kinds == {"F32": 32, name.upper(): bits}
        assert bits < found["bits_per_weight"] < bits + 1
        assert found["types"][name.upper()]["tensors"] == sum(t["type"] == name.upper() for t in found["tensors"])
        assert sum(kind["bytes"] for kind in found["types"].values()) < found["bytes"]


def test_inspect_json_of_awkward_values(capsys, small):
    assert run("inspect", small, "--json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["metadata"]["general.name"] == "esc \x1b[31m red\nnext"
    assert found["metadata"]["general.tags"] == ["a", "b"]
    assert found["metadata"]["nosuch.scale"] == "nan"
    assert found["metadata"]["nosuch.widths"] == "i32[40]"
    assert found["special_tokens"] == {"bos": {"id": 0, "text": "<s>"}, "eos": {"id": 7, "text": None}}
    assert found["chat_templates"] == {
        "tokenizer.chat_template": "{{ bos_token }}\n\t{{ messages }}\x07",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    assert found["tensors"][1] == {
        "name": "blk.0.ffn_down.weight", "shape": [2, 5, 32], "type": "Q8_0", "bits_per_weight": 8.5, "bytes": 340,
    }  # fmt: skip


def test_inspect_for_people(capsys, small):
    assert run("inspect", small) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "\x07" not in text
    headings = [line for line in lines if line and not line.startswith((" ", "\t"))][5:]
    wanted = ["general", "hyper-parameters", "tokenizer", "other keys", "special tokens", "types", "tensors"]
    assert headings[:7] == wanted
    assert "architecture   'nosuch'" in lines
    assert "model          not supported: architecture 'nosuch' is not implemented" in lines
    assert "\t{{ messages }}\\x07" in lines
    tensor = next(line for line in lines if "blk.0.ffn_down.weight" in line)
    assert tensor.split() == ["blk.0.ffn_down.weight", "2", "x", "5", "x", "32", "Q8_0", "8.5", "bits", "0.00", "MB"]


def test_tokenize_needs_no_torch(demo_model):
    code = (
        "import sys; from dasllama_torch.cli import main\n"
        "assert main(['tokenize', sys.argv[1], 'a text']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, demo_model], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_tokenize(capsys, monkeypatch, demo_model):
    for prompt in GOLDEN["prompts"]:
        assert run("tokenize", demo_model, prompt["text"], "--parse-special", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["ids"] == prompt["ids"]
    # text from a pipe, without its last line break; a special token as text and as itself
    pipe(monkeypatch, b"Hello, world\n")
    assert run("tokenize", demo_model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["'Hello'", "','", "' world'"]
    assert run("tokenize", demo_model, "<|im_end|>", "--parse-special", "--no-special") == 0
    assert capsys.readouterr().out.split() == ["2", "'<|im_end|>'"]
    assert run("tokenize", demo_model, "<|im_end|>", "--no-special") == 0
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_no_special_leaves_out_bos(capsys, gemma_model):
    ids = {}
    for option in ("--special", "--no-special"):
        assert run("tokenize", gemma_model, "Hello", "--json", option) == 0
        ids[option] = json.loads(capsys.readouterr().out)["ids"]
    assert ids["--special"] == [2, *ids["--no-special"]]


def test_run_streams_what_generate_yields(capsys, monkeypatch, demo_model):
    import dasllama_torch as dl

    model = dl.load_model(demo_model)
    prompt = GOLDEN["prompts"][0]["text"]
    for options, params in (
        ([], dl.SamplingParams()),
        (
            [
                "--temp",
                "0.8",
                "--top-k",
                "40",
                "--top-p",
                "0.95",
                "--min-p",
                "0.02",
                "--repeat-penalty",
                "1.1",
                "--seed",
                "3",
            ],
            dl.SamplingParams(temp=0.8, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1, seed=3),
        ),
    ):
        with dl.create_session(model) as session:
            wanted = "".join(piece for _, piece in session.generate(model.encode(prompt), params, max_tokens=12))
        assert run("run", demo_model, prompt, "-n", "12", *options) == 0
        out, err = capsys.readouterr()
        assert out == wanted + "\n"
        assert f"prompt: {len(model.encode(prompt))} tokens, " in err
        assert "generated: 12 tokens, " in err
        assert err.endswith("ended by length\n")
    pipe(monkeypatch, prompt.encode() + b"\n")
    assert run("run", demo_model, "-n", "12", "--seed", "3", *options) == 0
    assert capsys.readouterr().out == wanted + "\n"


def test_run_says_what_does_not_fit(capsys, demo_model):
    assert "n_ctx=3" in fails(capsys, "run", demo_model, "one two three four five six", "--ctx", "3")
    assert "the prompt is empty" in fails(capsys, "run", demo_model, "")


def test_run_options_reach_the_model(capsys, monkeypatch, demo_model):
    import torch

    import dasllama_torch as dl

    seen = SimpleNamespace()
    load, create = dl.load_model, dl.create_session

    def load_model(path, mode, device, progress):
        seen.mode, seen.device = mode, device
        return load(path, mode=mode)

    def create_session(model, kv_dtype, n_ctx, on_full):
        seen.kv, seen.ctx, seen.on_full = kv_dtype, n_ctx, on_full
        return create(model, kv_dtype=kv_dtype, n_ctx=n_ctx, on_full=on_full)

    monkeypatch.setattr(dl, "load_model", load_model, raising=False)
    monkeypatch.setattr(dl, "create_session", create_session, raising=False)
    threads = torch.get_num_threads()
    try:
        options = ["--mode", "fp32", "--kv", "f32", "--ctx", "9", "--threads", "1"]
        assert run("run", demo_model, "The capital", *options) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert vars(seen) == {"mode": "fp32", "device": "cpu", "kv": "f32", "ctx": 9, "on_full": "error"}
    assert "ended by context" in capsys.readouterr().err
    assert run("run", demo_model, "The capital", "--ctx", "9", "--shift", "--max-tokens", "20") == 0
    assert "generated: 20 tokens" in capsys.readouterr().err
    assert seen.on_full == "shift"


def start(*args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        # A shell lets its background jobs ignore it, and Python then does not listen for it either.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_ends_a_run_cleanly(demo_model):
    with start("run", demo_model, "Once upon a time", "-n", "4000") as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err.decode().startswith("prompt: ")
    assert "ended by interrupt" in err.decode()
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("args", [["run", "{}", "Once upon a time", "-n", "4000"], ["inspect", "{}"]])
def test_a_reader_that_leaves_ends_it_quietly(demo_model, args):
    with start(*(arg.format(demo_model) for arg in args)) as process:
        process.stdout.close()  # before the first byte: a short text would fit in the pipe, and nobody would be missed
        err = process.stderr.read()
    assert process.returncode == 141
    assert err == b""


def test_a_terminal_that_lacks_a_character_is_no_error(small):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*COMMAND, "tokenize", "größe.gguf", "x"], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: 'gr\\xf6\\xdfe.gguf' is no file")


def test_run_writes_what_a_constraint_admits_and_ends_before_a_stop_string(capsys, tmp_path, demo_model):
    schema, gbnf, lark = (tmp_path / name for name in ("s.json", "g.gbnf", "g.lark"))
    schema.write_text('{"enum": ["red", "green"]}')
    gbnf.write_text('root ::= "yes" | "no"')
    lark.write_text('start: "yes" | "no"')
    for options, wanted in (
        (["--json-schema", str(schema)], {'"red"', '"green"'}),
        (["--grammar", str(gbnf)], {"yes", "no"}),
        (["--grammar", str(lark)], {"yes", "no"}),
        (["--regex", "1[0-9]{3}"], {str(year) for year in range(1000, 2000)}),
    ):
        assert run("run", demo_model, "The answer is", "-n", "20", *options) == 0
        out, err = capsys.readouterr()
        assert out.removesuffix("\n") in wanted
        assert err.endswith("ended by constraint\n")
    assert run("run", demo_model, "The capital of France is", "-n", "20", "--stop", "is", "--stop", "ari") == 0
    out, err = capsys.readouterr()
    assert out == " P\n"
    assert err.endswith("ended by stop\n")
    assert "wanted one of" in fails(capsys, "run", demo_model, "x", "--regex", "a", "--grammar", str(gbnf))
    assert "refused" in fails(capsys, "run", demo_model, "x", "--regex", "(")
    gbnf.write_bytes(b"root ::= \xff")
    assert "g.gbnf is not UTF-8 text: byte 9 is 0xff" in fails(capsys, "run", demo_model, "x", "--grammar", str(gbnf))
    assert "No such file" in fails(capsys, "run", demo_model, "x", "--json-schema", str(tmp_path / "none.json"))
