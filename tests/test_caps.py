"""`caps()` and `inspect` speak of every family."""

import json

import pytest
from families import TINY

import dasllama_torch as dl
from dasllama_torch.cli import main

SAID = {
    "llama_rope3": "layers: 2 attention; positions: rope, llama3; sessions go back anywhere",
    "qwen3vl": "layers: 2 attention; positions: m-rope; sessions go back anywhere",
    "gpt-oss": (
        "layers: 1 attention over 12 tokens with experts, 1 attention with experts; 2 of 4 experts for each token; "
        "positions: rope, yarn; sessions go back anywhere"
    ),
    "smollm3": "layers: 4 attention; positions: rope, none; sessions go back anywhere",
}


@pytest.mark.parametrize("name", TINY)
def test_every_family(name, oracle, capsys):
    path = oracle / "tiny" / f"{name}.gguf"
    model = dl.load_model(path)
    caps = dl.caps(model)
    facts = json.loads(path.with_suffix(".json").read_text())
    hf = facts["config"].get("text_config") or facts["config"]
    assert caps.architecture == facts["arch"]
    assert sum(caps.layers.values()) == hf["num_hidden_layers"]
    assert caps.context == hf["max_position_embeddings"]
    assert caps.experts == (hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts") or 0)
    recurrent = sum(kind == "linear_attention" for kind in hf.get("layer_types") or ())
    assert caps.layers.get("gated delta net", 0) + caps.layers.get("gated delta net with experts", 0) == recurrent
    assert caps.rewinds == (recurrent == 0)
    assert not caps.vocabulary
    assert not caps.chat_template
    assert caps.chat is None
    if name in SAID:
        assert str(caps) == SAID[name]
    main(["inspect", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["caps"]["summary"] == str(caps)


def test_a_real_model(demo_model, capsys):
    caps = dl.caps(dl.load_model(demo_model))
    assert caps.vocabulary
    assert caps.chat_template
    assert (caps.chat.system, caps.chat.tools, caps.chat.reasoning) == (True, False, False)
    assert str(caps).endswith("; chat: system message (tokenizer.chat_template)")
    main(["inspect", str(demo_model)])
    assert "model          layers: 30 attention\n               positions: rope\n" in capsys.readouterr().out
