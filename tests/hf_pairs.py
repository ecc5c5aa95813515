"""A family's golden file, and its transformers class with the weights of that file: a live oracle of every family.

The weights go from our modules to those of the same path, so paths, row orders and shapes are tested with them.
"""

import json
from typing import NamedTuple

import pytest
import torch
from families import TINY
from test_module_paths import hf_model

import dasllama_torch as dl
from dasllama_torch.arch.qwen3next import ProjectionByHead
from dasllama_torch.modules.linear import Packed

# Files hold these norms' weights with the one that transformers adds.
PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen3next")
CASES = [name for name in TINY if name not in ("gemma2_27b", "phi3_longrope")]


class Pair(NamedTuple):
    """Ours in fp32 mode, and transformers' with eager attention."""

    model: torch.nn.Module
    hf: torch.nn.Module


def live_pair(oracle, name: str) -> Pair:
    path = oracle / "tiny" / f"{name}.gguf"
    model = dl.load_model(path, mode="fp32")
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()), device="cpu").eval().float()
    weights = hf_weights(model, name.startswith(PLUS_ONE), interleaved="gpt-oss" in name)
    _, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected
    return Pair(model, hf)


def each_of(names):
    """A fixture of a module: both models of each of these families, and its name."""

    @pytest.fixture(scope="module", params=names)
    def pair(request, oracle):
        return *live_pair(oracle, request.param), request.param

    return pair


def pair_of(name: str):
    """A fixture of a module: both models of one family."""

    @pytest.fixture(scope="module")
    def pair(oracle):
        return live_pair(oracle, name)

    return pair


def hf_weights(model, plus_one=False, interleaved=False):
    """The weights of our model as transformers has them. interleaved: gate and up of experts take turns (gpt-oss)."""
    left_out = ("qweight", "linear_attn.decay")
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith(left_out)}
    if plus_one:
        plain = ("linear_attn.norm.weight", "linear_attn.conv1d.weight", "gate.weight", "dt_bias")
        weights = {name: value if name.endswith(plain) else value - 1 for name, value in weights.items()}
    weights |= {f"{name}.A_log": m.A_log for name, m in model.named_modules() if hasattr(m, "A_log")}
    weights |= {f"{name}.weight": m.weight for name, m in model.named_modules() if isinstance(m, Packed)}
    for name, m in model.named_modules():
        if isinstance(m, ProjectionByHead):
            weights[f"{name}.weight"] = m.weight
            del weights[f"{name}.qkv.weight"], weights[f"{name}.z.weight"]
    return fused_experts(weights, interleaved)


def fused_experts(weights, interleaved):
    """Stacks of experts as transformers has them: gate and up in one parameter, input-major and in turns in gpt-oss."""
    fused = {}
    for name, value in weights.items():
        place, dot, leaf = name.partition(".experts.")
        if not dot:
            fused[name] = value
            continue
        stack, kind = leaf.split(".")
        if stack == "up_proj":
            continue
        if stack == "gate_proj":
            stack, both = "gate_up_proj", [value, weights[f"{place}.experts.up_proj.{kind}"]]
            value = torch.stack(both, 2).flatten(1, 2) if interleaved else torch.cat(both, 1)
        if interleaved and kind == "weight":
            value = value.transpose(1, 2)
        fused[f"{place}.experts.{stack}" + ("_bias" if kind == "bias" else "")] = value
    return fused
