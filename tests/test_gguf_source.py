"""What a constructor gets when it asks for tensors: from a file, a state dict, or at random."""

import warnings

import gguf
import numpy as np
import pytest
import torch

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource, StateDictSource
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops.ggml_types import BF16, F16, F32, GGML_TYPES, I32, Q1_0, Q2_0, Q4_K, Q8_0, WEIGHT_TYPES


@pytest.fixture
def floats():
    torch.manual_seed(0)
    return {
        "token_embd.weight": torch.randn(5, 32),
        "blk.0.attn_norm.weight": torch.randn(32),
        "blk.0.attn_q.weight": torch.randn(8, 32),
        "blk.0.ffn_up_exps.weight": torch.randn(2, 3, 32),
        "blk.1.attn_norm.weight": torch.randn(32).bfloat16(),
        "output_norm.weight": torch.randn(32).half(),
    }


@pytest.fixture(params=["file", "state dict"])
def source(request, floats, tmp_path):
    """The same tensors from a file and from a state dict."""
    if request.param == "state dict":
        return StateDictSource(floats)
    types = {
        torch.float32: (F32, torch.float32),
        torch.float16: (F16, torch.float16),
        torch.bfloat16: (BF16, torch.uint16),
    }
    tensors = {name: (x.view(types[x.dtype][1]).numpy(), types[x.dtype][0]) for name, x in floats.items()}
    write_gguf(tmp_path / "model.gguf", "llama", {}, tensors)
    return GGUFSource(GGUFFile(tmp_path / "model.gguf"))


def test_get(source, floats):
    found = source.get("token_embd.weight", 5, 32)
    assert (found.name, found.shape, found.qtype) == ("token_embd.weight", (5, 32), F32)
    assert found.data.dtype == torch.uint8
    assert found.data.shape == (5, 128)
    assert torch.equal(found.data.view(torch.float32), floats["token_embd.weight"])
    assert source.get("blk.0.ffn_up_exps.weight", 2, 3, 32).data.shape == (2, 3, 128)
    assert source.get("blk.0.attn_norm.weight", 32).data.shape == (128,)
    assert source.get("output_norm.weight", 32).qtype == F16
    assert source.get("blk.1.attn_norm.weight", 32).qtype == BF16
    assert found.data.data_ptr() == source.get("token_embd.weight", 5, 32).data.data_ptr()


def test_f32(source, floats):
    for name, wanted in floats.items():
        found = source.f32(name, *wanted.shape)
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted.float())
    view = source.f32("blk.0.attn_norm.weight", 32)
    assert view.data_ptr() == source.get("blk.0.attn_norm.weight", 32).data.data_ptr()


def test_scopes(source, floats):
    layer = source.layer(0)
    assert torch.equal(layer.f32("attn_norm.weight", 32), floats["blk.0.attn_norm.weight"])
    assert layer.get("attn_q.weight", 8, 32).name == "blk.0.attn_q.weight"
    assert layer.has("attn_q.weight")
    assert not layer.has("attn_k.weight")
    assert not source.layer(1).has("attn_q.weight")
    assert source.scoped("blk.").scoped("0.").has("attn_q.weight")
    assert source.has("blk.0.attn_q.weight")


def test_unasked(source, floats):
    assert source.unasked() == list(floats)
    source.has("token_embd.weight")
    assert source.unasked() == list(floats)
    source.get("token_embd.weight", 5, 32)
    layer = source.layer(0)
    layer.f32("attn_norm.weight", 32)
    layer.get("attn_q.weight", 8, 32)
    left = ["blk.0.ffn_up_exps.weight", "blk.1.attn_norm.weight", "output_norm.weight"]
    assert source.unasked() == left
    assert layer.unasked() == left[:1]
    assert source.scoped("out").unasked() == left[2:]


def test_rows(source, floats):
    assert source.rows("token_embd.weight") == 5
    assert source.layer(0).rows("attn_q.weight") == 8
    assert source.unasked() == list(floats)
    with pytest.raises(
        GGUFError, match=r"'blk.0.attn_qq.weight' is missing, wanted its number of rows; close: 'blk.0.attn_q"
    ):
        source.layer(0).rows("attn_qq.weight")
    with pytest.raises(GGUFError, match="'token_embd.weight' has no number of rows of its own"):
        RandomSource().rows("token_embd.weight")


def test_missing_tensors(source):
    with pytest.raises(GGUFError) as caught:
        source.layer(0).get("attn_qq.weight", 8, 32)
    message = str(caught.value)
    assert message.startswith(source.origin + ": ")
    assert "tensor 'blk.0.attn_qq.weight' is missing, wanted with shape [8, 32]" in message
    assert "close: 'blk.0.attn_q.weight'" in message
    with pytest.raises(GGUFError, match=r"'outputnorm.weight' is missing.*close: 'output_norm.weight'"):
        source.f32("outputnorm.weight", 32)
    with pytest.raises(GGUFError, match=r"'blk.7.ffn_gate_inp.weight' is missing"):
        source.layer(7).get("ffn_gate_inp.weight", 4, 32)
    with pytest.raises(GGUFError, match=r"'zzz' is missing, wanted with shape \[1\]$"):
        source.get("zzz", 1)


def test_wrong_shapes(source):
    for shape in ((32, 8), (8, 33), (256,), (1, 256), (8, 1, 32), ()):
        with pytest.raises(GGUFError) as caught:
            source.layer(0).get("attn_q.weight", *shape)
        assert f"tensor 'blk.0.attn_q.weight' has shape [8, 32], wanted {list(shape)}" in str(caught.value)


def test_leading_ones_do_not_matter(source, floats):
    found = source.get("blk.0.attn_norm.weight", 1, 32)
    assert (found.shape, found.data.shape) == ((1, 32), (1, 128))
    assert torch.equal(source.f32("blk.0.attn_norm.weight", 1, 32), floats["blk.0.attn_norm.weight"].unsqueeze(0))
    assert source.get("blk.0.attn_q.weight", 1, 8, 32).data.shape == (1, 8, 128)


def test_leave(source):
    source.layer(0).leave()
    assert source.unasked() == ["token_embd.weight", "blk.1.attn_norm.weight", "output_norm.weight"]


def test_a_file_is_neither_copied_nor_complained_about(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (6, 144), dtype=np.uint8)
    write_gguf(tmp_path / "model.gguf", "llama", {}, {"w": (rows, Q4_K), "n": (np.ones(4, np.float32), F32)})
    file = GGUFFile(tmp_path / "model.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = GGUFSource(file).get("w", 6, 256)
        norm = GGUFSource(file).f32("n", 4)
    assert found.qtype == Q4_K
    assert found.data.data_ptr() == file.tensors["w"].data.ctypes.data
    assert norm.data_ptr() == file.tensors["n"].data.ctypes.data
    assert np.array_equal(found.data.numpy(), rows)


def test_f32_refuses_other_types(tmp_path):
    tensors = {"w": (np.zeros((2, 34), np.uint8), Q8_0), "i": (np.zeros(4, np.int32), I32)}
    write_gguf(tmp_path / "model.gguf", "llama", {}, tensors)
    source = GGUFSource(GGUFFile(tmp_path / "model.gguf"))
    with pytest.raises(UnsupportedModel, match=r"model.gguf: tensor 'w' has type Q8_0, wanted F32, F16 or BF16"):
        source.f32("w", 2, 32)
    with pytest.raises(UnsupportedModel, match=r"'i' has type I32"):
        source.f32("i", 4)


class TestStateDict:
    def test_names_are_mapped(self):
        state = {
            "model.norm.weight": torch.ones(4),
            "rotary.inv_freq": torch.ones(2),
            "lm_head.weight": torch.ones(3, 4),
        }
        names = {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
        source = StateDictSource(state, names.get)
        assert list(source.names()) == ["output_norm.weight", "output.weight"]
        assert source.f32("output.weight", 3, 4).data_ptr() == state["lm_head.weight"].data_ptr()

    def test_refusals(self):
        with pytest.raises(GGUFError, match="hf: 'a' and 'b' both become tensor 'x', wanted one"):
            StateDictSource({"a": torch.ones(1), "b": torch.ones(1)}, lambda name: "x", origin="hf")
        for dtype in (torch.float64, torch.int8, torch.uint8):
            with pytest.raises(UnsupportedModel, match=f"tensor 'a' has dtype {dtype}"):
                StateDictSource({"a": torch.ones(1, dtype=dtype)})

    def test_views_parameters_and_single_numbers(self):
        weight = torch.nn.Parameter(torch.randn(6, 4))
        source = StateDictSource({"t": weight.T, "w": weight, "s": torch.tensor(2.5)})
        assert torch.equal(source.f32("t", 4, 6), weight.T)
        assert not source.f32("w", 6, 4).requires_grad
        assert source.f32("w", 6, 4).data_ptr() == weight.data_ptr()
        assert source.f32("s").item() == 2.5
        assert source.get("s").data.shape == (4,)


class TestRandom:
    @pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=lambda qtype: GGML_TYPES[qtype].name)
    def test_matrices_have_unit_scale(self, qtype):
        """By the gguf package's dequantization: RMS about 1/sqrt(K), also of each block, and no two blocks alike."""
        found = RandomSource(1, qtype).get("blk.0.attn_q.weight", 64, 1024)
        kind = GGML_TYPES[qtype]
        assert (found.shape, found.qtype) == ((64, 1024), qtype)
        assert found.data.shape == (64, 1024 // kind.block * kind.bytes)
        if qtype in (
            Q1_0,
            Q2_0,
        ):  # unknown to the package: an f16 scale, then codes that stand for -1, 1 and for -1, 0, 1, 2
            codes = np.array([1.0, 1.0] if qtype == Q1_0 else [1.0, 0.0, 1.0, 2.0])
            scales = found.data.unflatten(1, (-1, kind.bytes))[..., :2].contiguous().view(torch.float16).double()
            mean_square = scales.numpy() ** 2 * (codes**2).mean()
        else:
            weights = gguf.quants.dequantize(found.data.numpy(), gguf.GGMLQuantizationType(qtype)).astype(np.float64)
            assert weights.shape == (64, 1024)
            mean_square = (weights**2).reshape(-1, max(kind.block, 32)).mean(1)
        assert (1024 * mean_square.mean()) ** 0.5 == pytest.approx(1, abs=0.15)
        assert (1024 * mean_square.min()) ** 0.5 > 0.2
        assert (1024 * mean_square.max()) ** 0.5 < 2.4
        blocks = found.data.reshape(-1, kind.bytes)
        assert len(blocks.unique(dim=0)) == len(blocks) or kind.bytes <= 4

    def test_the_same_again(self):
        first = RandomSource(3, Q4_K).layer(1).get("attn_q.weight", 8, 256).data
        assert torch.equal(RandomSource(3, Q4_K).get("blk.1.attn_q.weight", 8, 256).data, first)
        assert not torch.equal(RandomSource(4, Q4_K).get("blk.1.attn_q.weight", 8, 256).data, first)
        assert not torch.equal(RandomSource(3, Q4_K).get("blk.2.attn_q.weight", 8, 256).data, first)

    def test_vectors_and_f32(self):
        source = RandomSource(0, Q8_0)
        norm = source.f32("blk.0.attn_norm.weight", 4096)
        assert norm.mean().item() == pytest.approx(1, abs=0.01)
        assert norm.std().item() == pytest.approx(0.1, rel=0.1)
        assert source.f32("blk.0.attn_q.bias", 4096).mean().item() == pytest.approx(0, abs=0.01)
        assert source.f32("blk.0.ffn_gate_inp.weight", 64, 1024).std().item() == pytest.approx(1 / 32, rel=0.1)
        vector = source.get("blk.0.attn_norm.weight", 4096)
        assert vector.qtype == F32
        assert torch.equal(vector.data.view(torch.float32), norm)

    def test_types_by_name(self):
        source = RandomSource(0, lambda name, shape: Q8_0 if "ffn" in name else F16)
        assert source.get("blk.0.ffn_up_exps.weight", 4, 3, 64).data.shape == (4, 3, 68)
        assert source.get("blk.0.attn_q.weight", 3, 64).qtype == F16
        with pytest.raises(
            UnsupportedModel, match="'blk.0.ffn_up.weight' has rows of 65 elements, wanted a multiple of 32"
        ):
            source.get("blk.0.ffn_up.weight", 3, 65)

    def test_optional_tensors(self):
        source = RandomSource(optional=["blk.*.attn_q.bias"])
        assert source.layer(3).has("attn_q.bias")
        assert not source.has("output.weight")
        assert source.unasked() == []
