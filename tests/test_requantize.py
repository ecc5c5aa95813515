"""requantize: bytes are those of the `gguf` package's quantizers, everything else is as it was."""

import gguf
import numpy as np
import pytest

import dasllama_torch as dl
from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.export.requantize import TYPES
from dasllama_torch.export.searched_types import SEARCHED
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf, write_shards
from dasllama_torch.ops.ggml_types import F32, GGML_TYPES


def type_of(file, name):
    return GGML_TYPES[file.tensors[name].qtype].name


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, oracle, tmp_path):
    """Rows of 256, which are a multiple of every block."""
    path = oracle / "quant" / "llama-f16.gguf"
    report = dl.requantize(path, tmp_path / "out.gguf", name)
    before, after = GGUFFile(path), GGUFFile(tmp_path / "out.gguf")
    number = gguf.GGMLQuantizationType[name]
    assert list(after.tensors) == list(before.tensors)
    for tensor in before.tensors.values():
        found = after.tensors[tensor.name]
        assert found.shape == tensor.shape
        if len(tensor.shape) < 2:
            assert np.array_equal(found.data, tensor.data)
        else:
            floats = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType.F16)
            if number in SEARCHED:  # tests/test_searched_types.py
                continue
            wanted = gguf.quants.quantize(floats, number)
            assert np.array_equal(found.data, wanted.view(np.uint8)), tensor.name
    changed = {change.name for change in report.changes}
    matrices = {tensor.name for tensor in before.tensors.values() if len(tensor.shape) == 2}
    assert changed == (set() if name == "F16" else matrices)
    model = dl.load_model(tmp_path / "out.gguf")
    assert model.get_input_embeddings().qtype == number


def test_patterns(oracle, tmp_path):
    path = oracle / "tiny" / "qwen3moe.gguf"
    types = {"blk.0.ffn_down_exps.weight": "F16", "*ffn_down_exps*": "Q5_0", "blk.*.attn_norm.weight": "BF16"}
    report = dl.requantize(path, tmp_path / "out.gguf", "Q8_0", types)
    file = GGUFFile(tmp_path / "out.gguf")
    assert type_of(file, "token_embd.weight") == "Q8_0"
    assert type_of(file, "blk.0.ffn_down_exps.weight") == "F16"
    assert type_of(file, "blk.1.ffn_down_exps.weight") == "F16"  # rows of 24: no multiple of 32
    assert type_of(file, "blk.1.ffn_gate_inp.weight") == "F32"  # a router
    assert type_of(file, "blk.1.attn_norm.weight") == "BF16"
    assert type_of(file, "blk.1.ffn_norm.weight") == "F32"
    replaced = [change for change in report.changes if change.asked != change.after]
    assert [(c.name, c.asked, c.after) for c in replaced] == [("blk.1.ffn_down_exps.weight", "Q5_0", "F16")]
    text = " ".join(str(report).split())
    assert "F16 (Q5_0)" in text
    assert "1 have rows that are no multiple of the wanted type's block" in text
    dl.load_model(tmp_path / "out.gguf")


def test_rows_that_do_not_fit(oracle, tmp_path):
    """What llama-quantize takes instead."""
    path = oracle / "quant" / "qwen3moe-q4_k_m.gguf"
    instead = {"TQ2_0": "Q4_0", "Q2_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    for asked, other in instead.items():
        dl.requantize(path, tmp_path / "out.gguf", asked)
        file = GGUFFile(tmp_path / "out.gguf")
        assert type_of(file, "blk.0.ffn_gate_exps.weight") == asked  # rows of 256
        assert type_of(file, "blk.0.ffn_down_exps.weight") == other  # rows of 96


def test_error_is_relative_to_the_values(oracle, tmp_path):
    path = oracle / "tiny" / "llama.gguf"
    report = dl.requantize(path, tmp_path / "out.gguf", None, {"output.weight": "Q4_0"})
    (change,) = report.changes
    before = GGUFFile(path).tensors["output.weight"].data.view(np.float32)
    packed = GGUFFile(tmp_path / "out.gguf").tensors["output.weight"].data
    after = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    assert change.error == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-5)
    assert report.n_kept == len(GGUFFile(path).tensors) - 1
    assert report.nbytes_after == (tmp_path / "out.gguf").stat().st_size < report.nbytes_before


def test_metadata_stays(demo_model, tmp_path):
    dl.requantize(demo_model, tmp_path / "out.gguf", "Q8_0")
    before, after = (GGUFFile(path).metadata for path in (demo_model, tmp_path / "out.gguf"))
    assert list(after) == [*before]
    for key in before:
        if key == "general.file_type":
            assert after[key] == gguf.LlamaFileType.MOSTLY_Q8_0
        else:
            assert before.type_name(key) == after.type_name(key)
            assert np.array_equal(before[key], after[key]), key


def test_shards_become_one_file(oracle, tmp_path):
    file = GGUFFile(oracle / "tiny" / "llama.gguf")
    metadata = {key: file.metadata.typed(key) for key in file.metadata}
    tensors = {name: (tensor.data, tensor.qtype) for name, tensor in file.tensors.items()}
    shards = write_shards(tmp_path / "model", "llama", metadata, tensors, 3)
    dl.requantize(shards[1], tmp_path / "one.gguf")
    one = GGUFFile(tmp_path / "one.gguf")
    assert list(one.tensors) == list(file.tensors)
    assert not any(key.startswith("split.") for key in one.metadata)


def test_what_cannot_be_written_is_refused(oracle, tmp_path):
    path = oracle / "tiny" / "llama.gguf"
    out = tmp_path / "out.gguf"
    with pytest.raises(UnsupportedModel, match=r"cannot write type 'IQ2_XS'; possible: F32, F16"):
        dl.requantize(path, out, "IQ2_XS")
    with pytest.raises(GGUFError, match=r"has no tensor 'blk.7.\*', wanted a pattern of names such as 'output.weight'"):
        dl.requantize(path, out, None, {"blk.7.*": "Q8_0"})
    with pytest.raises(
        UnsupportedModel, match="attn_norm.weight' cannot be Q8_0: models read it in floats, wanted F32"
    ):
        dl.requantize(path, out, None, {"*_norm.weight": "Q8_0"})
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(GGUFError, match="is read, wanted another file to write"):
        dl.requantize(copy, copy, "Q8_0")
    assert copy.read_bytes() == path.read_bytes()
    for nowhere in (tmp_path, tmp_path / "none" / "out.gguf"):
        with pytest.raises(GGUFError, match="no file can be written there, wanted a name in a folder that exists"):
            dl.requantize(path, nowhere, "Q8_0")

    def interrupt(name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dl.requantize(path, out, "Q8_0", done=interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.gguf"]


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (1e30, "F16", "holds 1e\\+30, beyond F16: wanted F32 or BF16 for it"),
        (1e30, "Q8_0", "holds 1e\\+30, beyond Q8_0: wanted F32 or BF16 for it"),
        (1e30, "Q4_K", "holds 1e\\+30, beyond Q4_K: wanted F32 or BF16 for it"),
        (np.nan, "Q8_0", "holds NaN or infinity: it can only stay as it is"),
        (np.inf, "F16", "holds NaN or infinity: it can only stay as it is"),
    ],
)
def test_values_that_a_type_cannot_hold(oracle, tmp_path, value, kind, wanted):
    """Scales are halves: beyond them a file would hold infinities, and say nothing."""
    file = GGUFFile(oracle / "quant" / "llama-f16.gguf")
    name = "blk.0.ffn_down.weight"
    metadata = {key: file.metadata.typed(key) for key in file.metadata}
    tensors = {name: (tensor.data, tensor.qtype) for name, tensor in file.tensors.items()}
    rows = np.ones(file.tensors[name].shape, np.float32)
    rows[-1, 3] = value
    write_gguf(tmp_path / "large.gguf", "llama", metadata, tensors | {name: (rows, F32)})
    with pytest.raises(UnsupportedModel, match=f"tensor '{name}' {wanted}"):
        dl.requantize(tmp_path / "large.gguf", tmp_path / "out.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["large.gguf"]
    dl.requantize(tmp_path / "large.gguf", tmp_path / "out.gguf", kind, {name: "F32"})
