"""Builds the CPU kernels: one shared library on the LibTorch stable ABI, bound to no Python and no torch version."""

import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

subprocess.run([sys.executable, "ops/csrc/generate_header.py"], check=True)

SOURCES = sorted(str(path) for path in Path("ops/csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for pattern in ("*.h", "*.inl") for path in Path("ops/csrc").rglob(pattern))
TOP_FOLDERS = ["dasllama_torch.ops", "dasllama_torch.triton_kernels"]  # pyproject.toml says where they lie

setup(
    packages=[
        *find_packages(include=["dasllama_torch*"], exclude=[f"{name}*" for name in TOP_FOLDERS]),
        *TOP_FOLDERS,
    ],
    ext_modules=[
        CppExtension(
            "dasllama_torch.ops._C",
            SOURCES,
            depends=HEADERS,
            extra_compile_args=[
                "-O3",
                "-g0",
                "-std=c++17",
                "-ffp-contract=off",  # a sum gives the same bits on every instruction set
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-Wno-psabi",
                "-Wno-uninitialized",  # GCC 12 mistakes the undefined registers of its own AVX-512 header
                "-Wno-maybe-uninitialized",
                f"-ffile-prefix-map={Path.cwd()}/=",  # errors name the file, not where it was compiled
                "-DTORCH_TARGET_VERSION=0x020a000000000000",
                "-DPy_LIMITED_API=0x030a0000",
            ],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
