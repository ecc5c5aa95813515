"""The documentation says what the code is."""

import importlib.util
import re
import textwrap

from conftest import ROOT
from families import TINY
from tolerances import FP32_LOGITS, NATIVE_LOGPROB_RANDOM

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
