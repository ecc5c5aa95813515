"""The config.json that transformers' class of a model would have, worked out of ours: the inverse of `hf.config`.

    config = hf_config(model)                       # {"model_type": "llama", "architectures": [...], ...}
    transformers.AutoConfig.for_model(**config)

What a file does not hold is not made up: where the config cannot say what the model does, UnsupportedModel names it.
Source: transformers 5.24, `configuration_*.py` and `modeling_rope_utils.py` of each family.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dasllama_torch.config import DecoderConfig, LayerSpec, RopeSpec
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.export.weights import is_tied
from dasllama_torch.gguf.model_types import MODEL_TYPES
from dasllama_torch.modules.causal_lm import CausalLM, ConditionalLM

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_FACTORS = 1e-5  # how well recovered parameters must give the file's rotary factors again, relative


def hf_config(model: CausalLM) -> dict[str, Any]:
    """Keys and values of config.json. Raises UnsupportedModel for what it cannot say."""
    family, model_type = _FAMILIES[model.config.arch], MODEL_TYPES[model.config.arch]
    text = {"model_type": model_type, **_common(model), **family.own(model)}
    if not isinstance(model, ConditionalLM):
        return {**text, "architectures": [family.hf_class]}
    return {
        "model_type": model_type.removesuffix("_text"),
        "architectures": [family.hf_class],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }


def hf_class(arch: str) -> str:
    """The name of transformers' class for a `general.architecture`."""
    return _FAMILIES[arch].hf_class


def _common(model: CausalLM) -> dict[str, Any]:
    cfg, tokenizer = model.config, model.tokenizer
    first = cfg.layers[0]
    if len({layer.n_heads for layer in cfg.layers}) > 1:
        raise UnsupportedModel(f"{_origin(model)}: layers differ in their number of heads, and the config has one")
    return {
        "vocab_size": cfg.n_vocab,
        "hidden_size": cfg.n_embd,
        "intermediate_size": first.ffn_width,
        "num_hidden_layers": len(cfg.layers),
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.head_dim,
        "max_position_embeddings": cfg.n_ctx,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": is_tied(model),
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos", "pad")},
    }


def _origin(model: CausalLM) -> str:
    return model.metadata.origin if model.metadata else model.config.arch


# ---- rotary positions -----------------------------------------------------------------------------------------------


def _rope(model: CausalLM, layer: LayerSpec, *, interleaved: bool | None = None) -> dict[str, Any]:
    """rope_parameters of a layer. interleaved: how the axes of M-RoPE take turns, if the family has them."""
    spec = layer.rope
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.theta}
    if spec.dim != layer.head_dim:
        found["partial_rotary_factor"] = spec.dim / layer.head_dim
    if spec.axes is not None:
        found["mrope_section"] = [spec.axes.count(axis) for axis in range(3)]
        if interleaved:
            found["mrope_interleaved"] = True
    if spec.yarn is not None:
        return found | {
            "rope_type": "yarn",
            "factor": spec.yarn.factor,
            "original_max_position_embeddings": spec.yarn.original_context,
            "beta_fast": spec.yarn.beta_fast,
            "beta_slow": spec.yarn.beta_slow,
            "truncate": spec.yarn.truncate,
            "attention_factor": spec.attention_factor,
        }
    if spec.long is not None:
        return found | {
            "rope_type": "longrope",
            "short_factor": list(spec.freq_factors),
            "long_factor": list(spec.long.factors),
            "original_max_position_embeddings": spec.long.original_context,
            "attention_factor": spec.attention_factor,
        }
    if spec.attention_factor != 1.0:
        raise UnsupportedModel(
            f"{_origin(model)}: attention factor {spec.attention_factor:g} without YaRN or LongRoPE has no place in a "
            "config of transformers"
        )
    if spec.linear_factor != 1.0:
        found |= {"rope_type": "linear", "factor": spec.linear_factor}
    if spec.freq_factors is not None:
        found |= _proportional(spec) or _llama3(spec, _origin(model))
    return found


def _proportional(spec: RopeSpec) -> dict[str, Any] | None:
    """Gemma 4's: the first pairs turn as they would, the others stand still. None: the factors are not such."""
    turned = spec.freq_factors.count(1.0)
    if any(factor != 1.0 for factor in spec.freq_factors[:turned]) or min(spec.freq_factors[turned:], default=0) < 1e29:
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(spec.freq_factors)}


def _llama3(spec: RopeSpec, origin: str) -> dict[str, Any]:
    """Llama 3.1's parameters, of which a file holds only what comes of them: the divisor d of each frequency f.

    d = 1 / ((1 - s) / factor + s), where s runs from 0 to 1 over the ramp, linear in f: (L f / 2 pi - low) /
    (high - low). The line has two parameters and L, low and high are three, so low is 1, as published.
    """
    d = torch.tensor(spec.freq_factors, dtype=torch.float64)
    f = 1.0 / spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float64) / spec.dim)
    factor = d.max().item()
    factor = float(round(factor)) if abs(factor - round(factor)) < _FACTORS * factor else factor
    s = (1 / d - 1 / factor) / (1 - 1 / factor)
    (ramp,) = torch.where((s > _FACTORS) & (s < 1 - _FACTORS))
    if len(ramp):
        a, b = ramp[0], ramp[-1]
        high = 4.0  # as published, where a single frequency on the ramp leaves it open
        if a != b:
            slope = (s[a] - s[b]) / (f[a] - f[b])
            high = round((1 - 1 / (s[a] - slope * f[a])).item(), 4)
        original = round((2 * math.pi * (s[a] * (high - 1) + 1) / f[a]).item())
        again = ((original * f / (2 * math.pi) - 1) / (high - 1)).clamp(0, 1)
        if torch.allclose(1 / ((1 - again) / factor + again), d, rtol=_FACTORS, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(f"{origin}: the divisors of rotary frequencies follow no rule that a config can state")


# ---- families -------------------------------------------------------------------------------------------------------


def _windows(cfg: DecoderConfig) -> dict[str, Any]:
    """Which layers see a window, and its width."""
    widths = {layer.window for layer in cfg.layers} - {0}
    return {
        "layer_types": [_SLIDING if layer.window else _FULL for layer in cfg.layers],
        "sliding_window": max(widths, default=None),
    }


def _plain(model: CausalLM) -> dict[str, Any]:
    return {"rope_parameters": _rope(model, model.config.layers[0])}


def _llama(model: CausalLM) -> dict[str, Any]:
    biases = {
        getattr(layer.self_attn, f"{part}_proj").bias is not None for layer in model.model.layers for part in "qkvo"
    }
    if len(biases) > 1:
        raise UnsupportedModel(f"{_origin(model)}: some attention matrices have a bias and some none")
    return {**_plain(model), "attention_bias": biases == {True}}


def _mistral3(model: CausalLM) -> dict[str, Any]:
    cfg, found = model.config, _plain(model)
    found["rope_parameters"] |= {
        "llama_4_scaling_beta": cfg.temperature_scale,
        "original_max_position_embeddings": cfg.original_context,
    }
    return found


def _smollm3(model: CausalLM) -> dict[str, Any]:
    layers = model.config.layers
    return {
        "rope_parameters": _rope(model, next(layer for layer in layers if layer.rope)),
        "no_rope_layers": [int(layer.rope is not None) for layer in layers],
        "layer_types": [_FULL] * len(layers),
    }


def _moe(model: CausalLM) -> dict[str, Any]:
    """Experts in every layer, in the words of Qwen's configs."""
    spec = model.config.layers[0].moe
    if spec is None:
        return {}
    if spec.gate != "softmax" or spec.scale != 1.0:
        raise UnsupportedModel(f"{_origin(model)}: a router of gate {spec.gate} and scale {spec.scale:g} is not theirs")
    shared = {"shared_expert_intermediate_size": spec.shared_width} if spec.shared_width else {}
    return {
        "num_experts": spec.n_experts,
        "num_experts_per_tok": spec.n_used,
        "moe_intermediate_size": spec.width,
        "norm_topk_prob": spec.renormalize,
        **shared,
    }


def _qwen(model: CausalLM) -> dict[str, Any]:
    return {**_plain(model), **_moe(model)}


def _qwen2vl(model: CausalLM) -> dict[str, Any]:
    return {"rope_parameters": _rope(model, model.config.layers[0], interleaved=False)}


def _qwen3vl(model: CausalLM) -> dict[str, Any]:
    return {"rope_parameters": _rope(model, model.config.layers[0], interleaved=True), **_moe(model)}


def _hybrid(model: CausalLM, interleaved: bool | None = None) -> dict[str, Any]:
    layers = model.config.layers
    delta = next((layer.delta for layer in layers if layer.delta), None)
    if delta is None:
        raise UnsupportedModel(f"{_origin(model)}: has no recurrent layer, whose sizes the config states")
    return {
        "rope_parameters": _rope(model, layers[0], interleaved=interleaved),
        "layer_types": [_LINEAR if layer.delta else _FULL for layer in layers],
        "linear_conv_kernel_dim": delta.conv_taps,
        "linear_key_head_dim": delta.k_dim,
        "linear_value_head_dim": delta.v_dim,
        "linear_num_key_heads": delta.n_k_heads,
        "linear_num_value_heads": delta.n_v_heads,
        **_moe(model),
    }


def _qwen35(model: CausalLM) -> dict[str, Any]:
    return _hybrid(model, interleaved=True)


def _phi3(model: CausalLM) -> dict[str, Any]:
    first = model.config.layers[0]
    original = first.rope.long.original_context if first.rope.long else model.config.n_ctx
    return {
        **_plain(model),
        "original_max_position_embeddings": original,
        "sliding_window": first.window or None,
    }


def _gemma2(model: CausalLM) -> dict[str, Any]:
    cfg = model.config
    return {
        **_plain(model),
        **_windows(cfg),
        "query_pre_attn_scalar": round(cfg.query_scale**-2),
        "attn_logit_softcapping": cfg.attn_softcap,
        "final_logit_softcapping": cfg.logit_softcap,
    }


def _by_kind(model: CausalLM) -> dict[str, Any]:
    """rope_parameters of layers with a window and of those without."""
    layers = model.config.layers
    kinds = {_SLIDING if layer.window else _FULL: layer for layer in layers}
    return {"rope_parameters": {kind: _rope(model, layer) for kind, layer in kinds.items()}}


def _gemma3(model: CausalLM) -> dict[str, Any]:
    cfg = model.config
    return {**_by_kind(model), **_windows(cfg), "query_pre_attn_scalar": round(cfg.query_scale**-2)}


def _gemma4(model: CausalLM) -> dict[str, Any]:
    cfg = model.config
    local = next(layer for layer in cfg.layers if layer.window)
    own = {
        str(i): {
            key: value
            for key, value, usual in (
                ("head_dim", layer.head_dim, local.head_dim),
                ("num_key_value_heads", layer.n_kv_heads, local.n_kv_heads),
            )
            if value != usual
        }
        for i, layer in enumerate(cfg.layers)
        if not layer.window
    }
    attention = [layer.self_attn for layer in model.model.layers]
    moe = cfg.layers[0].moe
    experts = moe and {
        "num_experts": moe.n_experts,
        "top_k_experts": moe.n_used,
        "moe_intermediate_size": moe.width,
    }
    return {
        **_by_kind(model),
        **_windows(cfg),
        "head_dim": local.head_dim,
        "num_key_value_heads": local.n_kv_heads,
        "per_layer_config": own,
        "final_logit_softcapping": cfg.logit_softcap or None,
        "vocab_size_per_layer_input": cfg.n_vocab,
        "hidden_size_per_layer_input": cfg.n_embd_layer,
        "attention_k_eq_v": any(part.has_kv and part.v_proj is None for part in attention),
        "num_kv_shared_layers": sum(layer.kv_source is not None for layer in cfg.layers),
        "use_double_wide_mlp": len({layer.ffn_width for layer in cfg.layers}) > 1,
        "enable_moe_block": moe is not None,
        **(experts or {}),
    }


def _glm4moe(model: CausalLM) -> dict[str, Any]:
    cfg = model.config
    dense = sum(layer.moe is None for layer in cfg.layers)
    spec = cfg.layers[-1].moe
    attention = model.model.layers[0].self_attn
    return {
        **_plain(model),
        "attention_bias": attention.q_proj.bias is not None,
        "use_qk_norm": attention.has_norms,
        "n_routed_experts": spec.n_experts,
        "num_experts_per_tok": spec.n_used,
        "moe_intermediate_size": spec.width,
        "n_shared_experts": spec.shared_width // spec.width,
        "routed_scaling_factor": spec.scale,
        "norm_topk_prob": spec.renormalize,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": 0,
    }


def _gpt_oss(model: CausalLM) -> dict[str, Any]:
    spec = model.config.layers[0].moe
    return {
        **_plain(model),
        **_windows(model.config),
        "attention_bias": True,
        "intermediate_size": spec.width,
        "num_local_experts": spec.n_experts,
        "num_experts_per_tok": spec.n_used,
    }


class _Family(NamedTuple):
    """own: the keys that are not common to all families."""

    hf_class: str
    own: Callable[[CausalLM], dict[str, Any]]


_FAMILIES = {
    "gemma2": _Family("Gemma2ForCausalLM", _gemma2),
    "gemma3": _Family("Gemma3ForCausalLM", _gemma3),
    "gemma4": _Family("Gemma4ForCausalLM", _gemma4),
    "glm4moe": _Family("Glm4MoeForCausalLM", _glm4moe),
    "gpt-oss": _Family("GptOssForCausalLM", _gpt_oss),
    "llama": _Family("LlamaForCausalLM", _llama),
    "mistral3": _Family("Ministral3ForCausalLM", _mistral3),
    "phi3": _Family("Phi3ForCausalLM", _phi3),
    "qwen2": _Family("Qwen2ForCausalLM", _qwen),
    "qwen2moe": _Family("Qwen2MoeForCausalLM", _qwen),
    "qwen2vl": _Family("Qwen2VLForConditionalGeneration", _qwen2vl),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", _qwen),
    "qwen3vl": _Family("Qwen3VLForConditionalGeneration", _qwen3vl),
    "qwen3vlmoe": _Family("Qwen3VLMoeForConditionalGeneration", _qwen3vl),
    "qwen35": _Family("Qwen3_5ForCausalLM", _qwen35),
    "qwen35moe": _Family("Qwen3_5MoeForCausalLM", _qwen35),
    "qwen3next": _Family("Qwen3NextForCausalLM", _hybrid),
    "smollm3": _Family("SmolLM3ForCausalLM", _smollm3),
}
