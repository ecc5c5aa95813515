"""The documentation says what the code is."""

import ast
import importlib.util
import re
import textwrap

import torch
from conftest import ROOT
from families import TINY
from tolerances import FP32_LOGITS, NATIVE_LOGPROB_RANDOM

import dasllama_torch as dl
from dasllama_torch.arch import FAMILIES
from dasllama_torch.ops.ggml_types import GGML_TYPES, WEIGHT_TYPES


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_table_of_families_is_of_these_families():
    script = load_script("write_families")
    text = (ROOT / "docs" / "families.md").read_text()
    assert text.startswith(script.HEAD), "run docs/write_families.py again"
    assert text.endswith(f"{script.specials()}\n"), "run docs/write_families.py again"
    rows = re.findall(r"^\| `([^`]+)` \| `\w+` \| ([\w-]+) \|", text, re.M)
    assert {case for _, case in rows} == set(TINY)
    assert {arch for arch, _ in rows} == set(script.families())


def test_the_worked_example_is_what_the_family_says():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## Adding a family")[1].split("\n## ")[0]
    source = (ROOT / "dasllama_torch" / "arch" / "smollm3.py").read_text()
    registry = (ROOT / "dasllama_torch" / "arch" / "__init__.py").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", section, re.S)
    assert textwrap.indent(textwrap.dedent(block), " " * 8).strip() in source
    for code in ('self.v_proj = Linear(w, "attn_v", G * D, C)', "IGNORED"):
        assert f"`{code}`" in section
        assert code in source
    assert '`"smollm3": ("smollm3", "SmolLM3")`' in section
    assert '"smollm3": ("smollm3", "SmolLM3")' in registry


def test_the_table_of_parity_is_of_these_architectures_and_types():
    script = load_script("write_parity")
    text = (ROOT / "docs" / "parity.md").read_text()
    assert text.startswith(script.HEAD), "run docs/write_parity.py again"
    for mode, (what, unit) in script.MODES.items():
        section = text.split(f"## {mode}\n")[1].split("\n## ")[0]
        assert what in section, "run docs/write_parity.py again"
        head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
        assert set(head[1:]) == set(FAMILIES)
        assert {row[0] for row in rows} == {GGML_TYPES[qtype].name for qtype in WEIGHT_TYPES}
        tolerance = {"fp32": FP32_LOGITS, "native": NATIVE_LOGPROB_RANDOM}[mode]
        for _, *values in rows:
            for arch, value in zip(head[1:], values, strict=True):
                assert float(value) <= tolerance * unit * TINY.get(arch, 1)
    published = text.split("## Published models\n")[1]
    assert script.PUBLISHED in published, "run docs/write_parity.py again"
    figures = {row[0]: float(row[1]) for row in re.findall(r"^\| (\w+) \| ([\d.e+]+) \|", published, re.M)}
    assert figures.keys() == {"smollm2", "gemma3"}
    assert max(figures.values()) <= FP32_LOGITS * 1e6


def test_the_verbs_of_chat_are_there():
    import dasllama_torch as dl
    from dasllama_torch.chat.thinking import ThinkStream

    rows = re.findall(r"^\| `\w+` \| `(\w+)\.(\w+)`", (ROOT / "docs" / "chat.md").read_text(), re.M)
    assert len(rows) == 21
    owners = {"dl": dl, "Chat": dl.Chat, "ThinkStream": ThinkStream}
    for owner, name in rows:
        assert callable(getattr(owners[owner], name)), name


def test_the_page_about_chat_runs(demo_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "chat.md").read_text(), re.S | re.M):
        exec(compile(block, "chat.md", "exec"), namespace)
    first, second, third = capsys.readouterr().out.strip().rsplit("\n", 2)
    assert "Paris" in first
    assert second.endswith(" None")
    assert ast.literal_eval(third).keys() == {"city"}
    chat = namespace["chat"]
    chat.add_user("Thank you.")
    assert namespace["converse"](chat) == chat.messages[-1]["content"]


def test_the_page_about_devices_runs(demo_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASLLAMA_GPU_VRAM_MB", raising=False)
    text = (ROOT / "docs" / "devices.md").read_text()
    namespace: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M):
        exec(compile(block, "devices.md", "exec"), namespace)
    *status, piece, placement, drawn = capsys.readouterr().out.strip().splitlines()
    where = "GPU" if torch.cuda.is_available() else "CPU"
    assert any(line.startswith(f"model.gguf: all on the {where}") for line in status)
    assert placement == f"all on the {where}"
    assert piece
    assert drawn == "True"
    verbs = re.findall(r"^\| `(\w+)\(.*?\)` \|", text, re.M)
    assert len(verbs) == 5
    assert all(callable(getattr(dl, verb)) for verb in verbs)


def test_the_python_of_the_page_on_inspection_runs(demo_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    printed = []
    text = (ROOT / "docs" / "inspect.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, "inspect.md", "exec"), namespace)
        printed.append(capsys.readouterr().out)
    assert printed[1] == "torch.Size([1, 5, 576])\ntorch.Size([1, 8, 576])\n"
    assert printed[2].startswith(" Rome\n")
    assert printed[3] == "torch.Size([1, 9, 3, 8]) None\n"
    assert printed[4].splitlines()[0].endswith("' Paris']")
    assert "layer 29" in printed[5]
    verbs = re.findall(r"^\| (`[^|]*) \| (?!value)", text.split("## Names")[0], re.M)
    for verb in re.findall(r"`([\w.]+)`", " ".join(verbs)):
        name = verb.removeprefix("inspect.")
        assert callable(getattr(dl.inspect if verb != name else dl, name)), verb
