"""The names of tensors in GGUF files and in transformers' state dicts, both ways, for every architecture.

    to_hf("qwen3", "blk.7.attn_q.weight")                          # "model.layers.7.self_attn.q_proj.weight"
    to_gguf("qwen3", "model.layers.7.self_attn.q_proj.weight")     # "blk.7.attn_q.weight"
    adds_one("gemma3", "blk.7.attn_norm.weight")                   # True: the file holds the norm's weight plus one

transformers' names are those that its text models (`...ForCausalLM`) have in memory; `canonical` makes such a name of
one that a checkpoint or a model with a vision tower uses. Its experts are one parameter, `experts.gate_up_proj`. A GGUF
file may have two stacks in its place, which go by the names of this package's modules, `experts.gate_proj.weight` and
`experts.up_proj.weight`; so do the two matrices of Qwen3-Next's `in_proj_qkvz`.
"""

import re
from functools import cache

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# The norm between attention and FFN has one of two names in a file, and in Gemma there are two norms.
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _experts(router: str, experts: str) -> dict[str, str]:
    """A router and stacks of experts. transformers' stacks are parameters: their names have no `.weight`."""
    return {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{experts}.gate_proj",
        "ffn_up_exps": f"{experts}.up_proj",
        "ffn_gate_up_exps.weight": f"{experts}.gate_up_proj",
        "ffn_gate_up_exps.bias": f"{experts}.gate_up_proj_bias",
        "ffn_down_exps.weight": f"{experts}.down_proj",
        "ffn_down_exps.bias": f"{experts}.down_proj_bias",
    }


def _shared_expert(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


_MOE = {
    **_experts("mlp.gate", "mlp.experts"),
    **_shared_expert("shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DELTA = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_BY_PART = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_DELTA_BY_HEAD = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_qkvz.qkv",
    "attn_gate": "linear_attn.in_proj_qkvz.z",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_GEMMA4 = {
    **_experts("router.proj", "experts"),
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_LLAMA = {**_ATTENTION, **_MLP, **_FFN_NORM}
_QWEN35 = {**_ATTENTION, **_MLP, **_POST_NORM, **_MOE, **_DELTA, **_DELTA_BY_PART}

# Names within a layer: "stem" for both its weight and its bias, "stem.kind" for one tensor.
_LAYER = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "smollm3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2vl": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3vl": _LLAMA,
    "qwen2moe": {**_LLAMA, **_MOE},
    "qwen3moe": {**_LLAMA, **_MOE},
    "qwen3vlmoe": {**_LLAMA, **_MOE},
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": {**_QWEN35, **_DELTA_BY_HEAD},
    "phi3": {**_ATTENTION, **_MLP, **_FFN_NORM, **_FUSED},
    "gemma2": {**_ATTENTION, **_MLP, **_SANDWICH},
    "gemma3": {**_ATTENTION, **_MLP, **_SANDWICH},
    "gemma4": {**_ATTENTION, **_MLP, **_SANDWICH, **_GEMMA4},
    "glm4moe": {
        **_ATTENTION,
        **_MLP,
        **_POST_NORM,
        **_experts("mlp.gate", "mlp.experts"),
        **_shared_expert("shared_experts"),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    "gpt-oss": {
        **_ATTENTION,
        **_POST_NORM,
        **_experts("mlp.router", "mlp.experts"),
        "attn_sinks.weight": "self_attn.sinks",
    },
}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
_KINDS = (".weight", ".bias")


def to_hf(arch: str, name: str) -> str | None:
    """transformers' name of a GGUF file's tensor; None for one that it computes, such as `rope_freqs.weight`."""
    layer, part = _split(name, "blk.")
    found = _table(arch, layer is not None)[0].get(part)
    return found if found is None or layer is None else f"model.layers.{layer}.{found}"


def to_gguf(arch: str, name: str) -> str | None:
    """The GGUF file's name of a tensor of transformers' state dict; None for one that no such file has."""
    layer, part = _split(name, "model.layers.")
    found = _table(arch, layer is not None)[1].get(part)
    return found if found is None or layer is None else f"blk.{layer}.{found}"


def adds_one(arch: str, name: str) -> bool:
    """Whether the file holds one more than transformers does: the norms that multiply by 1 + weight there, of Gemma 2
    and 3 and of Qwen3.5 and Qwen3-Next, but for the gated norm of the latter. name: the GGUF file's."""
    return arch in _PLUS_ONE and name.endswith("_norm.weight") and not name.endswith("ssm_norm.weight")


_CANONICAL = [
    (re.compile(r"^language_model\.(?=lm_head\.)"), ""),
    (re.compile(r"^language_model\.model\."), "model."),
    (re.compile(r"^model\.language_model\."), "model."),
]


def canonical(name: str) -> str:
    """The text model's name of a tensor that a checkpoint, or a model that also sees, calls otherwise."""
    for pattern, prefix in _CANONICAL:
        name = pattern.sub(prefix, name)
    return name


def _split(name: str, prefix: str) -> tuple[str | None, str]:
    """The number of the layer, or None, and the rest of the name."""
    if name.startswith(prefix):
        layer, _, part = name.removeprefix(prefix).partition(".")
        if layer.isdecimal():
            return layer, part
    return None, name


@cache
def _table(arch: str, in_layer: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Full names within a layer, or outside of all, from GGUF and from transformers."""
    names: dict[str, str] = {}
    for gguf, hf in (_LAYER[arch] if in_layer else _TOP).items():
        if "." in gguf or gguf == "ssm_a":
            names[gguf] = hf
        else:
            names |= {gguf + kind: hf + kind for kind in _KINDS}
    return names, {hf: gguf for gguf, hf in names.items()}
