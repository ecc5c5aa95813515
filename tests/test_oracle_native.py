"""Native arithmetic of every family: its tiny model, quantized to Q8_0 by the `gguf` package, against the same file
dequantized, and bitwise the same however the tokens are cut."""

import numpy as np
import pytest
import torch
from families import TINY
from test_invariants import in_chunks, ragged, text, whole
from tolerances import NATIVE_LOGPROB, NATIVE_LOGPROB_RANDOM

import dasllama_torch as dl
from dasllama_torch.modules import moe
from dasllama_torch.ops import report, reset_report


@pytest.fixture(params=TINY)
def path(request, q8_0):
    return q8_0(request.param)


class Routing:
    """Records the experts that a model's routers choose, then makes another model take the same.

    Any rounding flips some near ties of a router, after which two different models would be compared.
    """

    def __init__(self, monkeypatch):
        self.patch, self.route, self.chosen = monkeypatch, moe.moe_router, []
        self.patch.setattr(moe, "moe_router", self._record)

    def replay(self):
        self.patch.setattr(moe, "moe_router", self._replay)

    def _record(self, *args):
        weights, ids = self.route(*args)
        self.chosen.append(ids)
        return weights, ids

    def _replay(self, logits, bias, top_k, gate, renormalize, scale):
        ids = self.chosen.pop(0)
        weights = (logits.sigmoid() if gate == moe.SIGMOID_GATE else logits.softmax(-1)).gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * scale, ids


def test_native_is_near_the_dequantized_model(path, oracle, monkeypatch, measured):
    routing = Routing(monkeypatch)
    ids = np.load(oracle / "tiny" / f"{path.stem}.npz")["ids_s100"].tolist()
    reset_report()
    found = whole(dl.load_model(path), ids, "f32").log_softmax(-1)
    assert sum(report()["quant_linear"].values()) > 0
    routing.replay()
    wanted = whole(dl.load_model(path, mode="fp32"), ids, "f32").log_softmax(-1)
    assert not routing.chosen
    difference = found - wanted
    of_the_text = difference[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    measured(path.stem, "native", of_the_text.mean().abs().item())
    assert of_the_text.mean().abs() <= NATIVE_LOGPROB
    assert 0 < difference.abs().mean() <= NATIVE_LOGPROB_RANDOM * TINY[path.stem]


def test_however_the_tokens_are_cut(path):
    model = dl.load_model(path)
    ids = text(9, 75)
    wanted = whole(model, ids, "f16")
    for size in (1, 3, 64):
        assert torch.equal(in_chunks(model, ids, size, "f16"), wanted)


def test_whoever_else_is_in_the_batch(path):
    for found, wanted in ragged(dl.load_model(path)):
        assert torch.equal(found, wanted)
