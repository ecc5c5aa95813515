"""What is written reads back the same by the `gguf` package and by ours."""

import gguf
import numpy as np
import pytest

from dasllama_torch.errors import GGUFError
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops.ggml_types import BF16, F16, F32, Q4_0, Q4_K


def test_plain_values(tmp_path):
    path = tmp_path / "model.gguf"
    values = {
        "u32": 2**32 - 1,
        "i32": -5,
        "u64": 2**32,
        "i64": -(2**40),
        "f32": 0.5,
        "bool": False,
        "string": "",
        "u32[2]": [1, 2],
        "i32[2]": (1, -2),
        "u64[1]": [2**63],
        "i64[2]": [-1, 2**31],
        "f32[2]": [0.5, -1.5],
        "bool[2]": [True, False],
        "string[2]": ["", "🦙"],
    }
    write_gguf(path, "llama", values, {})
    theirs, ours = gguf.GGUFReader(path), GGUFFile(path).metadata
    for key, value in values.items():
        assert theirs.fields[key].contents() == (list(value) if isinstance(value, tuple) else value)
        assert ours.type_name(key) == key


def test_numpy_values_keep_their_width(tmp_path):
    path = tmp_path / "model.gguf"
    dtypes = [
        np.uint8,
        np.int8,
        np.uint16,
        np.int16,
        np.uint32,
        np.int32,
        np.uint64,
        np.int64,
        np.float32,
        np.float64,
        np.bool_,
    ]
    values = {f"one.{dtype.__name__}": dtype(1) for dtype in dtypes}
    values |= {f"list.{dtype.__name__}": np.array([1, 0], dtype) for dtype in dtypes}
    write_gguf(path, "llama", values, {})
    metadata = GGUFFile(path).metadata
    for key, value in values.items():
        assert metadata.typed(key).dtype == value.dtype
        np.testing.assert_array_equal(metadata.typed(key), value)


def test_a_file_is_written_again_as_it_was(oracle, tmp_path):
    for name in ("quant/qwen3moe-q4_k_m.gguf", "quant/llama-q2_0.gguf", "tiny/gpt-oss_mxfp4.gguf"):
        first = GGUFFile(oracle / name)
        metadata = {key: first.metadata.typed(key) for key in first.metadata}
        tensors = {tensor.name: (tensor.data, tensor.qtype) for tensor in first.tensors.values()}
        write_gguf(tmp_path / "again.gguf", first.metadata.architecture, metadata, tensors)
        assert (tmp_path / "again.gguf").read_bytes() == (oracle / name).read_bytes()


def test_numbers_and_rows(tmp_path):
    path = tmp_path / "model.gguf"
    numbers = np.arange(64, dtype=np.float32).reshape(2, 32)
    tensors = {
        "f32": (numbers, F32),
        "f32 rows": (numbers.view(np.uint8), F32),
        "f16": (numbers.astype(np.float16), F16),
        "bf16": ((numbers.view(np.uint32) >> 16).astype(np.uint16), BF16),
        "q4_0": (gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q4_0), Q4_0),
        "transposed": (numbers.T, F32),
    }
    write_gguf(path, "llama", {}, tensors)
    found = GGUFFile(path).tensors
    assert {name: tensor.shape for name, tensor in found.items()} == {
        **dict.fromkeys(tensors, (2, 32)),
        "transposed": (32, 2),
    }
    for name, (array, _) in tensors.items():
        assert found[name].data.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    "value",
    [[], [1, "a"], [1, 2.5], [True, 1], None, {}, [[1]], 2**64, np.zeros((2, 2)), np.float16(1), b"x"],
)
def test_values_that_cannot_be_written(tmp_path, value):
    with pytest.raises(
        GGUFError, match="model.gguf: key 'llama.x' is .*, wanted a number, bool, string or a non-empty"
    ):
        write_gguf(tmp_path / "model.gguf", "llama", {"llama.x": value}, {})
    assert not (tmp_path / "model.gguf").exists()


def test_tensors_that_cannot_be_written(tmp_path):
    for array, qtype in (
        (np.zeros((2, 143), np.uint8), Q4_K),
        (np.zeros((2, 144), np.float32), Q4_K),
        (np.zeros(3), F32),
    ):
        with pytest.raises(
            GGUFError, match=r"model.gguf: tensor 'w' is (uint8|float32|float64) \[.*\], wanted uint8 rows of"
        ):
            write_gguf(tmp_path / "model.gguf", "llama", {}, {"w": (array, qtype)})
    with pytest.raises(GGUFError, match="tensor 'w' has type 255, wanted one of"):
        write_gguf(tmp_path / "model.gguf", "llama", {}, {"w": (np.zeros(4, np.float32), 255)})
