"""compare: it says that equal models are equal, and where the first fault of an unequal one lies."""

import json
from html.parser import HTMLParser

import hf_twin
import numpy as np
import pytest
import small_llama
import torch
from families import TINY
from test_module_paths import hf_model
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource, PackedTensor
from dasllama_torch.gguf.writer import write_gguf

PROMPT = torch.randint(0, 250, (37,), generator=torch.Generator().manual_seed(5)).tolist()


class Faulty(GGUFSource):
    """A file's tensors, one of which `fault` changes. fault: f32 -> f32 of the same shape."""

    native = False

    def __init__(self, path, name, fault):
        super().__init__(GGUFFile(path))
        self.name, self.fault = name, fault

    def _fetch(self, name, shape):
        tensor = super()._fetch(name, shape)
        if name != self.name or tensor is None:
            return tensor
        values = tensor.data.view(torch.float32).reshape(tensor.shape)
        changed = self.fault(values.clone()).contiguous()
        return PackedTensor(name, tensor.shape, tensor.qtype, changed.view(torch.uint8).reshape(tensor.data.shape))


def faulty(path, name, fault):
    """The model of a file with one tensor changed."""
    return dl.build_model(GGUFFile(path).metadata, Faulty(path, name, fault))


def with_keys(path, **changed):
    """The model of a file with keys of its architecture changed."""
    file = GGUFFile(path)
    arch = file.metadata.architecture
    source = GGUFSource(file)
    source.native = False
    return dl.build_model(Metadata({**file.metadata, **{f"{arch}.{k}": v for k, v in changed.items()}}), source)


def hf_of(path):
    """transformers' model of a golden case, with the weights of its file."""
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()), device="cpu").eval().float()
    hf.load_state_dict(dl.to_hf(dl.load_model(path)), strict=False)
    return hf


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    made = {}
    return lambda kind: made.get(kind) or made.setdefault(kind, hf_twin.make(kind, tmp_path_factory.mktemp("twin")))


# ---- equal models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3moe", "mistral3_yarn", "gpt-oss", "gemma4_e", "glm4moe", "phi3", "qwen35"])
def test_equal_to_transformers_at_every_module(case, oracle):
    path = oracle / "tiny" / f"{case}.gguf"
    result = dl.compare(dl.load_model(path, mode="fp32"), hf_of(path), PROMPT, tolerance=10 * FP32_LOGITS * TINY[case])
    assert result.within, str(result)
    assert result.first is None
    places = {m.place for m in result.modules}
    rotated = "model.layers.3.self_attn" if case == "qwen35" else "model.layers.0.self_attn"
    assert not result.shapes_differ
    if case == "qwen35":  # what its delta nets call functions for is seen, too
        assert {"model.layers.0.linear_attn.conv1d", "model.layers.2.linear_attn.delta"} <= places
        assert not result.only_in_model
    assert any(place.startswith(f"{rotated}.rope") for place in places)
    assert {f"{rotated}.attn", f"{rotated}.o_proj", "model.norm", "lm_head", "logits"} <= places
    assert max(result.kl) < 1e-6
    assert all(result.top1)
    assert min(result.overlap) >= 0.9


def test_either_side_may_be_transformers(twins):
    twin = twins("gemma3")
    model = dl.load_model(twin.path, mode="fp32")
    # As many tokens as heads: some of transformers' shapes do not tell which is which.
    for n in (model.config.num_attention_heads, 23):
        forth, back = dl.compare(model, twin.hf, PROMPT[:n]), dl.compare(twin.hf, model, PROMPT[:n])
        assert forth.within
        assert back.within
        assert {m.place for m in forth.modules} == {m.place for m in back.modules}
        assert not forth.shapes_differ


def test_a_model_equals_itself_bitwise(twins):
    model = dl.load_model(twins("llama").path)
    result = dl.compare(model, model, torch.tensor([PROMPT]))
    assert {(m.max, m.mean, m.token, m.within) for m in result.modules} == {(0.0, 0.0, 0, True)}
    assert all(m.cosine == pytest.approx(1) for m in result.modules)
    assert result.only_in_model == result.only_in_other == []
    assert result.mean_kl == 0


def test_modes(tmp_path):
    path = small_llama.write(tmp_path / "small.gguf")
    native, fp32 = dl.load_model(path, mode="q8"), dl.load_model(path, mode="fp32")
    result = dl.compare(native, fp32, PROMPT)
    assert result.first.place == "model.embed_tokens"  # it is requantized too
    assert dl.compare(native, fp32, PROMPT, tolerance=1.0).within
    assert 0 < result.mean_kl < 0.1


# ---- planted faults -------------------------------------------------------------------------------------------------


def test_a_rotary_base_off_by_one_percent(twins):
    twin = twins("llama")
    model = with_keys(twin.path, **{"rope.freq_base": 10100.0})
    for other in (twin.hf, dl.load_model(twin.path, mode="fp32")):
        first = dl.compare(model, other, PROMPT).first
        assert first.place == "model.layers.0.self_attn.rope"
        assert first.kind == "Rope"


def test_a_transposed_expert(oracle):
    path = oracle / "tiny" / "qwen3moe.gguf"

    def transpose(stack):
        stack[2] = stack[2].T.reshape(stack[2].shape)
        return stack

    model = faulty(path, "blk.1.ffn_down_exps.weight", transpose)
    assert dl.compare(model, hf_of(path), PROMPT).first.place == "model.layers.1.mlp.experts"
    ours = dl.load_model(path, mode="fp32")
    assert dl.compare(model, ours, PROMPT).first.place == "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("name", "fault", "place"),
    [
        ("ssm_conv1d.weight", lambda weight: weight.flip(-1), "conv1d"),
        ("ssm_a", lambda decay: 1.1 * decay, "delta"),
    ],
)
def test_a_fault_of_a_delta_net(oracle, name, fault, place):
    path = oracle / "tiny" / "qwen35.gguf"
    first = dl.compare(faulty(path, f"blk.1.{name}", fault), hf_of(path), PROMPT).first
    assert first.place == f"model.layers.1.linear_attn.{place}"


def test_a_norm_without_its_one(twins):
    twin = twins("gemma3")
    model = faulty(twin.path, "blk.2.ffn_norm.weight", lambda weight: weight - 1)
    first = dl.compare(model, twin.hf, PROMPT).first
    assert first.place == "model.layers.2.pre_feedforward_layernorm"


def test_a_window_off_by_one(twins):
    twin = twins("gemma3")
    window = GGUFFile(twin.path).metadata["gemma3.attention.sliding_window"]
    model = with_keys(twin.path, **{"attention.sliding_window": window + 1})
    first = dl.compare(model, twin.hf, PROMPT).first
    assert first.place == "model.layers.0.self_attn.attn"
    assert first.token >= window  # rows before see the same keys


def test_values_that_are_no_numbers_are_over_any_tolerance(twins):
    path = twins("llama").path
    model = faulty(path, "blk.1.attn_v.weight", lambda weight: weight.fill_(float("nan")))
    result = dl.compare(model, dl.load_model(path, mode="fp32"), PROMPT, tolerance=1e9)
    assert result.first.place == "model.layers.1.self_attn.v_proj"
    figures = json.loads(result.to_json())
    assert figures["first"] == "model.layers.1.self_attn.v_proj"
    assert next(m for m in figures["modules"] if m["place"] == figures["first"])["max"] is None


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_are_what_they_are_said_to_be(tmp_path):
    path = small_llama.write(tmp_path / "small.gguf")
    a, b = dl.load_model(path, mode="q8"), dl.load_model(path, mode="fp32")
    result = dl.compare(a, b, PROMPT, top_k=5)
    outputs = []
    for model in (a, b):
        hook = model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: outputs.append(out.double()))
        with torch.no_grad():
            outputs.append(model(torch.tensor([PROMPT])).logits[0].double())
        hook.remove()
    (x, logits_a), (y, logits_b) = outputs[:2], outputs[2:]
    mlp = next(m for m in result.modules if m.place == "model.layers.1.mlp")
    difference = (x - y).abs()
    assert mlp.max == pytest.approx(difference.max().item())
    assert mlp.mean == pytest.approx(difference.mean().item())
    assert mlp.spread == pytest.approx(np.std(y.numpy()))
    assert mlp.cosine == pytest.approx(torch.cosine_similarity(x.flatten(), y.flatten(), 0).item())
    assert mlp.token == difference[0].amax(-1).argmax()
    p = torch.distributions.Categorical(logits=logits_b)
    kl = torch.distributions.kl_divergence(p, torch.distributions.Categorical(logits=logits_a))
    assert result.kl == pytest.approx(kl.tolist())
    best = [[set(row.topk(5).indices.tolist()) for row in logits] for logits in (logits_a, logits_b)]
    assert result.overlap == pytest.approx([len(i & j) / 5 for i, j in zip(*best, strict=True)])
    assert result.top1 == (logits_a.argmax(-1) == logits_b.argmax(-1)).tolist()


def test_order_is_that_of_the_forward(twins):
    model = dl.load_model(twins("llama").path)
    places = [m.place for m in dl.compare(model, model, PROMPT).modules]
    layer = "model.layers.0"
    order = [f"{layer}.{name}" for name in ("input_layernorm", "self_attn.v_proj", "self_attn.rope")]
    order += [f"{layer}.self_attn.rope (2)", f"{layer}.self_attn.attn", f"{layer}.self_attn", f"{layer}.mlp", layer]
    found = [places.index(name) for name in ["model.embed_tokens", *order, "model.norm", "lm_head", "logits"]]
    assert found == sorted(found)


def test_it_shows_itself(twins):
    twin = twins("llama")
    model = with_keys(twin.path, **{"rope.freq_base": 10100.0})
    result = dl.compare(model, twin.hf, PROMPT)
    text = str(result)
    assert "model.layers.0.self_attn.rope" in text
    assert f"first over 0.001 of its spread: {result.first.place}" in " ".join(text.split())
    assert "self_attn.q_proj" not in text
    assert len(result.table(every=True).rows) == len(result.modules)

    class Cells(HTMLParser):
        open, rows = [], 0

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)
            self.rows += tag == "tr"

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    cells = Cells()
    cells.feed(result._repr_html_())
    assert cells.open == []
    assert cells.rows == len(result.table().rows) + 1


def test_nothing_is_left_behind(twins, oracle):
    """Neither hooks nor what the taps put in transformers' place."""
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.qwen3_5 import modeling_qwen3_5

    twin = twins("llama")
    model = dl.load_model(twin.path)
    functions = (AttentionInterface, "get_interface"), (modeling_qwen3_5, "causal_conv1d_fn")
    before = [getattr(*function) for function in functions]
    hooked = twin.hf.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dl.compare(model, twin.hf, PROMPT)
    hooked.remove()
    hybrid = hf_of(oracle / "tiny" / "qwen35.gguf")
    dl.compare(hybrid, hybrid, PROMPT)
    assert [getattr(*function) for function in functions] == before
    for root in (model, twin.hf, hybrid):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in root.modules())


def test_what_cannot_be_compared_is_refused(twins, oracle):
    model = dl.load_model(twins("llama").path)
    with pytest.raises(UnsupportedModel, match=r"logits of 256 tokens and .* of 301"):
        dl.compare(dl.load_model(oracle / "tiny" / "llama.gguf"), model, PROMPT)
    with pytest.raises(ValueError, match="prompt is empty"):
        dl.compare(model, model, [])
    with pytest.raises(ValueError, match="tolerance"):
        dl.compare(model, model, PROMPT, tolerance=0)
    with pytest.raises(ValueError, match="tokenizer"):
        dl.compare(twins("llama").hf, twins("llama").hf, "text")


def test_models_of_other_tokens_are_refused(twins, tmp_path, demo_model):
    demo = dl.load_model(demo_model)
    file = GGUFFile(demo_model)
    metadata = {key: file.metadata.typed(key) for key in file.metadata}
    metadata["tokenizer.ggml.add_bos_token"] = True
    other = tmp_path / "other.gguf"
    write_gguf(other, "llama", metadata, {name: (t.data, t.qtype) for name, t in file.tensors.items()})
    with pytest.raises(UnsupportedModel, match="tokenize the text differently"):
        dl.compare(demo, dl.load_model(other), "Good morning")
