"""Tools that are made for transformers' models, on ours: by module path, unchanged."""

from collections import OrderedDict

import pytest
import torch
from test_invariants import text
from tolerances import FP32_LOGITS

import dasllama_torch as dl

IDS = torch.tensor([text(91, 13)])


@pytest.fixture(scope="module")
def model(oracle):
    return dl.load_model(oracle / "tiny" / "llama.gguf")


class TraceDict(OrderedDict):
    """What baukit's TraceDict does (Bau, MIT licence; it is in no package index): hooks at paths, `edit_output` in the
    output's place, outputs kept by path."""

    def __init__(self, model, layers, edit_output):
        super().__init__()
        self.hooks = []
        for layer in layers:
            module = dict(model.named_modules())[layer]

            def hook(m, args, output, layer=layer):
                self[layer] = edit_output(output, layer)
                return self[layer]

            self.hooks.append(module.register_forward_hook(hook))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def test_tracing_by_path(model):
    layers = ["model.layers.0.self_attn", "model.layers.1.mlp.up_proj"]
    with TraceDict(model, layers, lambda output, layer: 2 * output if layer == layers[0] else output) as traced:
        logits = model(IDS).logits
    assert list(traced) == layers
    with dl.patch(model, {layers[0]: lambda x: 2 * x}):
        wanted, cache = dl.run_with_cache(model, IDS, layers[1])
    assert torch.equal(logits, wanted)
    assert torch.equal(traced[layers[1]], cache[layers[1]])


def test_nnsight(model):
    """Values read and written within a trace, by attributes that are module paths."""
    nnsight = pytest.importorskip("nnsight")
    traced = nnsight.NNsight(model)
    with traced.trace(IDS):
        traced.model.layers[0].self_attn.output[:] = 0
        hidden = traced.model.layers[1].output.save()
        logits = traced.lm_head.output.save()
    with dl.patch(model, {"model.layers.0.self_attn": torch.zeros_like}):
        wanted, cache = dl.run_with_cache(model, IDS, "model.layers.1")
    assert torch.equal(hidden, cache["model.layers.1"])
    assert torch.equal(logits, wanted)


@torch.no_grad()
def test_transformer_lens(demo_model, tmp_path):
    """Its bridge on transformers' class with our packed matrices: the names that it shares with us are of the same
    values, and its hooks write."""
    bridges = pytest.importorskip("transformer_lens.model_bridge", exc_type=ImportError)
    hf = dl.packed_transformers(demo_model, mode="fp32")
    dl.AutoTokenizer.from_pretrained(demo_model).save_pretrained(tmp_path)
    tokenizer = dl.AutoTokenizer.from_pretrained(tmp_path)  # the bridge loads it once more from there
    bridge = bridges.TransformerBridge.boot_transformers("demo", hf_model=hf, tokenizer=tokenizer, device="cpu")
    model = dl.load_model(demo_model, mode="fp32")
    ids = torch.tensor([model.encode("The old lighthouse stood at the end of the")])
    values = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "ln2.hook_scale")
    values += ("attn.hook_pattern", "attn.hook_z", "mlp.hook_pre", "mlp.hook_post")
    names = [f"blocks.7.{value}" for value in values]
    logits, theirs = bridge.run_with_cache(ids, names_filter=names)
    wanted, ours = dl.run_with_cache(model, ids, names)
    assert_close(logits, wanted)
    for name in names:
        assert_close(theirs[name], ours[name])
    logits = bridge.run_with_hooks(ids, fwd_hooks=[("blocks.3.hook_mlp_out", lambda value, hook: value * 0)])
    with dl.patch(model, {"blocks.3.hook_mlp_out": torch.zeros_like}):
        patched = model(ids).logits
    assert_close(logits, patched)
    assert (patched - wanted).abs().max() > 1


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= FP32_LOGITS * max(wanted.std(), 1)
