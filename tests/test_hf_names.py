"""Names of tensors in GGUF files and in transformers, against the modules, which have both, and the golden files."""

import pytest
from families import TINY

from dasllama_torch.arch import FAMILIES
from dasllama_torch.gguf.model_types import ARCHITECTURES, MODEL_TYPES
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.hf.names import adds_one, canonical, to_gguf, to_hf

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@pytest.mark.parametrize("name", TINY)
def test_every_tensor_has_a_name_both_ways(name, oracle):
    file = GGUFFile(oracle / "tiny" / f"{name}.gguf")
    arch = file.metadata.architecture
    for tensor in file.tensors:
        hf = to_hf(arch, tensor)
        assert (hf is None) == (tensor in COMPUTED), tensor
        assert hf is None or to_gguf(arch, hf) == tensor


@pytest.mark.parametrize("name", TINY)
def test_names_are_those_of_the_modules(name, load):
    """A matrix knows its path and its name in the file."""
    model = load(name)
    arch = model.config.arch
    found = 0
    for path, module in model.named_modules():
        if hasattr(module, "gguf_name") and module is not model.lm_head:
            # transformers' stacks of experts are parameters
            path = canonical(f"{path}.weight")
            wanted = to_hf(arch, f"{module.gguf_name}.weight")
            assert path in (wanted, f"{wanted}.weight"), module.gguf_name
            found += 1
    assert found > 5


def test_what_is_in_no_file():
    assert to_gguf("llama", "model.layers.3.self_attn.rotary_emb.inv_freq") is None
    assert to_gguf("llama", "model.layers.x.self_attn.q_proj.weight") is None
    assert to_hf("llama", "blk.0.attn_sinks.weight") is None
    assert to_hf("llama", "rope_freqs.weight") is None


def test_norms_that_hold_one_more():
    assert adds_one("gemma3", "blk.7.attn_norm.weight")
    assert adds_one("qwen35", "output_norm.weight")
    assert not adds_one("qwen35", "blk.7.ssm_norm.weight")
    assert not adds_one("gemma4", "blk.7.attn_norm.weight")
    assert not adds_one("gemma3", "blk.7.attn_q.weight")


@pytest.mark.parametrize(
    "name",
    ["model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"]
    + ["model.layers.0.mlp.up_proj.weight"],
)
def test_canonical(name):
    assert canonical(name) == "model.layers.0.mlp.up_proj.weight"
    assert canonical("language_model.lm_head.weight") == "lm_head.weight"


def test_model_types_are_those_of_transformers():
    import transformers

    assert set(MODEL_TYPES) == set(FAMILIES)
    assert all(ARCHITECTURES[model_type] == arch for arch, model_type in MODEL_TYPES.items())
    assert set(ARCHITECTURES) <= set(transformers.CONFIG_MAPPING.keys())
