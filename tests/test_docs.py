"""The documentation says what the code is."""

import importlib.util
import re
import textwrap

from conftest import ROOT
from families import TINY


def test_the_table_of_families_is_of_these_families():
    spec = importlib.util.spec_from_file_location("write_families", ROOT / "docs" / "write_families.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
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
