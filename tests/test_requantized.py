"""The load modes q8 and q4_0: every matrix as gguf-py would quantize it, everything else as the file has it."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

import dasllama_torch as dl
from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.modules.linear import Packed
from dasllama_torch.modules.requantized import RequantizedSource
from dasllama_torch.ops import ggml_types

C, FFN, V, LAYERS = 96, 160, 70, 2
SHAPES = {
    "attn_q": (C, C), "attn_k": (C // 2, C), "attn_v": (C // 2, C), "attn_output": (C, C), "ffn_gate": (FFN, C),
    "ffn_up": (FFN, C), "ffn_down": (C, FFN),
}  # fmt: skip


def write(path, qtype):
    source, tensors = RandomSource(0, qtype), {}
    metadata = {
        "qwen2.block_count": LAYERS, "qwen2.context_length": 64, "qwen2.embedding_length": C,
        "qwen2.feed_forward_length": FFN, "qwen2.attention.head_count": 4, "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip

    def add(name, *shape):
        tensor = source.get(name, *shape)
        tensors[name] = (tensor.data.numpy(), tensor.qtype)

    add("token_embd.weight", V, C)
    add("output_norm.weight", C)
    for i in range(LAYERS):
        for name, shape in SHAPES.items():
            add(f"blk.{i}.{name}.weight", *shape)
            if name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{i}.{name}.bias", shape[0])
        add(f"blk.{i}.attn_norm.weight", C)
        add(f"blk.{i}.ffn_norm.weight", C)
    write_gguf(path, "qwen2", metadata, tensors)
    return path


@pytest.mark.parametrize(("mode", "qtype"), [("q8", ggml_types.Q8_0), ("q4_0", ggml_types.Q4_0)])
@pytest.mark.parametrize("held", [ggml_types.F32, ggml_types.Q5_1, ggml_types.Q8_0])
def test_matrices_are_gguf_pys(tmp_path, mode, qtype, held):
    path = write(tmp_path / "held.gguf", held)
    model, parent = dl.load_model(path, mode=mode), dl.load_model(path, mode="fp32")
    seen = 0
    for (name, module), other in zip(model.named_modules(), parent.modules(), strict=True):
        if isinstance(module, Packed):
            assert module.qtype == qtype, name
            wanted = gguf.quants.quantize(other.weight.numpy(), GGMLQuantizationType(qtype))
            if held != qtype:
                assert np.array_equal(module.qweight.numpy(), wanted), name
            else:
                assert torch.equal(module.qweight, other.qweight), name
            seen += 1
        elif hasattr(module, "weight"):
            assert torch.equal(module.weight, other.weight), name
    assert seen == 2 + LAYERS * len(SHAPES)
    assert model.lm_head.qweight.data_ptr() == model.model.embed_tokens.qweight.data_ptr()  # tied, and made once


def test_q8_stays_close_to_its_parent(tmp_path):
    path = write(tmp_path / "held.gguf", ggml_types.F32)
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        found, wanted = (dl.load_model(path, mode=mode)(ids).logits.log_softmax(-1) for mode in ("q8", "fp32"))
    assert 0 < (found - wanted).abs().mean() < 0.05


def test_rows_that_do_not_fit_are_refused():
    source = RequantizedSource(RandomSource(0), ggml_types.Q4_0)
    assert source.f32("some_norm.weight", 40).shape == (40,)
    with pytest.raises(dl.UnsupportedModel, match="'blk.1.x.weight' has rows of 40 elements, wanted a multiple of 32"):
        source.layer(1).get("x.weight", 3, 40)


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'q5'"):
        dl.load_model(tmp_path, mode="q5")
    with pytest.raises(dl.KernelError, match="cuda"):
        dl.load_model(tmp_path, device="cuda")
