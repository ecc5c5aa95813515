"""Qwen3-Next: a file that holds the fused projection as one matrix gives what one with two gives, bit for bit."""

import torch

import dasllama_torch as dl
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf


def test_a_fused_projection_in_one_matrix(oracle, tmp_path):
    file = GGUFFile(oracle / "tiny" / "qwen3next.gguf")
    wanted = dl.load_model(file.path)
    tensors = {tensor.name: (tensor.data, tensor.qtype) for tensor in file.tensors.values()}
    for i, layer in enumerate(wanted.model.layers):
        if layer.is_recurrent:
            qkv, z = tensors.pop(f"blk.{i}.attn_qkv.weight"), tensors.pop(f"blk.{i}.attn_gate.weight")
            assert qkv[1] == z[1]
            tensors[f"blk.{i}.ssm_in.weight"] = layer.linear_attn.in_proj_qkvz.weight.numpy(), qkv[1]
    path = tmp_path / "fused.gguf"
    metadata = {key: file.metadata.typed(key) for key in file.metadata}
    write_gguf(path, file.metadata.architecture, metadata, tensors)
    model = dl.load_model(path)
    names = {name for name, _ in model.named_modules()}
    assert "model.layers.0.linear_attn.in_proj_qkvz" in names
    assert "model.layers.0.linear_attn.in_proj_qkvz.z" not in names
    ids = torch.arange(50).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)
