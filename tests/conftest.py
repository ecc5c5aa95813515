"""Shared fixtures. Golden data, downloaded models and a cross compiler are optional: a test that needs them skips and
says what is missing. With CI=true they must be there, and the test fails instead."""

import json
import os
import tarfile
from functools import cache
from pathlib import Path
from typing import NoReturn

import gguf
import numpy as np
import pytest
import torch

import dasllama_torch as dl
from dasllama_torch import hub
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported: kernels run on tensors of the CPU

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # they share the cores
    torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))


def pytest_addoption(parser):
    parser.addoption(
        "--measured", metavar="FILE", help="append what tests measure, a line of JSON each, for docs/write_families.py"
    )


@pytest.fixture
def measured(request):
    """Note a figure: of a golden case, of a kind, the value."""
    path = request.config.getoption("measured")

    def note(case: str, what: str, value: float) -> None:
        if path:
            with open(path, "a") as file:
                file.write(json.dumps([case, what, value]) + "\n")

    return note


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The folder of independent golden data (tiny models, every quant type, real models, vocabularies)."""
    folder = ROOT.parent / "shared" / "oracle"
    if not folder.is_dir():
        absent("golden data absent: ../shared/oracle")
    return folder


@pytest.fixture(scope="session")
def vocabulary_folder(oracle, tmp_path_factory) -> Path:
    """llama.cpp's vocabulary files, and the texts and ids of their tests."""
    folder = tmp_path_factory.mktemp("vocab")
    with tarfile.open(oracle / "vocab.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "vocab"


@pytest.fixture(scope="session")
def vocabulary(vocabulary_folder):
    """The tokenizer of a real vocabulary by its name there, loaded once."""
    return cache(lambda name: Tokenizer.from_metadata(GGUFFile(vocabulary_folder / f"ggml-vocab-{name}.gguf").metadata))


@pytest.fixture(scope="module")
def load(oracle):
    """A tiny model by its golden case, loaded once."""
    models = {}
    return lambda name: models.get(name) or models.setdefault(name, dl.load_model(oracle / "tiny" / f"{name}.gguf"))


@pytest.fixture(scope="session")
def q8_0(oracle, tmp_path_factory):
    """Tiny golden model -> path of a copy with its matrices in Q8_0, made by the `gguf` package's own quantizer."""
    folder = tmp_path_factory.mktemp("q8_0")

    def quantized(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            file = GGUFFile(oracle / "tiny" / f"{name}.gguf")
            metadata = {key: file.metadata.typed(key) for key in file.metadata}
            tensors = {}
            for tensor in file.tensors.values():
                # As in llama-quantize, norms, biases, routers and convolutions stay in F32.
                small = len(tensor.shape) < 2 or not tensor.name.endswith(".weight")
                keep = small or tensor.shape[-1] % 32 or tensor.qtype != ggml_types.F32
                if keep or "ffn_gate_inp" in tensor.name or "conv1d" in tensor.name:
                    tensors[tensor.name] = tensor.data, tensor.qtype
                else:
                    floats = tensor.data.view(np.float32)
                    tensors[tensor.name] = gguf.quants.quantize(floats, gguf.GGMLQuantizationType.Q8_0), ggml_types.Q8_0
            write_gguf(path, file.metadata.architecture, metadata, tensors)
        return path

    return quantized


@pytest.fixture(params=registry.isas())
def isa(request):
    """Each instruction set that runs here in turn; CPU ops are served by its kernels within the test."""
    registry.set_isa(request.param)
    yield request.param
    registry.set_isa(None)


@pytest.fixture
def threads():
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def everywhere(threads):
    """Calls a function on each instruction set with 1, 2 and 5 threads: all results, those of scalar kernels and one
    thread first."""

    def call(f):
        results = []
        try:
            for isa in registry.isas():
                registry.set_isa(isa)
                for n in (1, 2, 5):
                    threads(n)
                    results.append(f())
        finally:
            registry.set_isa(None)
        return results

    return call


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, the model of `make demo`."""
    return _model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """gemma-3-270m: a sliding window, a vocabulary of 262,144 tokens, five tensor types."""
    return _model("gemma-3-270m")


def _model(name: str) -> Path:
    """The file of a model of the catalogue: where `pull` keeps it, or in the folder DASLLAMA_TEST_MODELS, where it may
    have any name and is known by its size."""
    model = hub.find(name)
    if folder := os.environ.get("DASLLAMA_TEST_MODELS"):
        for path in sorted(Path(folder).glob("*.gguf")):
            if path.stat().st_size == model.size:
                return path
    if not hub.is_pulled(model):
        absent(f"model absent: dasllama-torch pull {name}")
    return model.path


def absent(what: str, whole_file: bool = False) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}; with CI=true it must be there")
    pytest.skip(what, allow_module_level=whole_file)


def absent_gpu() -> None:
    """Skip a whole file where there is no GPU, with CI=true too: no continuous integration has one."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU", allow_module_level=True)
