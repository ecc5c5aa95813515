"""Every family against its transformers class with the weights of the golden file: what the golden data does not hold,
that is padding, positions, module outputs and gradients.

The weights go from our modules to those of the same path, so paths, row orders and shapes are tested with them.
"""

import copy
import json

import pytest
import torch
from exact import called, distances, in_double, outputs, paths_of
from families import TINY
from hf_pairs import CASES, each_of, hf_weights
from test_module_paths import hf_model
from tolerances import DELTA_NORM, FP32_LOGITS, GRADIENT

import dasllama_torch as dl
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource

M_ROPE = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")


pair = each_of(CASES)


def assert_close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.std()


def ids(batch, length, seed=0):
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    model, hf, name = pair
    x = ids(3, 37)
    mask = torch.ones_like(x)
    for row, n in enumerate((0, 5, 30)):
        mask[row, :n] = 0
    if side == "right":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = positions.expand(3, -1, -1) if name in M_ROPE else positions
    wanted = hf(input_ids=x, attention_mask=mask, position_ids=given).logits[mask.bool()]
    found = model(x, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    assert_close(found, wanted, FP32_LOGITS * TINY[name])


@torch.no_grad()
@pytest.mark.parametrize("pair", M_ROPE, indirect=True)
def test_positions_of_several_axes(pair):
    model, hf, name = pair
    positions = torch.randint(0, 90, (3, 2, 41), generator=torch.Generator().manual_seed(1))
    x = ids(2, 41)
    wanted = hf(input_ids=x, position_ids=positions).logits
    assert_close(model(x, position_ids=positions).logits, wanted, FP32_LOGITS * TINY[name])
    text = torch.arange(41).expand(3, 2, 41)
    assert (wanted - hf(input_ids=x, position_ids=text).logits).abs().max() > 0.1 * wanted.std()


@torch.no_grad()
def test_module_outputs(pair):
    """Hooks by the same path see the same tensors, at every path, and the parts that transformers computes by functions
    are the same. Its own f32 is no closer to the truth than ours, so both are held against float64."""
    model, hf, case = pair
    x, paths = ids(1, 19), paths_of(model, hf)
    found = outputs(model, paths, input_ids=x)
    with in_double(copy.deepcopy(hf)) as exact:
        wanted = outputs(exact, paths, input_ids=x, use_cache=False)
    apart = distances(found, wanted)
    # Layers that read another's keys turn none of their own.
    theirs = {
        f"model.layers.{i}.self_attn.rope (2)"
        for i, layer in enumerate(model.config.layers)
        if layer.kv_source is not None
    }
    assert called(wanted) - theirs <= apart.keys()
    assert len(apart) > 25
    bounds = {place: DELTA_NORM if place.endswith("linear_attn.norm") else TINY[case] for place in apart}
    assert {place: d for place, d in apart.items() if not d <= FP32_LOGITS * bounds[place]} == {}


@torch.no_grad()
def test_a_window_of_phi3(oracle):
    """The golden files have none, and llama.cpp ignores the key."""
    path = oracle / "tiny" / "phi3.gguf"
    file, facts = GGUFFile(path), json.loads(path.with_suffix(".json").read_text())
    facts["config"]["sliding_window"] = 9
    source = GGUFSource(file)
    source.native = False
    model = dl.build_model(Metadata({**file.metadata, "phi3.attention.sliding_window": 9}), source)
    hf = hf_model(facts, device="cpu").eval()
    hf.load_state_dict(hf_weights(model, plus_one=False))
    x = ids(2, 40)
    wanted = hf(input_ids=x).logits
    assert_close(model(x).logits, wanted)
    assert (wanted - dl.load_model(path, mode="fp32")(x).logits).abs().max() > 0.1 * wanted.std()


def test_gradients(pair):
    """d loss / d embeddings, by a hook on the embedding table, equals transformers'."""
    model, hf, case = pair
    x = ids(2, 17)
    target = torch.randn(2, 17, 256, generator=torch.Generator().manual_seed(3))
    gradients = []
    for root in (model, hf):
        embeds = []
        hook = root.get_input_embeddings().register_forward_hook(
            lambda m, args, out, keep=embeds: keep.append(out.detach().requires_grad_()) or keep[-1]
        )
        loss = (root(input_ids=x).logits * target).sum()
        hook.remove()
        gradients.append(torch.autograd.grad(loss, embeds[0])[0])
    assert_close(*gradients, tolerance=GRADIENT * TINY[case])
