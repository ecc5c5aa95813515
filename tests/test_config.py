"""Configs: rotary tables against transformers, and every hyper-parameter that a broken or hostile file may hold."""

import math

import pytest
import torch
from tolerances import INV_FREQ
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import dasllama_torch as dl
from dasllama_torch.arch import FAMILIES
from dasllama_torch.config import LongRope, RopeSpec, Yarn, read_rope
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.random_source import RandomSource

GOOD = {
    "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0, "vocab_size": 300,
}  # fmt: skip
MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
DELTA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
    "full_attention_interval": 2,
}  # fmt: skip
# What a family needs besides.
MORE = {
    "gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention.sliding_window": 8},
    "glm4moe": MOE | {"expert_shared_count": 1, "leading_dense_block_count": 1},
    "gpt-oss": MOE | {"attention.sliding_window": 8},
    "gemma4": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False],
        "attention.key_length_swa": 8,
        "attention.key_length": 16,
    },
    "qwen2moe": MOE | {"expert_shared_feed_forward_length": 48},
    "qwen2vl": {"rope.dimension_sections": [2, 3, 3, 0]},
    "qwen3moe": MOE,
    "qwen3next": MOE | DELTA | {"expert_shared_feed_forward_length": 48},
    "qwen35": DELTA | {"rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8},
    "qwen35moe": MOE
    | DELTA
    | {
        "expert_shared_feed_forward_length": 48,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.dimension_count": 8,
    },
    "qwen3vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "qwen3vlmoe": MOE | {"rope.dimension_sections": [4, 2, 2, 0]},
}
N_VOCAB = 300


class Source(RandomSource):
    """Random tensors of a file whose embedding table has N_VOCAB rows and whose head is tied."""

    def rows(self, name):
        return N_VOCAB


def build(arch, changes, optional=(), **options):
    keys = GOOD | MORE.get(arch, {})
    values = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    for key, value in changes.items():
        if value is None:
            values.pop(f"{arch}.{key}", None)
        else:
            values[f"{arch}.{key}"] = value
    return dl.build_model(Metadata(values, "made.gguf"), Source(0, optional=optional), **options)


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_good_file_builds(arch):
    model = build(arch, {})
    with torch.no_grad():
        assert model(torch.arange(9).unsqueeze(0)).logits.isfinite().all()


OPTIONAL = ("attention.head_count_kv", "rope.freq_base", "vocab_size", "feed_forward_length")
BAD = [
    *((key, value) for key in GOOD for value in (-1, "text", float("nan"), [1, 2, 3])),
    *((key, 0) for key in GOOD if key not in ("rope.freq_base", "attention.layer_norm_rms_epsilon")),
    *((key, None) for key in GOOD if key not in OPTIONAL),
    *((key, 2**63) for key in GOOD if key != "attention.layer_norm_rms_epsilon" and key != "rope.freq_base"),
    ("block_count", 10**9),
    ("attention.head_count", 3),
    ("attention.head_count_kv", 3),
    ("attention.head_count", [4, 4, 4]),
    ("attention.key_length", 0),
    ("attention.key_length", 15),
    ("attention.value_length", 8),
    ("rope.dimension_count", 128),
    ("rope.dimension_count", 7),
    ("rope.freq_base", 0.0),
    ("rope.freq_base", float("inf")),
    ("attention.layer_norm_rms_epsilon", float("inf")),
    ("attention.layer_norm_rms_epsilon", -1e-5),
    ("rope.scaling.type", "longrope"),
    ("rope.scaling.factor", float("nan")),
    ("rope.scaling.factor", 0.0),
    ("vocab_size", N_VOCAB + 1),
    ("vocab_size", N_VOCAB - 1),
    ("expert_count", -1),
    ("a_key_of_tomorrow", 1),
]


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize(("key", "value"), BAD)
def test_bad_values_are_refused_by_name(arch, key, value):
    with pytest.raises(dl.DasllamaError) as caught:
        build(arch, {key: value})
    text = str(caught.value)
    assert "made.gguf" in text
    assert "\n" not in text


EXPERTS_ONLY = ["qwen3next", "qwen35moe"]  # no layer has another FFN, and files may lack its width


@pytest.mark.parametrize("arch", FAMILIES)
def test_only_experts_make_up_for_a_missing_width(arch):
    if arch in EXPERTS_ONLY:
        build(arch, {"feed_forward_length": None})
        return
    with pytest.raises(dl.GGUFError, match="feed_forward_length"):
        build(arch, {"feed_forward_length": None})


EXPERTS = [arch for arch in FAMILIES if "expert_count" in MORE.get(arch, {})]


@pytest.mark.parametrize("arch", [arch for arch in FAMILIES if arch not in EXPERTS])
def test_experts_that_a_family_does_not_have_are_refused(arch):
    with pytest.raises(dl.DasllamaError, match="expert_"):
        build(arch, {"expert_count": 4})


@pytest.mark.parametrize("arch", EXPERTS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in MOE for value in ("text", float("nan"), [1, 2, 3], -1, 2**63)),
        ("expert_used_count", 0), ("expert_used_count", 5), ("expert_used_count", None),
        ("expert_feed_forward_length", 0), ("expert_feed_forward_length", None), ("expert_group_count", 2),
        ("expert_group_used_count", 2), ("expert_gating_func", 0), ("expert_gating_func", 4),
        ("expert_weights_scale", -1.0), ("expert_weights_scale", float("inf")), ("expert_weights_norm", 1),
    ],
)  # fmt: skip
def test_bad_experts_are_refused_by_name(arch, key, value):
    with pytest.raises(dl.DasllamaError, match=key):
        build(arch, {key: value})


@pytest.mark.parametrize(
    ("arch", "gate", "renormalize"),
    [
        ("qwen2moe", "softmax", False), ("qwen3moe", "softmax", True), ("qwen3vlmoe", "softmax", True),
        ("glm4moe", "sigmoid", True), ("gpt-oss", "softmax", True), ("qwen3next", "softmax", True),
        ("qwen35moe", "softmax", True),
    ],
)  # fmt: skip
def test_routing(arch, gate, renormalize):
    """A family's own routing where no key speaks of it, and what keys can change."""
    spec = build(arch, {}).config.layers[-1].moe
    assert (spec.n_experts, spec.n_used, spec.width) == (4, 2, 32)
    assert (spec.gate, spec.renormalize, spec.scale) == (gate, renormalize, 1.0)
    changes = {"expert_gating_func": 2, "expert_weights_norm": not renormalize, "expert_weights_scale": 2.5}
    spec = build(arch, changes).config.layers[-1].moe
    assert (spec.gate, spec.renormalize, spec.scale) == ("sigmoid", not renormalize, 2.5)
    changes = {"expert_gating_func": 3, "expert_group_count": 1, "expert_weights_scale": 0.0}
    spec = build(arch, changes).config.layers[-1].moe
    assert (spec.gate, spec.renormalize, spec.scale) == ("softmax", True, 1.0)


def test_gemma3_needs_its_window():
    with pytest.raises(dl.GGUFError, match="sliding_window"):
        build("gemma3", {"attention.sliding_window": None})
    with pytest.raises(dl.UnsupportedModel, match="final_logit_softcapping"):
        build("gemma3", {"final_logit_softcapping": 30.0})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 0.0), ("attn_logit_softcapping", None), ("final_logit_softcapping", -30.0),
        ("final_logit_softcapping", None), ("attention.sliding_window", 0),
    ],
)  # fmt: skip
def test_gemma2_needs_its_caps_and_its_window(key, value):
    with pytest.raises(dl.GGUFError, match=key):
        build("gemma2", {key: value})


def test_gemma2_layers():
    cfg = build("gemma2", {"block_count": 3, "attention.key_length": 32}).config
    assert [layer.window for layer in cfg.layers] == [8, 0, 8]
    assert (cfg.query_scale, cfg.attn_softcap, cfg.logit_softcap) == (32**-0.5, 50.0, 30.0)


def test_gemma2_27b_scales_queries_by_the_share_of_a_head():
    cfg = build("gemma2", {"block_count": 46, "attention.key_length": 32, "feed_forward_length": 8}).config
    assert cfg.query_scale == 16**-0.5


GEMMA4 = {"block_count": 6, "attention.sliding_window_pattern": [True, True, False] * 2}


def test_gemma4_layers():
    model = build("gemma4", GEMMA4 | {"attention.shared_kv_layers": 3, "feed_forward_length": [96] * 3 + [192] * 3})
    layers = model.config.layers
    assert [layer.window for layer in layers] == [8, 8, 0] * 2
    assert [layer.head_dim for layer in layers] == [8, 8, 16] * 2
    assert [layer.kv_source for layer in layers] == [None, None, None, 1, 1, 2]
    assert [layer.ffn_width for layer in layers] == [96, 96, 96, 192, 192, 192]
    assert [layer.cache is None for layer in layers] == [False] * 3 + [True] * 3
    assert [layer.rope.theta for layer in layers] == [1e4, 1e4, 1e4] * 2
    assert model.model.layers[3].self_attn.attn.source == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention.sliding_window_pattern": [True] * 5}, "sliding_window_pattern"),
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern"),
        ({"attention.key_length_swa": 7}, "head size 7"),
        ({"attention.key_length_swa": None}, "key_length_swa"),
        ({"attention.value_length_swa": 16}, "value_length_swa"),
        ({"rope.dimension_count_swa": 4}, "dimension_count_swa"),
        ({"attention.shared_kv_layers": 6}, "shared_kv_layers"),
        ({"attention.shared_kv_layers": 4}, "layer 2 shares keys, and no layer before 2 is alike"),
        ({"attention.shared_kv_layers": 1, "attention.head_count_kv": [2] * 5 + [1]}, "layer 5 shares keys"),
        ({"embedding_length_per_layer_input": -1}, "per_layer_input"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"expert_count": 4}, "expert_feed_forward_length"),
    ],
)
def test_gemma4_refusals(changes, named):
    with pytest.raises(dl.DasllamaError, match=named):
        build("gemma4", GEMMA4 | changes)


def test_gemma4_takes_v_from_k_in_global_layers_only():
    model = build("gemma4", {}, optional=())
    assert [layer.self_attn.v_proj is None for layer in model.model.layers] == [False, True]
    model = build("gemma4", {}, optional=["blk.*.attn_v.weight"])
    assert [layer.self_attn.v_proj is None for layer in model.model.layers] == [False, False]


def test_gemma4_tables_of_layers_need_ids():
    model = build("gemma4", {"embedding_length_per_layer_input": 4})
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
        with pytest.raises(ValueError, match="wanted input_ids"):
            model(inputs_embeds=model.model.embed_tokens(ids))


def test_smollm3_layers():
    layers = build("smollm3", {"block_count": 9}).config.layers
    assert [layer.rope is None for layer in layers] == [False, False, False, True] * 2 + [False]


@pytest.mark.parametrize("arch", sorted(set(FAMILIES) - {"glm4moe", "phi3", "qwen3next", "qwen35", "qwen35moe"}))
def test_partial_rotation_is_refused_where_no_model_has_it(arch):
    with pytest.raises(dl.UnsupportedModel, match="rope.dimension_count"):
        build(arch, {"rope.dimension_count": 8})


@pytest.mark.parametrize("sections", [[2, 3, 2, 0], [2, 3, 3, 1], [2, 2, 2, 2], [8, 0, 0], [-1, 5, 4, 0], None])
@pytest.mark.parametrize("arch", ["qwen2vl", "qwen3vl", "qwen35"])
def test_sections_that_do_not_fill_a_head_are_refused(arch, sections):
    with pytest.raises(dl.DasllamaError, match="rope.dimension_sections"):
        build(arch, {"rope.dimension_sections": sections})


def test_axes_of_frequencies():
    assert build("qwen2vl", {}).config.layers[0].rope.axes == (0, 0, 1, 1, 1, 2, 2, 2)
    assert build("qwen3vl", {}).config.layers[0].rope.axes == (0, 1, 2, 0, 1, 2, 0, 0)


def test_which_layers_are_recurrent():
    kinds = {True: "linear_attn", False: "self_attn"}
    every = build("qwen35", {"block_count": 9, "full_attention_interval": None})
    listed = build("qwen35", {"block_count": 3, "attention.recurrent_layers": [False, True, True]})
    drafting = {"block_count": 3, "nextn_predict_layers": 1}
    with pytest.warns(UserWarning, match="NextN"):
        short = build("qwen35", drafting | {"attention.recurrent_layers": [False, True]})
    with pytest.warns(UserWarning, match="NextN"):
        long = build("qwen35", drafting | {"attention.recurrent_layers": [False, True, False]})
    for model, wanted in (
        (every, [True, True, True, False] * 2 + [True]),
        (listed, [False, True, True]),
        (short, [False, True]),
        (long, [False, True]),
    ):
        assert [layer.delta is not None for layer in model.config.layers] == wanted
        for layer, is_recurrent in zip(model.model.layers, wanted, strict=True):
            assert hasattr(layer, kinds[is_recurrent])
            assert not hasattr(layer, kinds[not is_recurrent])


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35", "qwen35moe", "qwen3next"])
def test_blocks_that_draft_tokens_are_left_with_a_warning(arch):
    with pytest.warns(UserWarning, match=r"made.gguf: 1 NextN block\(s\) for drafting tokens are not used yet"):
        model = build(arch, {"block_count": 3, "nextn_predict_layers": 1})
    assert len(model.config.layers) == len(model.model.layers) == 2
    for n in (-1, 3, "one"):
        with pytest.raises(dl.GGUFError, match="nextn_predict_layers"):
            build(arch, {"block_count": 3, "nextn_predict_layers": n})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in DELTA for value in (0, -1, "text", 2**63)),
        *((key, None) for key in DELTA if key != "full_attention_interval"),
        ("ssm.time_step_rank", 3),
        ("ssm.inner_size", 33),
        ("ssm.conv_kernel", 65),
        ("attention.recurrent_layers", [True]),
        ("attention.recurrent_layers", [1, 0]),
        ("ssm.dt_b_c_rms", True),
    ],
)
def test_broken_keys_of_recurrent_layers_are_refused(key, value):
    with pytest.raises(dl.DasllamaError, match=key):
        build("qwen35", {key: value})


def test_phi3_rotates_a_part_of_a_head():
    model = build("phi3", {"rope.dimension_count": 12, "attention.sliding_window": 5})
    spec = model.config.layers[1]
    assert (spec.rope.dim, spec.head_dim, spec.window) == (12, 16, 5)
    for window in (-1, "wide"):
        with pytest.raises(dl.GGUFError, match="sliding_window"):
            build("phi3", {"attention.sliding_window": window})


@pytest.mark.parametrize("scale", [-0.1, float("nan"), 1])
def test_mistral3_temperature(scale):
    with pytest.raises(dl.GGUFError, match="temperature_scale"):
        build("mistral3", {"attention.temperature_scale": scale})
    cfg = build("mistral3", {"attention.temperature_scale": 0.1}).config
    assert (cfg.temperature_scale, cfg.original_context) == (0.1, 64)


def test_unread_keys_and_unasked_tensors_warn_when_asked_to():
    with pytest.warns(UserWarning, match="a_key_of_tomorrow"):
        build("llama", {"a_key_of_tomorrow": 1}, strict=False)


def test_an_unknown_architecture_is_named():
    with pytest.raises(dl.UnsupportedModel, match="'mamba' is not implemented; implemented: .*llama"):
        build("mamba", {})


# ---- rotary tables ---------------------------------------------------------------------------------------------------


def hf_rope(kind, dim, **parameters):
    cfg = LlamaConfig(
        head_dim=dim, hidden_size=dim, num_attention_heads=1, max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](cfg, "cpu")


def assert_same_rope(spec, wanted):
    inv_freq, factor = wanted
    torch.testing.assert_close(spec.inv_freq(), inv_freq.float(), rtol=INV_FREQ, atol=0)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(("dim", "theta"), [(64, 1e4), (128, 5e5), (256, 1e6), (20, 1e5)])
def test_plain_and_linear(dim, theta):
    assert_same_rope(
        RopeSpec(dim=dim, theta=theta, linear_factor=8.0), hf_rope("linear", dim, rope_theta=theta, factor=8.0)
    )


@pytest.mark.parametrize("factor", [4.0, 8.0, 16.0, 32.0, 40.0])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (4.0, 1.0)])
def test_yarn(factor, fast, slow):
    md = Metadata(
        {
            "general.architecture": "llama", "llama.context_length": 65536, "llama.rope.freq_base": 150000.0,
            "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": factor,
            "llama.rope.scaling.original_context_length": 4096, "llama.rope.scaling.yarn_beta_fast": fast,
            "llama.rope.scaling.yarn_beta_slow": slow,
        }
    )  # fmt: skip
    wanted = hf_rope(
        "yarn", 64, rope_theta=150000.0, factor=factor, original_max_position_embeddings=4096, beta_fast=fast,
        beta_slow=slow,
    )  # fmt: skip
    spec = read_rope(md, 64)
    assert_same_rope(spec, wanted)
    assert spec.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


@pytest.mark.parametrize(("all_dim", "wanted"), [(0.0, 1.207944), (1.0, 1.0), (0.5, 1.207944 / 1.103972)])
def test_yarn_log_multiplier_divides_the_magnitude(all_dim, wanted):
    """HF's mscale 1 over mscale_all_dim (its 0 counts as absent, as a missing key does here)."""
    md = Metadata(
        {
            "general.architecture": "mistral3", "mistral3.context_length": 65536, "mistral3.rope.freq_base": 1e6,
            "mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 8.0,
            "mistral3.rope.scaling.original_context_length": 4096,
            "mistral3.rope.scaling.yarn_log_multiplier": all_dim,
        }
    )  # fmt: skip
    hf = hf_rope(
        "yarn", 64, rope_theta=1e6, factor=8.0, original_max_position_embeddings=4096, mscale=1.0,
        mscale_all_dim=all_dim,
    )  # fmt: skip
    assert_same_rope(read_rope(md, 64), hf)
    assert read_rope(md, 64).attention_factor == pytest.approx(wanted, abs=1e-6)


def test_long_rope():
    """Frequencies of both sets as HF computes them for sequences that do and do not outgrow the original context."""
    short, long = (tuple(torch.linspace(1, most, 8).tolist()) for most in (1.9, 14.0))
    spec = RopeSpec(dim=16, theta=1e4, freq_factors=short, long=LongRope(factors=long, original_context=256))
    cfg = LlamaConfig(
        head_dim=16, hidden_size=16, num_attention_heads=1, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": list(short), "long_factor": list(long),
            "original_max_position_embeddings": 256,
        },
    )  # fmt: skip
    for found, n in ((spec.inv_freq(), 256), (spec.long_inv_freq(), 257)):
        wanted, _ = ROPE_INIT_FUNCTIONS["longrope"](cfg, "cpu", seq_len=n)
        torch.testing.assert_close(found, wanted.float(), rtol=INV_FREQ, atol=0)


def test_yarn_magnitudes_of_published_models():
    found = [0.1 * math.log(f) + 1 for f in (4, 8, 32, 40)]
    assert found == pytest.approx([1.138629, 1.207944, 1.346574, 1.368888], abs=1e-6)
    assert Yarn(factor=4.0, original_context=32).beta_fast == 32.0


@pytest.mark.parametrize(
    ("dim", "factor", "wanted"),
    [
        (128, 8.0, [*[1.0] * 29, 1.207484, 1.553415, 2.026313, 2.69453, 3.684253, 5.257327, *[8.0] * 29]),
        (64, 32.0, [*[1.0] * 15, 1.651329, 3.292262, 9.666729, *[32.0] * 14]),
    ],
)
def test_llama3_factors_divide(dim, factor, wanted):
    """The tensor `rope_freqs` holds these divisors; with them the frequencies are those of HF's llama3 scaling."""
    spec = RopeSpec(dim=dim, theta=5e5, freq_factors=tuple(wanted))
    inv_freq, _ = hf_rope(
        "llama3", dim, rope_theta=5e5, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    torch.testing.assert_close(spec.inv_freq(), inv_freq.float(), rtol=1e-5, atol=0)
    plain = RopeSpec(dim=dim, theta=5e5).inv_freq()
    positions = torch.tensor([0, 100, 8191, 8192, 20000]).double()
    angle = lambda f: positions[:, None] * f.double()  # noqa: E731
    torch.testing.assert_close(angle(spec.inv_freq()).cos(), angle(inv_freq).cos(), rtol=0, atol=3e-2)
    assert (angle(spec.inv_freq()).cos() - angle(plain).cos()).abs().max() > 0.5  # a lost tensor is loud


def test_gemma3_layers():
    model = build(
        "gemma3", {"block_count": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    )
    layers = model.config.layers
    assert [layer.window for layer in layers] == [8] * 5 + [0, 8]
    assert [layer.rope.theta for layer in layers] == [1e4] * 5 + [1e6, 1e4]
    assert [layer.rope.linear_factor for layer in layers] == [1.0] * 5 + [8.0, 1.0]


@pytest.mark.parametrize(("layers", "wanted"), [(26, 16), (62, 32)])
def test_gemma3_query_scale(layers, wanted):
    """27B divides queries by the square root of the embedding's share of a head; the others by that of the head
    size.
    """
    tiny = {"block_count": layers, "attention.key_length": 16, "attention.head_count": 2, "attention.head_count_kv": 1}
    assert build("gemma3", tiny).config.query_scale == pytest.approx(wanted**-0.5)


class WithFactors(Source):
    """A source that also holds `rope_freqs`."""

    def names(self):
        return ["rope_freqs.weight"]


def test_factors_of_the_file_are_used_or_refused():
    values = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in GOOD.items()}
    spec = dl.build_model(Metadata(values), Source(0, optional=["rope_freqs.weight"])).config.layers[0].rope
    assert len(spec.freq_factors) == 8
    values = {"general.architecture": "qwen2"} | {f"qwen2.{key}": value for key, value in GOOD.items()}
    with pytest.raises(dl.UnsupportedModel, match="rope_freqs"):
        dl.build_model(Metadata(values), WithFactors(0))
