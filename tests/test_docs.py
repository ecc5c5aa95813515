"""The documentation says what the code is."""

import importlib.util
import re

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
