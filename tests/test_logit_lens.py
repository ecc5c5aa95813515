"""The logit lens, and direct logit attribution: against transformers' hidden states, and float64 sums of its parts."""

import pytest
import torch
from families import GRAPHS
from hf_pairs import live_pair
from test_invariants import text
from tolerances import FP32_LOGITS

import dasllama_torch as dl

IDS = text(51, 19)
N = len(IDS)


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3vl", "qwen35", "gpt-oss"])
def case(request, oracle):
    return live_pair(oracle, request.param)


@torch.no_grad()
def test_every_layer_is_read_as_transformers_would(case):
    model, hf = case
    found = dl.logit_lens(model, IDS, top_k=None)
    states = []
    decoder = hf.get_decoder()
    hooks = [
        decoder.layers[0].register_forward_pre_hook(
            lambda m, args, kwargs: states.append((args or tuple(kwargs.values()))[0]), with_kwargs=True
        ),
        *(layer.register_forward_hook(lambda m, args, out: states.append(out)) for layer in decoder.layers),
    ]
    said = hf(input_ids=torch.tensor([IDS])).logits
    for hook in hooks:
        hook.remove()
    assert found.layers == tuple(range(len(model.config.layers) + 1))
    cap = getattr(hf.config.get_text_config(), "final_logit_softcapping", None)
    for logits, state in zip(found.logits, states, strict=True):
        wanted = hf.lm_head(decoder.norm(state[0] if isinstance(state, tuple) else state))
        wanted = cap * torch.tanh(wanted / cap) if cap else wanted
        assert (logits - wanted).abs().max() <= 3 * FP32_LOGITS * wanted.std()
    assert (found.logits[-1] - said).abs().max() <= 3 * FP32_LOGITS * said.std()
    assert torch.equal(found.log_probs.exp().sum(-1).round(decimals=4), torch.ones(len(found.layers), 1, N))


def test_the_best_tokens(load):
    model = load("gemma2")
    every = dl.logit_lens(model, IDS, top_k=None)
    best = dl.logit_lens(model, IDS, layers=[0, 2], top_k=3)
    assert best.ids.shape == (2, 1, N, 3)
    for found, layer in zip(range(2), best.layers, strict=True):
        logits, ids = every.logits[layer].topk(3, -1)
        assert torch.equal(best.logits[found], logits)
        assert torch.equal(best.ids[found], ids)
        assert torch.equal(best.log_probs[found], every.log_probs[layer].gather(-1, ids))
    with torch.no_grad():
        assert torch.equal(every.logits[-1], model(torch.tensor([IDS])).logits)
    with pytest.raises(ValueError, match="layer is -1, wanted 0"):
        dl.logit_lens(model, IDS, layers=[-1])


def test_of_a_session(load):
    model = load("llama")
    with dl.create_session(model, kv_dtype="f32") as session:
        session.eval(IDS[:12])
        found = dl.logit_lens(session, IDS[12:], top_k=None)
        assert torch.equal(found.logits[-1, 0, -1], session.logits)
    wanted = dl.logit_lens(model, IDS, top_k=None).logits[:, :, 12:]
    assert (found.logits - wanted).abs().max() <= FP32_LOGITS * wanted.std()


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_sum_to_the_logit(name, oracle):
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32")
    logits, cache = dl.run_with_cache(model, IDS, "lm_head")
    for heads in (False, True):
        found = dl.logit_attribution(model, IDS, 7, 9, position=-4, heads=heads)
        assert found.logit == pytest.approx((cache["lm_head"][0, -4, 7] - cache["lm_head"][0, -4, 9]).item())
        assert abs(found.rest) <= FP32_LOGITS * logits.std() * found.values.abs().sum().clamp(min=1)
        assert found.parts[0] == "embed"
        assert len(set(found.parts)) == len(found.parts)
    assert not model.logit_softcap or abs(found.logit - (logits[0, -4, 7] - logits[0, -4, 9])) > 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "gemma4", "qwen35"])
def test_each_part_is_what_transformers_part_adds(name, oracle):
    """In float64, from hooks in transformers' model: embedding, attention by head, and what is left of each layer."""
    model, hf = live_pair(oracle, name)
    decoder, seen = hf.get_decoder(), {}
    mixers = [getattr(layer, "self_attn", None) or layer.linear_attn for layer in decoder.layers]
    outs = [mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj for mixer in mixers]
    hooks = [
        decoder.layers[0].register_forward_pre_hook(
            lambda m, args, kwargs: seen.update(embed=(args or tuple(kwargs.values()))[0]), with_kwargs=True
        )
    ]
    for i, (layer, out) in enumerate(zip(decoder.layers, outs, strict=True)):
        hooks += [
            out.register_forward_hook(lambda m, args, y, i=i: seen.update({("heads", i): args[0], ("out", i): y})),
            layer.register_forward_hook(
                lambda m, args, y, i=i: seen.update({("layer", i): y[0] if isinstance(y, tuple) else y})
            ),
        ]
    hf(input_ids=torch.tensor([IDS]))
    for hook in hooks:
        hook.remove()
    seen = {key: value[0, -1].double() for key, value in seen.items()}
    last = len(decoder.layers) - 1
    weight = model.get_decoder().norm.weight
    direction = hf.lm_head.weight[3].double() * weight.double()
    direction = direction / (seen["layer", last].square().mean() + model.config.norm_eps).sqrt()
    wanted = {}
    for i in reversed(range(last + 1)):
        layer = decoder.layers[i]
        before = seen["layer", i - 1] if i else seen["embed"]
        total = seen["layer", i] @ direction
        direction = direction * (layer.layer_scalar.double() if hasattr(layer, "layer_scalar") else 1.0)
        there = direction
        if hasattr(layer, "pre_feedforward_layernorm"):
            norm = model.get_decoder().layers[i].post_attention_layernorm
            there = direction * norm.weight.double() / (seen["out", i].square().mean() + norm.eps).sqrt()
        heads = _heads(model, i)
        columns = outs[i].weight.double().unflatten(1, (heads, -1))  # [C, H, D]
        for h, value in enumerate(seen["heads", i].unflatten(0, (heads, -1))):
            wanted[f"L{i}H{h}"] = there @ (columns[:, h] @ value)
        if outs[i].bias is not None:
            wanted[f"L{i} bias"] = there @ outs[i].bias.double()
        attention = sum(value for part, value in wanted.items() if part.startswith((f"L{i}H", f"L{i} bias")))
        wanted[f"L{i} mlp"] = total - before @ direction - attention
    wanted["embed"] = seen["embed"] @ direction
    found = dl.logit_attribution(model, IDS, 3, heads=True)
    assert set(found.parts) == set(wanted)
    size = max(map(abs, wanted.values()))
    for part, value in zip(found.parts, found.values, strict=True):
        assert abs(value - wanted[part]) <= FP32_LOGITS * size, part
    whole = dl.logit_attribution(model, IDS, 3)
    for i in range(last + 1):
        by_head = sum(
            v for p, v in zip(found.parts, found.values, strict=True) if p.startswith((f"L{i}H", f"L{i} bias"))
        )
        assert abs(whole.values[whole.parts.index(f"L{i} attn")] - by_head) <= FP32_LOGITS * size


def _heads(model, layer):
    spec = model.config.layers[layer]
    return spec.delta.n_v_heads if spec.delta else spec.n_heads


def test_what_attribution_refuses(load):
    model = load("llama")
    with pytest.raises(ValueError, match="position is 19, wanted -19 to 18"):
        dl.logit_attribution(model, IDS, 3, position=19)
    with pytest.raises(ValueError, match="token id 256"):
        dl.logit_attribution(model, IDS, 3, 256)
    found = dl.logit_attribution(model, IDS, 3)
    assert str(found).splitlines()[0].startswith("logit ")
    assert "L1 mlp" in str(found)
