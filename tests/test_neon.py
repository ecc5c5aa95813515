"""The NEON kernels, and the scalar ones on aarch64, give the bits of this processor's: cross-compiled without torch,
they run under qemu. On an aarch64 machine every test of an op covers them, by the fixture `isa`."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, absent
from packed import TYPES, random_rows

from dasllama_torch.ops import registry

CROSS, HOST, QEMU = "aarch64-linux-gnu-g++", os.environ.get("CXX", "c++"), "qemu-aarch64"
# As setup.py has them, but for the level of optimization: no bit depends on it.
FLAGS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
CASES = ROOT / "tests" / "native" / "kernel_cases.cpp"
# What there is for aarch64, and processors known to qemu that should get it: only the second has dot products.
ISAS = {"scalar": "cortex-a53", "neon": "neoverse-n1"}

pytestmark = pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="the other tests run NEON here")


def compile_all(folder: Path) -> None:
    """cases, for aarch64, with all kernels linked in, and cases.so, for this process."""
    names = ["dispatch", "scratch", *(f"kernels/{part}_{isa}" for part in ("kernels", "matmul_int") for isa in ISAS)]
    sources = [CASES, *(ROOT / "ops" / "csrc" / f"{name}.cpp" for name in names)]
    objects = {source: folder / f"{source.stem}.o" for source in sources}
    commands = [
        [CROSS, *FLAGS, "-DKERNEL_CASES_MAIN", "-c", str(source), "-o", str(to)] for source, to in objects.items()
    ]
    commands.append([HOST, *FLAGS, "-shared", "-fPIC", str(CASES), "-o", str(folder / "cases.so")])
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait() == 0
    subprocess.run([CROSS, "-static", *map(str, objects.values()), "-o", str(folder / "cases")], check=True)


def write_weights(path: Path) -> None:
    """21 rows of each type: no multiple of a strip; an odd number of blocks, and of elements where there are none."""
    with path.open("wb") as file:
        for row in TYPES:
            N, K = 21, {1: 1037, 32: 160}.get(row.block, 3 * row.block)
            rows = random_rows(row, N, K).numpy()
            file.write(np.array([row.id, N, K, rows.shape[1]], np.int32).tobytes() + rows.tobytes())


def read_results(path: Path) -> dict[str, bytes]:
    """Name of a case, with how often it has occurred -> what a kernel wrote."""
    results: dict[str, bytes] = {}
    with path.open("rb") as file:
        while line := file.readline():
            name, size = line.decode().rsplit(" ", 1)
            results[f"{len(results)} {name}"] = file.read(int(size))
    return results


def test_gives_the_bits_of_this_processor(tmp_path):
    for tool in (CROSS, QEMU):
        if not shutil.which(tool):
            absent(f"{tool} absent: apt-get install g++-aarch64-linux-gnu qemu-user")
    compile_all(tmp_path)
    write_weights(tmp_path / "weights")
    results = {}
    for isa, processor in ISAS.items():
        to = tmp_path / processor
        command = [QEMU, "-cpu", processor, str(tmp_path / "cases"), str(tmp_path / "weights"), str(to)]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == isa
        results[f"{isa} on {processor}"] = read_results(to)

    run = ctypes.CDLL(str(tmp_path / "cases.so")).run_kernel_cases
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    try:
        for isa in registry.isas():
            registry.set_isa(isa)
            to = tmp_path / isa
            assert run(registry.native_library.dasllama_kernels(), bytes(tmp_path / "weights"), bytes(to)) == 0
            results[isa] = read_results(to)
    finally:
        registry.set_isa(None)

    wanted = results.pop("scalar")
    for isa, found in results.items():
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if found[name] != wanted[name]] == [], f"{isa} differs from scalar"
