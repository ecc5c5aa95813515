"""Module paths of every family against the transformers class that its golden data comes from."""

import json

import pytest
import torch
import transformers
from families import TINY

import dasllama_torch as dl

# Modules that one side has and the other has not. transformers: parameter-free helpers. Ours: what makes rotated q and
# k and the outputs of attention and delta rule visible to hooks; the stacks of experts, which transformers keeps as two
# parameters of `experts`: `gate_up_proj` and `down_proj`; the matrices that a file holds where transformers has one.
HF_ONLY = ("act_fn", "activation_fn", "rotary_emb", "resid_attn_dropout", "resid_mlp_dropout")
STACKS = (".experts.gate_proj", ".experts.up_proj", ".experts.gate_up_proj", ".experts.down_proj")
PARTS = ("in_proj_qkvz.qkv", "in_proj_qkvz.z")
OURS_ONLY = ("self_attn.rope", "self_attn.attn", "self_attn.temperature", "linear_attn.delta", *STACKS, *PARTS)


# Sizes of towers that are made and not looked at.
TOWER = dict(depth=1, num_heads=2, embed_dim=32, hidden_size=64, intermediate_size=32, out_hidden_size=64)
TOWER |= dict(deepstack_visual_indexes=[0], num_position_embeddings=16)


def paths(root, left_out):
    return {name for name, _ in root.named_modules() if name and not name.endswith(left_out)}


def hf_model(facts, device="meta"):
    """The transformers model of a golden case, with eager attention and weights of its own."""
    config = dict(facts["config"])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    config._attn_implementation = config._experts_implementation = "eager"
    if "vision" in " ".join(config.sub_configs):
        for name, value in TOWER.items():
            if hasattr(config.vision_config, name):
                setattr(config.vision_config, name, value)
    with torch.device(device):
        return getattr(transformers, facts["hf_class"])(config)


@pytest.mark.parametrize("name", TINY)
def test_module_paths(name, oracle):
    path = oracle / "tiny" / f"{name}.gguf"
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()))
    wanted = {name for name in paths(hf, HF_ONLY) if not name.startswith("model.visual")}  # files of text hold no tower
    assert paths(dl.load_model(path), OURS_ONLY) == wanted
