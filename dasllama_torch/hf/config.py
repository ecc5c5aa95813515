"""A config of transformers as the metadata keys that a GGUF file of the model would have.

    config = transformers.AutoConfig.from_pretrained(folder)
    values, tensors = gguf_facts(config, "folder/config.json")   # {"general.architecture": "llama", ...}, {}

transformers' own classes read config.json, so that what a config leaves out has the value that they give it. Every
attribute of the config is then used, expected to have the one value that is implemented, or known to change no result;
anything else is refused by name. tensors: those of a GGUF file that stand in the config instead, factors of rotary
frequencies. Source of the keys: llama.cpp's convert_hf_to_gguf.py, and what `arch/` reads.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.metadata import REQUIRED, Metadata
from dasllama_torch.gguf.model_types import ARCHITECTURES

# Attributes that tell of training, of tokens, of files or of how transformers runs, and of no result of a forward.
_NO_MATTER = frozenset(
    ["model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "name_or_path", "_name_or_path"]
    + ["return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "chunk_size_feed_forward"]
    + ["use_cache", "is_encoder_decoder", "initializer_range", "pretraining_tp", "problem_type", "id2label"]
    + ["label2id", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "attention_dropout"]
    + ["resid_pdrop", "embd_pdrop", "router_aux_loss_coef", "max_window_layers", "router_jitter_noise"]
    + ["initial_context_length", "no_rope_layer_interval", "_sliding_window_pattern", "sliding_window_pattern"]
    + ["_attn_implementation_autoset", "attn_implementation", "_attn_implementation", "experts_implementation"]
    + ["_experts_implementation", "num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"]
    + ["mtp_use_dedicated_embeddings", "cache_implementation", "auto_map", "is_causal"]
)
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

Values = dict[str, Any]
Tensors = dict[str, Tensor]


def gguf_facts(config, origin: str) -> tuple[Values, Tensors]:
    """config: of transformers, of a text model or of one with a text decoder. origin: its file, for messages. Raises
    UnsupportedModel for a model_type that is not implemented, and for an attribute that asks for what is not."""
    text = config.get_text_config(decoder=True)
    if text.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{origin}: model_type {text.model_type!r} is not implemented; implemented: {known}")
    for each in (config, text):
        if getattr(each, "quantization_config", None) is not None:
            raise UnsupportedModel(f"{origin}: has a quantization_config, wanted weights in F32, F16 or BF16")
    arch = ARCHITECTURES[text.model_type]
    c = Metadata(_flat(text.to_dict()), origin)
    values, tensors = _FAMILIES[arch](c)
    unread = [key for key in c.unread() if key.partition(".")[0] not in _NO_MATTER]
    if unread:
        shown = ", ".join(f"{key}={c[key]!r}" for key in unread[:4])
        raise UnsupportedModel(f"{origin}: model_type {text.model_type!r} with {shown} is not implemented")
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}, tensors


def _flat(values: Mapping[str, Any], prefix: str = "") -> Values:
    """Nested dicts as dotted keys; what is None is left out, as if the config did not name it."""
    flat: Values = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(each, float) for each in value):
            flat[f"{prefix}{key}"] = [float(each) for each in value]  # JSON may write some without a point
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _number(c: Metadata, key: str, default: float = REQUIRED) -> float:
    """A number that JSON may have written without a point."""
    value = c.get(key)
    return float(c.int(key)) if isinstance(value, int) and not isinstance(value, bool) else c.float(key, default)


def _one_of(c: Metadata, *keys: str) -> int:
    """An integer that transformers' classes call by one of these names."""
    return c.int(next((key for key in keys if key in c), keys[0]))


def _expect_layers(c: Metadata, wanted: list[str]) -> None:
    """Refuse `layer_types` other than these."""
    found = list(c.strings("layer_types"))
    if found != wanted:
        raise UnsupportedModel(f"{c.origin}: layer_types are {found}, wanted {wanted}: nothing else is implemented")


def _head_dim(c: Metadata) -> int:
    return c.int("head_dim", c.int("hidden_size") // c.int("num_attention_heads"))


def _geometry(c: Metadata, act: str = "silu", act_key: str = "hidden_act") -> Values:
    """What `read_geometry` reads."""
    c.expect(act_key, act, required=True)
    heads, head_dim = c.int("num_attention_heads"), _head_dim(c)
    values = {
        "block_count": c.int("num_hidden_layers"),
        "context_length": c.int("max_position_embeddings"),
        "embedding_length": c.int("hidden_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": c.int("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.float("rms_norm_eps"),
        "vocab_size": c.int("vocab_size"),
    }
    if "intermediate_size" in c:  # a model of experts alone may lack it
        values["feed_forward_length"] = c.int("intermediate_size")
    return values


def _rope(c: Metadata, *, at: str = "rope_parameters", truncate: bool = True, partial: bool = False) -> Values:
    """What `read_rope` reads, of plain, linear and YaRN scaling. truncate: what YaRN's ramp has to be. partial: the
    family may rotate a part of the heads."""
    r = c.scoped(f"{at}.")
    r.expect("rope_type", "default", "linear", "yarn", "llama3", "longrope", "proportional")
    r.str("type", "")  # what older configs call rope_type; transformers has read it already
    kind = r.str("rope_type", "default")
    values: Values = {"rope.freq_base": _number(r, "rope_theta")}
    fraction = _number(r, "partial_rotary_factor", _number(c, "partial_rotary_factor", 1.0))
    if partial:
        values["rope.dimension_count"] = int(_head_dim(c) * fraction)
    elif fraction != 1.0 and kind != "proportional":
        raise UnsupportedModel(f"{c.origin}: partial_rotary_factor is {fraction}, wanted 1")
    if kind in ("linear", "yarn"):
        factor = _number(r, "factor")
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        r.expect("truncate", truncate, required=not truncate)
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        mscale, mscale_all = _number(r, "mscale", 0.0), _number(r, "mscale_all_dim", 0.0)
        implied = (mscale * growth + 1) / (mscale_all * growth + 1) if mscale and mscale_all else growth + 1
        values |= {
            "rope.scaling.original_context_length": r.int("original_max_position_embeddings"),
            "rope.scaling.yarn_beta_fast": _number(r, "beta_fast", 32.0),
            "rope.scaling.yarn_beta_slow": _number(r, "beta_slow", 1.0),
            # The keys' reader multiplies by growth + 1.
            "rope.scaling.attn_factor": _number(r, "attention_factor", implied) / (growth + 1),
        }
    return values


def _no_window(c: Metadata) -> None:
    """Refuse a window over any layer; a width that nothing uses does not matter."""
    c.expect("use_sliding_window", False)
    layers = list(c.strings("layer_types", ()))
    if _SLIDING in layers:
        raise UnsupportedModel(f"{c.origin}: layer_types has {_SLIDING!r}, wanted {_FULL!r} only")
    c.int("sliding_window", 0)


def _window(c: Metadata) -> int:
    """Of all layers; 0 for one that hides nothing, as it holds the whole context."""
    window = c.int("sliding_window", 0)
    return window if window < c.int("max_position_embeddings") else 0


def _llama3_factors(c: Metadata, head_dim: int) -> Tensors:
    """`rope_freqs`, the divisors of the frequencies of Llama 3.1 and later, f32 [head_dim / 2]."""
    r = c.scoped("rope_parameters.")
    factor, original = _number(r, "factor"), r.int("original_max_position_embeddings")
    low, high = _number(r, "low_freq_factor"), _number(r, "high_freq_factor")
    inv_freq = 1.0 / _number(r, "rope_theta") ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    wavelength = 2 * math.pi / inv_freq
    kept = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 1: as it is, 0: divided by the factor
    return {"rope_freqs.weight": (1 / ((1 - kept) / factor + kept)).float()}


def _llama(c: Metadata) -> tuple[Values, Tensors]:
    if c.str("model_type") == "llama":
        c.bool("attention_bias", False)  # the tensors tell
        c.bool("mlp_bias", False)
    values = {**_geometry(c), **_rope(c), "attention.sliding_window": _window(c)}
    kind = c.str("rope_parameters.rope_type", "default")
    return values, _llama3_factors(c, _head_dim(c)) if kind == "llama3" else {}


def _mistral3(c: Metadata) -> tuple[Values, Tensors]:
    r = c.scoped("rope_parameters.")
    r.int("max_position_embeddings", 0)  # a second copy
    more = {
        "attention.sliding_window": _window(c),
        "attention.temperature_scale": _number(r, "llama_4_scaling_beta", 0.0),
    }
    return {**_geometry(c), **_rope(c), **more}, {}


def _smollm3(c: Metadata) -> tuple[Values, Tensors]:
    c.expect("attention_bias", False)
    c.expect("mlp_bias", False)
    _no_window(c)
    n = c.int("num_hidden_layers")
    wanted = tuple(int((i + 1) % 4 != 0) for i in range(n))
    if (found := c.ints("no_rope_layers", wanted)) != wanted:
        raise UnsupportedModel(f"{c.origin}: no_rope_layers are {list(found)}, wanted {list(wanted)}")
    return {**_geometry(c), **_rope(c)}, {}


def _qwen(c: Metadata) -> tuple[Values, Tensors]:
    """Qwen2, Qwen3."""
    c.expect("attention_bias", False)
    _no_window(c)
    return {**_geometry(c), **_rope(c)}, {}


def _qwen_moe(c: Metadata) -> tuple[Values, Tensors]:
    """Qwen2-MoE, Qwen3-MoE."""
    c.expect("qkv_bias", True)
    values, tensors = _qwen(c)
    return {**values, **_moe(c)}, tensors


def _moe(c: Metadata) -> Values:
    """Experts in every layer."""
    c.expect("decoder_sparse_step", 1)
    if dense := c.ints("mlp_only_layers", ()):
        raise UnsupportedModel(f"{c.origin}: mlp_only_layers are {list(dense)}, wanted none")
    values = {
        "expert_count": _one_of(c, "num_experts", "num_local_experts"),
        "expert_used_count": c.int("num_experts_per_tok"),
        "expert_feed_forward_length": c.int("moe_intermediate_size"),
    }
    if "norm_topk_prob" in c:
        values["expert_weights_norm"] = c.bool("norm_topk_prob")
    if "shared_expert_intermediate_size" in c:
        values["expert_shared_feed_forward_length"] = c.int("shared_expert_intermediate_size")
    return values


def _sections(c: Metadata) -> Values:
    sections = list(c.ints("rope_parameters.mrope_section", length=3))
    return {"rope.dimension_sections": [*sections, 0]}


def _qwen2vl(c: Metadata) -> tuple[Values, Tensors]:
    c.expect("rope_parameters.mrope_interleaved", False)
    values, tensors = _qwen(c)
    return {**values, **_sections(c)}, tensors


def _qwen3vl(c: Metadata) -> tuple[Values, Tensors]:
    c.expect("rope_parameters.mrope_interleaved", True)
    values, tensors = _qwen(c)
    experts = _moe(c) if c.str("model_type").startswith("qwen3_vl_moe") else {}
    return {**values, **_sections(c), **experts}, tensors


def _delta(c: Metadata) -> Values:
    """What `read_delta` reads, and which layers have attention instead."""
    c.expect("attention_bias", False)
    c.int("full_attention_interval", 0)  # layer_types say the same
    heads = c.int("linear_num_value_heads")
    layers = c.strings("layer_types", length=c.int("num_hidden_layers"))
    if other := set(layers) - {_LINEAR, _FULL}:
        raise UnsupportedModel(f"{c.origin}: layer_types has {min(other)!r}, wanted {_LINEAR!r} or {_FULL!r}")
    return {
        "attention.recurrent_layers": [kind == _LINEAR for kind in layers],
        "ssm.conv_kernel": c.int("linear_conv_kernel_dim"),
        "ssm.state_size": c.int("linear_key_head_dim"),
        "ssm.group_count": c.int("linear_num_key_heads"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * c.int("linear_value_head_dim"),
    }


def _qwen35(c: Metadata) -> tuple[Values, Tensors]:
    c.expect("rope_parameters.mrope_interleaved", True)
    c.expect("attn_output_gate", True)
    c.expect("mamba_ssm_dtype", "float32")
    experts = _moe(c) if c.str("model_type").startswith("qwen3_5_moe") else {}
    return {**_geometry(c), **_rope(c, partial=True), **_sections(c), **_delta(c), **experts}, {}


def _qwen3next(c: Metadata) -> tuple[Values, Tensors]:
    return {**_geometry(c), **_rope(c, partial=True), **_delta(c), **_moe(c)}, {}


def _phi3(c: Metadata) -> tuple[Values, Tensors]:
    r = c.scoped("rope_parameters.")
    original = c.int("original_max_position_embeddings")
    values = {
        **_geometry(c),
        **_rope(c, partial=True),
        "rope.scaling.original_context_length": r.int("original_max_position_embeddings", original),
        "attention.sliding_window": c.int("sliding_window", 0),
    }
    if c.str("rope_parameters.rope_type", "default") != "longrope":
        return values, {}
    original = values["rope.scaling.original_context_length"]
    factor = _number(r, "factor", c.int("max_position_embeddings") / original)
    implied = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    values["rope.scaling.attn_factor"] = _number(r, "attention_factor", implied)
    factors = {kind: torch.tensor(r.floats(f"{kind}_factor")) for kind in ("short", "long")}
    return values, {f"rope_factors_{kind}.weight": each for kind, each in factors.items()}


def _scale(c: Metadata, layers_27b: int) -> None:
    """Refuse a scale of the scores other than the one that goes with the size, as no key of a file tells it."""
    heads = c.int("num_attention_heads")
    is_27b = c.int("num_hidden_layers") == layers_27b
    width = c.int("hidden_size") / heads if is_27b else _head_dim(c)
    found = _number(c, "query_pre_attn_scalar")
    if found != width:
        raise UnsupportedModel(f"{c.origin}: query_pre_attn_scalar is {found:g}, wanted {width:g}")


def _gemma(c: Metadata) -> Values:
    c.expect("attention_bias", False)
    c.expect("use_bidirectional_attention", False, "vision")
    return _geometry(c, "gelu_pytorch_tanh", "hidden_activation")


def _gemma2(c: Metadata) -> tuple[Values, Tensors]:
    n = c.int("num_hidden_layers")
    _expect_layers(c, [_FULL if i % 2 else _SLIDING for i in range(n)])
    _scale(c, 46)
    more = {
        "attention.sliding_window": c.int("sliding_window"),
        "attn_logit_softcapping": _number(c, "attn_logit_softcapping"),
        "final_logit_softcapping": _number(c, "final_logit_softcapping"),
    }
    return {**_gemma(c), **_rope(c), **more}, {}


def _gemma3(c: Metadata) -> tuple[Values, Tensors]:
    n = c.int("num_hidden_layers")
    _expect_layers(c, [_SLIDING if (i + 1) % 6 else _FULL for i in range(n)])
    _scale(c, 62)
    local = _local_base(c)
    more = {
        "attention.sliding_window": c.int("sliding_window"),
        "attn_logit_softcapping": _number(c, "attn_logit_softcapping", 0.0),
        "final_logit_softcapping": _number(c, "final_logit_softcapping", 0.0),
    }
    return {**_gemma(c), **_rope(c, at=f"rope_parameters.{_FULL}"), **local, **more}, {}


def _local_base(c: Metadata) -> Values:
    """The rotation of layers with a window, which nothing scales."""
    r = c.scoped(f"rope_parameters.{_SLIDING}.")
    r.expect("rope_type", "default")
    r.expect("partial_rotary_factor", 1.0)
    return {"rope.freq_base_swa": _number(r, "rope_theta")}


def _gemma4(c: Metadata) -> tuple[Values, Tensors]:
    n = c.int("num_hidden_layers")
    layers = list(c.strings("layer_types", length=n))
    if other := set(layers) - {_SLIDING, _FULL}:
        raise UnsupportedModel(f"{c.origin}: layer_types has {min(other)!r}, wanted {_SLIDING!r} or {_FULL!r}")
    n_shared, width = c.int("num_kv_shared_layers", 0), c.int("intermediate_size")
    wide = 2 if c.bool("use_double_wide_mlp", False) else 1
    dims = {c.int(f"per_layer_config.{i}.head_dim", _head_dim(c)) for i in range(n) if layers[i] == _FULL}
    local = {c.int(f"per_layer_config.{i}.head_dim", _head_dim(c)) for i in range(n) if layers[i] == _SLIDING}
    if len(dims) != 1 or len(local) != 1:
        raise UnsupportedModel(f"{c.origin}: head_dim differs among layers of one kind, wanted one for each kind")
    (head_dim,), (local_dim,) = dims, local
    kv_heads = c.int("num_key_value_heads")
    c.bool("attention_k_eq_v", False)  # the tensors tell
    c.expect("vocab_size_per_layer_input", c.int("vocab_size"))
    values = {
        **_gemma(c),
        **_rope(c, at=f"rope_parameters.{_FULL}"),
        **_local_base(c),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.key_length_swa": local_dim,
        "attention.value_length_swa": local_dim,
        "attention.head_count_kv": [c.int(f"per_layer_config.{i}.num_key_value_heads", kv_heads) for i in range(n)],
        "attention.sliding_window": c.int("sliding_window"),
        "attention.sliding_window_pattern": [kind == _SLIDING for kind in layers],
        "attention.shared_kv_layers": n_shared,
        "feed_forward_length": [width * (wide if i >= n - n_shared else 1) for i in range(n)],
        "embedding_length_per_layer_input": c.int("hidden_size_per_layer_input", 0),
        "final_logit_softcapping": _number(c, "final_logit_softcapping", 0.0),
    }
    if c.bool("enable_moe_block", False):
        values |= {
            "expert_count": c.int("num_experts"),
            "expert_used_count": c.int("top_k_experts"),
            "expert_feed_forward_length": c.int("moe_intermediate_size"),
        }
    r = c.scoped(f"rope_parameters.{_FULL}.")
    if r.str("rope_type", "default") != "proportional":
        return values, {}
    r.expect("factor", 1.0)
    turned = int(_number(r, "partial_rotary_factor", 1.0) * head_dim // 2)
    factors = torch.full((head_dim // 2,), 1e30)  # so slow that they stand still
    factors[:turned] = 1.0
    return values, {"rope_freqs.weight": factors}


def _glm4moe(c: Metadata) -> tuple[Values, Tensors]:
    c.bool("attention_bias", False)  # the tensors tell
    c.bool("use_qk_norm", False)
    width = c.int("moe_intermediate_size")
    more = {
        "expert_count": c.int("n_routed_experts"),
        "expert_used_count": c.int("num_experts_per_tok"),
        "expert_group_count": c.int("n_group"),
        "expert_group_used_count": c.int("topk_group"),
        "expert_feed_forward_length": width,
        "expert_shared_count": c.int("n_shared_experts"),
        "expert_gating_func": 2,
        "expert_weights_scale": _number(c, "routed_scaling_factor"),
        "expert_weights_norm": c.bool("norm_topk_prob"),
        "leading_dense_block_count": c.int("first_k_dense_replace"),
    }
    return {**_geometry(c), **_rope(c, partial=True), **more}, {}


def _gpt_oss(c: Metadata) -> tuple[Values, Tensors]:
    c.expect("attention_bias", True)
    c.expect("swiglu_alpha", 1.702)
    c.expect("swiglu_limit", 7.0)
    n = c.int("num_hidden_layers")
    _expect_layers(c, [_FULL if i % 2 else _SLIDING for i in range(n)])
    more = {
        "attention.sliding_window": c.int("sliding_window"),
        "expert_count": _one_of(c, "num_local_experts", "num_experts"),
        "expert_used_count": _one_of(c, "num_experts_per_tok", "experts_per_token"),
        "expert_feed_forward_length": c.int("intermediate_size"),
    }
    return {**_geometry(c), **_rope(c, truncate=False), **more}, {}


_FAMILIES: dict[str, Callable[[Metadata], tuple[Values, Tensors]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "llama": _llama,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "qwen2": _qwen,
    "qwen2moe": _qwen_moe,
    "qwen2vl": _qwen2vl,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3next,
    "qwen3": _qwen,
    "qwen3moe": _qwen_moe,
    "qwen3vl": _qwen3vl,
    "qwen3vlmoe": _qwen3vl,
    "smollm3": _smollm3,
}
