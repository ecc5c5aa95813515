"""Choices of routers, and states of delta nets: transformers' own."""

import pytest
import torch
from hf_pairs import live_pair
from test_invariants import text
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.errors import ContextFull, UnsupportedModel

IDS = text(61, 33)
ROUTED = ("qwen2moe", "qwen3moe", "glm4moe", "gpt-oss", "gemma4_moe", "qwen35moe", "qwen3vlmoe")


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTED)
def test_routers_choose_as_in_transformers(name, oracle):
    model, hf = live_pair(oracle, name)
    seen = {}
    for i, layer in enumerate(hf.get_decoder().layers):
        for path, module in layer.named_modules():
            if path in ("mlp.gate", "mlp.router", "router"):
                module.register_forward_hook(lambda m, args, out, i=i: seen.update({i: out}))
    hf(input_ids=torch.tensor([IDS]))
    found = dl.router_choices(model, IDS)
    assert found.keys() == seen.keys()
    for layer, choice in found.items():
        _, weights, ids = seen[layer]
        assert torch.equal(choice.ids, ids)
        assert (choice.weights - weights).abs().max() <= FP32_LOGITS * weights.abs().max()
        assert choice.logits.shape == (len(IDS), model.config.layers[layer].moe.n_experts)
        assert choice.load().tolist() == [int((ids == e).sum()) for e in range(choice.logits.shape[1])]


def test_choices_in_a_session(load):
    model = load("qwen3moe")
    with dl.create_session(model, kv_dtype="f32") as session:
        session.eval(IDS[:20])
        found = dl.router_choices(session, IDS[20:])
    for layer, choice in dl.router_choices(model, IDS).items():
        assert torch.equal(found[layer].ids, choice.ids[20:])
    with pytest.raises(UnsupportedModel, match="no layer of this model has experts"):
        dl.router_choices(load("llama"), IDS)


@pytest.fixture(scope="module", params=["qwen35", "qwen3next"])
def hybrid(request, oracle):
    return live_pair(oracle, request.param)


@torch.no_grad()
def hf_states(hf, ids):
    """By layer: the state of the delta rule and the last inputs of the convolution, [channels, taps]."""
    cache = hf(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    recurrent = [i for i, layer in enumerate(hf.get_decoder().layers) if hasattr(layer, "linear_attn")]
    return {i: (cache.layers[i].recurrent_states[0][0], cache.layers[i].conv_states[0][0]) for i in recurrent}


def assert_states(found, n, wanted):
    assert found.keys() == wanted.keys()
    for layer, states in found.items():
        delta, conv = wanted[layer]
        at = states.after.index(n)
        taps = states.conv.shape[1]
        assert (states.delta[at] - delta).abs().max() <= 3 * FP32_LOGITS * delta.std()
        assert (states.conv[at].T - conv[:, -taps:]).abs().max() <= 3 * FP32_LOGITS * conv.std()


def test_states_are_those_of_transformers(hybrid):
    """After some tokens on the way, and after the last."""
    model, hf = hybrid
    found = dl.recurrent_states(model, IDS, after=[5, 20, 32])
    assert next(iter(found.values())).after == (5, 20, 32)
    for n in (5, 20, 32):
        assert_states(found, n, hf_states(hf, IDS[: n + 1]))


def test_states_of_a_session(hybrid):
    model, hf = hybrid
    with dl.create_session(model, kv_dtype="f32") as session:
        wanted_logits = session.eval(IDS).clone()
        now = dl.recurrent_states(session)
        assert torch.equal(session.logits, wanted_logits)
    assert_states(now, 32, hf_states(hf, IDS))
    with dl.create_session(model, kv_dtype="f32") as session:
        session.eval(IDS[:9])
        found = dl.recurrent_states(session, IDS[9:], after=[10])
        assert session.n_past == len(IDS)
        assert torch.equal(session.logits, wanted_logits)
        assert_states(found, 10, hf_states(hf, IDS[:11]))
        with pytest.raises(ValueError, match=r"after is \[3\], wanted positions from 33 to 34"):
            dl.recurrent_states(session, [1, 2], after=[3])
    with dl.create_session(model) as session, pytest.raises(ValueError, match="after is"):
        dl.recurrent_states(session)
    with dl.create_session(model, n_ctx=20, on_full="shift") as session:
        dl.recurrent_states(session, IDS[:19], after=[3])
        with pytest.raises(ContextFull, match="shift"):
            dl.recurrent_states(session, IDS[:5])


def test_no_states(load):
    with pytest.raises(UnsupportedModel, match="no layer of this model is recurrent"):
        dl.recurrent_states(load("llama"), IDS)
