"""Every Triton kernel compiles ahead of time for NVIDIA and AMD, without a GPU."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from triton_device import DEVICE  # noqa: F401  (skips where Triton is absent)


def _compile(options, cache):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    program = [sys.executable, str(ROOT / "tests/compile_kernels.py"), *options]
    return subprocess.run(program, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.parametrize("target", ["sm_89", "gfx942"])
def test_attention_of_wide_heads_has_room(target, tmp_path):
    """On the cards that give a program the least shared memory."""
    run = _compile(["--targets", target, "--attention"], tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert {line.split()[0] for line in run.stdout.splitlines()} >= {"attend_row_kernel", "paged_attention_kernel"}


@pytest.mark.parametrize(("target", "types"), [("sm_80", "MXFP4"), ("sm_90", "Q4_K"), ("gfx942", "Q6_K")])
def test_every_kernel_compiles(target, types, tmp_path):
    """Each target has types of its own, so that the ways of reading words are all compiled."""
    run = _compile(["--targets", target, "--types", types], tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = {line.split()[0] for line in run.stdout.splitlines()}
    sources = [path.read_text("utf-8") for path in (ROOT / "triton_kernels").glob("*.py")]
    assert compiled == {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)}
