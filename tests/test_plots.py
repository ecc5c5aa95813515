"""Figures show what they are given."""

import sys

import pytest
import torch
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.errors import DasllamaError

IDS = text(81, 9)


@pytest.fixture(autouse=True)
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.fixture(scope="module")
def model(demo_model):
    return dl.load_model(demo_model)


def test_heat_map():
    values = torch.tensor([[1.0, -3.0], [0.5, 2.0], [0.0, 0.1]])
    figure = dl.inspect.plot_heat_map(values, list("abc"), list("xy"), cells=[["1", "2"]] * 3, title="t", centred=True)
    axes = figure.axes[0]
    assert (axes.images[0].get_array() == values.numpy()).all()
    assert axes.images[0].get_clim() == (-3.0, 3.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abc")
    assert [found.get_text() for found in axes.texts] == ["1", "2"] * 3
    figure.canvas.draw()


def test_logit_lens(model):
    ids = model.encode("The price is $5.\nThe capital of France is")
    lens = dl.logit_lens(model, ids, layers=[0, 15, 30])
    figure = dl.inspect.plot_logit_lens(model, lens, ids)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 30", "layer 15", "embedding"]
    said = [text.get_text() for text in axes.texts[: len(ids)]]
    assert said == [_label(model, token) for token in lens.ids[-1, 0, :, 0]]
    assert axes.images[0].get_array()[0, -1] == pytest.approx(lens.log_probs[-1, 0, -1, 0].exp().item())
    figure.canvas.draw()  # a dollar sign begins no formula


def test_attention(model, load):
    ids = model.encode("The capital of France is")
    figure = dl.inspect.plot_attention(model, dl.attention_pattern(model, ids, layers=[2])[2], ids)
    assert [axes.get_title() for axes in figure.axes[:9]] == [f"layer 2, head {h}" for h in range(9)]
    sinking = dl.attention_pattern(load("gpt-oss"), IDS, layers=[0], heads=[1])[0]
    axes = dl.inspect.plot_attention(model, sinking, IDS).axes[0]
    assert axes.get_xticklabels()[0].get_text() == "(sink)"
    assert (axes.images[0].get_array()[:, 0] == sinking.sink[0, 0].numpy()).all()
    with dl.create_session(model) as session:  # rows are the last of the keys
        session.eval(ids[:3])
        pattern = dl.attention_pattern(session, ids[3:], layers=[0], heads=[0])[0]
    axes = dl.inspect.plot_attention(model, pattern, ids).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["\u2423France", "\u2423is"]


def test_attribution(model):
    found = dl.logit_attribution(model, model.encode("The capital of France is"), 7042)
    axes = dl.inspect.plot_attribution(found).axes[0]
    heights = sorted(bar.get_height() for bar in axes.patches)
    assert heights == pytest.approx(sorted(found.values.tolist()))


def test_without_matplotlib(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DasllamaError, match=r"figures need matplotlib: pip install 'dasllama-torch\[plots\]'"):
        dl.inspect.plot_heat_map(torch.zeros(1, 1), ["a"], ["b"])


def _label(model, token):
    return model.piece(int(token)).replace("\n", "\\n").replace(" ", "\u2423", 1)
