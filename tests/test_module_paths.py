"""Module paths of every family against the transformers class that its golden data comes from."""

import json

import pytest
import torch
import transformers
from families import TINY

import dasllama_torch as dl

# Modules that one side has and the other has not. transformers: parameter-free helpers. Ours: what makes rotated q and
# k and the attention's output visible to hooks, and the stacks of experts, which transformers keeps as two parameters
# of `experts`: `gate_up_proj` and `down_proj`.
HF_ONLY = ("act_fn", "rotary_emb")
STACKS = ("experts.gate_proj", "experts.up_proj", "experts.gate_up_proj", "experts.down_proj")
OURS_ONLY = ("self_attn.rope", "self_attn.attn", *STACKS)


def paths(root, left_out):
    return {name for name, _ in root.named_modules() if name and not name.endswith(left_out)}


def hf_model(facts):
    """The transformers model of a golden case, without weights."""
    config = dict(facts["config"])
    with torch.device("meta"):
        return getattr(transformers, facts["hf_class"])(
            transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        )


@pytest.mark.parametrize("name", TINY)
def test_module_paths(name, oracle):
    path = oracle / "tiny" / f"{name}.gguf"
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()))
    assert paths(dl.load_model(path), OURS_ONLY) == paths(hf, HF_ONLY)
