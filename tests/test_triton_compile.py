"""Every Triton kernel compiles ahead of time for NVIDIA and AMD, without a GPU."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from triton_device import DEVICE  # noqa: F401  (skips where Triton is absent)


@pytest.mark.parametrize(("target", "types"), [("sm_80", "MXFP4"), ("sm_90", "Q4_K"), ("gfx942", "Q6_K")])
def test_every_kernel_compiles(target, types, tmp_path):
    """Each target has types of its own, so that the ways of reading words are all compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(ROOT / "tests/compile_kernels.py"), "--targets", target, "--types", types]
    run = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = {line.split()[0] for line in run.stdout.splitlines()}
    sources = [path.read_text("utf-8") for path in (ROOT / "triton_kernels").glob("*.py")]
    assert compiled == {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)}
