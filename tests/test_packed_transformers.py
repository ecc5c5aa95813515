"""transformers' own classes on our packed modules."""

import gguf
import hf_twin
import numpy as np
import pytest
import torch
import transformers
from families import TINY
from tolerances import FP32_LOGITS, NATIVE_LOGPROB_RANDOM

import dasllama_torch as dl
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.modules.linear import Packed
from dasllama_torch.ops import ggml_types, registry

IDS = torch.randint(0, 250, (2, 33), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("case", TINY)
def test_golden_logits(case, oracle):
    path = oracle / "tiny" / f"{case}.gguf"
    data = np.load(path.with_suffix(".npz"))
    hf = dl.packed_transformers(path, mode="fp32")
    assert isinstance(hf, transformers.PreTrainedModel)
    registry.reset_report()
    found = hf(input_ids=torch.from_numpy(data["ids_s40"]).long().unsqueeze(0)).logits[0, data["rows_s40"]]
    assert registry.report()["quant_linear"]
    wanted = data["logits_hf_s40"]
    assert np.abs(found.numpy() - wanted).max() <= FP32_LOGITS * TINY[case] * wanted.std()


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "qwen3moe", "gemma3"])
def test_native_arithmetic_and_memory(case, q8_0):
    """Packed bytes are all that there is, and they are multiplied as they are."""
    path = q8_0(case)
    hf, ours = dl.packed_transformers(path), dl.load_model(path)
    found, wanted = hf(IDS).logits.log_softmax(-1), ours(IDS).logits.log_softmax(-1)
    assert (found - wanted).abs().mean() <= NATIVE_LOGPROB_RANDOM
    held = {t.data_ptr(): t.nbytes for t in (*hf.parameters(), *hf.buffers()) if t.dtype != torch.uint8}
    largest = max(t.numel() for t in hf.parameters())
    assert largest <= 6 * ours.config.n_embd  # a router
    assert sum(held.values()) < GGUFFile(path).nbytes / 4
    for path, module in hf.named_modules():
        if isinstance(module, Packed):
            assert module.qweight.dtype == torch.uint8, path


@torch.no_grad()
def test_it_generates_as_transformers_does(tmp_path):
    twin = hf_twin.make("gemma3", tmp_path)
    hf = dl.packed_transformers(twin.path, mode="fp32")
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=300, pad_token_id=0)
    assert torch.equal(hf.generate(IDS, **options), twin.hf.generate(IDS, **options))


@torch.no_grad()
def test_a_model_that_is_there_already(tmp_path):
    twin = hf_twin.make("llama_bias", tmp_path)
    wanted = twin.hf(IDS).logits
    loaded = type(twin.hf)(twin.hf.config).eval()
    assert (loaded(IDS).logits - wanted).abs().max() > wanted.std()
    dl.pack(loaded, twin.path, mode="fp32")
    assert (loaded(IDS).logits - wanted).abs().max() <= FP32_LOGITS * wanted.std()
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, Packed)
    with_ours = type(twin.hf)(twin.hf.config).eval()
    ours = dl.load_model(twin.path)
    dl.pack(with_ours, ours)
    assert with_ours.lm_head is ours.lm_head


def test_a_model_of_another_shape_is_refused_and_left_alone(tmp_path):
    twin, other = hf_twin.make("llama", tmp_path), hf_twin.make("mistral", tmp_path)
    before = {name: id(module) for name, module in other.hf.named_modules()}
    with pytest.raises(UnsupportedModel, match=r"self_attn.q_proj of MistralForCausalLM is \[120, 72\], the file's"):
        dl.pack(other.hf, twin.path)
    assert {name: id(module) for name, module in other.hf.named_modules()} == before


# ---- architectures that this package lacks --------------------------------------------------------------------------

COMMON = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
FOREIGN = {
    "olmo2": (transformers.Olmo2Config, {}),
    "stablelm": (transformers.StableLmConfig, {"use_qkv_bias": True}),
    "starcoder2": (transformers.Starcoder2Config, {"tie_word_embeddings": True}),
}


def foreign_twin(arch, folder):
    """A random model of transformers and its file: matrices in Q8_0, everything in transformers' order."""
    make, own = FOREIGN[arch]
    torch.manual_seed(4)
    config = make(**COMMON, **own)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, 2)
    tensors = {}
    for name, parameter in hf.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        stem, kind = name.rsplit(".", 1)
        values, qtype = parameter.data.numpy(), ggml_types.F32
        if parameter.dim() == 2:
            values, qtype = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), ggml_types.Q8_0
            floats = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(floats.copy())
        tensors[f"{names.get_name(stem)}.{kind}"] = values, qtype
    path = folder / f"{arch}.gguf"
    write_gguf(path, arch, {f"{arch}.block_count": 2}, tensors)
    return hf, path, config


@torch.no_grad()
@pytest.mark.parametrize("arch", FOREIGN)
def test_an_architecture_that_is_not_implemented(arch, tmp_path):
    hf, path, config = foreign_twin(arch, tmp_path)
    ids = IDS % 131
    wanted = hf(ids).logits
    packed = dl.packed_transformers(path, mode="fp32", config=config)
    assert (packed(ids).logits - wanted).abs().max() <= FP32_LOGITS * wanted.std()
    native = dl.packed_transformers(path, config=config)(ids).logits
    assert 0 < (native - wanted).abs().max() < 0.2 * wanted.std()
    with pytest.raises(UnsupportedModel, match="is not implemented: wanted transformers' config"):
        dl.packed_transformers(path)


def test_an_architecture_whose_files_are_unknown_is_refused(tmp_path):
    _, path, config = foreign_twin("olmo2", tmp_path)
    file = GGUFFile(path)
    tensors = {name: (t.data, t.qtype) for name, t in file.tensors.items()}
    other = tmp_path / "granite.gguf"
    write_gguf(other, "granite", {"granite.block_count": 2}, tensors)
    with pytest.raises(UnsupportedModel, match="architecture 'granite' is not implemented, nor one of olmo2"):
        dl.packed_transformers(other, config=config)
    more = tmp_path / "more.gguf"
    write_gguf(more, "olmo2", {"olmo2.block_count": 2}, {**tensors, "blk.0.odd.weight": tensors["output_norm.weight"]})
    with pytest.raises(UnsupportedModel, match="has no place for blk.0.odd.weight"):
        dl.packed_transformers(more, config=config)
