"""Tools that are made for transformers' models, on ours: by module path, unchanged."""

from collections import OrderedDict

import pytest
import torch
from test_invariants import text

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
