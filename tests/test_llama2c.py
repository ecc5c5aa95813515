"""llama2.c checkpoints, written here by the layout of its export.py, against the golden llama that they hold."""

import struct

import numpy as np
import pytest
import torch
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.gguf.llama2c import Llama2cFile
from dasllama_torch.gguf.reader import GGUFFile

LAYER = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up"]
PARAMETERS = dict(dim=64, hidden_dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256, max_seq_len=512)


def checkpoint(path, gguf, version, tied=False, **changes):
    """Write the tensors of the golden llama as a checkpoint; changes: of the header's parameters."""
    p = PARAMETERS | changes
    if version == 0 and not tied:
        p["vocab_size"] = -p["vocab_size"]
    tensors = {name: tensor.data for name, tensor in GGUFFile(gguf).tensors.items()}
    each = lambda name: [tensors[f"blk.{i}.{name}.weight"] for i in range(2)]  # noqa: E731
    attention, ffn = ([m for name in names for m in each(name)] for names in (LAYER[:4], LAYER[4:]))
    embeddings, norm = [tensors["token_embd.weight"]], [tensors["output_norm.weight"]]
    head = [] if tied else [tensors["output.weight"]]
    header = struct.pack("<7i", *p.values())
    if version == 0:
        parts = embeddings + each("attn_norm") + attention + each("ffn_norm") + ffn + norm
        parts += [np.zeros(2 * 512 * 8, np.float32)] + head
    else:
        header = struct.pack("<Ii", 0x616B3432, version) + header + struct.pack("<B", tied)
        header = header.ljust(256, b"\0")
        parts = each("attn_norm") + each("ffn_norm") + norm + embeddings + attention + ffn + head
    path.write_bytes(header + b"".join(part.tobytes() for part in parts))
    return path


@pytest.fixture
def gguf(oracle):
    return oracle / "tiny" / "llama.gguf"


@torch.no_grad()
@pytest.mark.parametrize("mode", ["fp32", "native", "q8"])
@pytest.mark.parametrize("version", [0, 1])
def test_it_is_the_llama_it_holds(gguf, tmp_path, version, mode):
    model = dl.load_model(checkpoint(tmp_path / "model.bin", gguf, version), mode=mode)
    data = np.load(gguf.with_suffix(".npz"))
    ids = torch.from_numpy(data["ids_s40"]).long().unsqueeze(0)
    found = model(ids).logits
    assert torch.equal(found, dl.load_model(gguf, mode=mode)(ids).logits)
    if mode == "fp32":
        wanted = torch.from_numpy(data["logits_hf_s40"])
        assert (found[0] - wanted).abs().max() <= FP32_LOGITS * wanted.std()
    assert model.config.arch == "llama"
    assert model.model.layers[1].self_attn.q_proj.gguf_name == "blk.1.attn_q"


@torch.no_grad()
@pytest.mark.parametrize("version", [0, 1])
def test_a_tied_head(gguf, tmp_path, version):
    model = dl.load_model(checkpoint(tmp_path / "model.bin", gguf, version, tied=True), mode="fp32")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model(torch.arange(9).unsqueeze(0)).logits.isfinite().all()


def test_it_generates_without_a_vocabulary(gguf, tmp_path):
    model = dl.load_model(checkpoint(tmp_path / "model.bin", gguf, 0))
    with dl.create_session(model) as session:
        assert [text for _, text in session.generate([1, 2, 3], max_tokens=4)] == [""] * 4
    with pytest.raises(dl.TokenizerError):
        model.encode("Once")


@pytest.mark.parametrize("mmap", [True, False])
def test_mapped_or_read(gguf, tmp_path, mmap):
    path = checkpoint(tmp_path / "model.bin", gguf, 1)
    model = dl.load_model(path, mmap=mmap)
    wanted = GGUFFile(gguf).tensors["blk.1.ffn_up.weight"].data
    assert np.array_equal(model.model.layers[1].mlp.up_proj.qweight.numpy(), wanted)


HOSTILE = [
    *((name, value) for name in PARAMETERS for value in (0, 2**31 - 1, 1 - 2**31)),
    *((name, -PARAMETERS[name]) for name in PARAMETERS if name != "vocab_size"),
    ("dim", 66), ("dim", 65), ("n_heads", 3), ("n_kv_heads", 3), ("n_layers", 3), ("n_layers", 4096),
    ("vocab_size", 257),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HOSTILE)
@pytest.mark.parametrize("version", [0, 1])
def test_hostile_sizes_are_refused(gguf, tmp_path, version, name, value):
    path = checkpoint(tmp_path / "model.bin", gguf, version, **{name: value})
    with pytest.raises(dl.GGUFError, match="model.bin: not a llama2.c checkpoint") as caught:
        Llama2cFile(path)
    assert len(str(caught.value)) < 400


def test_the_context_must_fit_the_tables_of_version_0(gguf, tmp_path):
    with pytest.raises(dl.GGUFError, match="not a llama2.c checkpoint, or truncated"):
        Llama2cFile(checkpoint(tmp_path / "model.bin", gguf, 0, max_seq_len=511))


@pytest.mark.parametrize("version", [0, 1])
def test_truncated_and_longer_files_are_refused(gguf, tmp_path, version):
    path = checkpoint(tmp_path / "model.bin", gguf, version)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-4], whole[:300], whole[:30], whole[:27], whole[:5], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(dl.GGUFError, match="model.bin"):
            Llama2cFile(path)
    path.write_bytes(b"")
    with pytest.raises(dl.GGUFError, match="cannot be opened"):
        Llama2cFile(path)


def test_int8_checkpoints_and_other_files_are_refused_by_name(gguf, tmp_path):
    with pytest.raises(dl.UnsupportedModel, match="version 2, wanted 0 or 1"):
        Llama2cFile(checkpoint(tmp_path / "model.bin", gguf, 2))
    (tmp_path / "copy.bin").write_bytes(gguf.read_bytes())
    with pytest.raises(dl.GGUFError, match="not a llama2.c checkpoint"):
        dl.load_model(tmp_path / "copy.bin")
    with pytest.raises(dl.GGUFError, match="no such file"):
        dl.load_model(tmp_path / "absent.bin")
