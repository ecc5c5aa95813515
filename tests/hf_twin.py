"""Tiny random models of transformers, and the same weights as a GGUF file: the live oracle of the families.

The conversion below is the test's own statement of what the files hold (names, row order, folded norms).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops.ggml_types import F32

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA3_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass
class Twin:
    """hf: the transformers model, fp32, eager attention. path: its GGUF file."""

    hf: Any
    path: Path


def gguf_name(name: str, layer_names: dict[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{layer_names[part]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """HF's half-split rotary rows -> the pairs-next-to-each-other order of llama files."""
    n = rows.shape[0]
    return rows.reshape(heads, 2, n // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def randomize(model) -> None:
    """Weights at which every part matters: spread norms, biases that are not zero, logits of spread about 1."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() == 2:
            p.data = noise * p.shape[1] ** -0.5 * (1.0 if "embed" in name else 1.4)
        elif name.endswith("bias"):
            p.data = noise * 0.5
        else:  # norm weights; gemma's are stored without the one
            p.data = 0.2 * noise + (0.0 if "gemma" in type(model).__name__.lower() else 1.0)


def save(model, arch: str, path: Path, extra: dict[str, Any]) -> None:
    cfg = model.config
    names = GEMMA3_NAMES if arch == "gemma3" else LAYER_NAMES
    tensors = {}
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and cfg.tie_word_embeddings:
            continue
        array = p.float().numpy()
        if arch == "llama" and "q_proj" in name:
            array = interleave(array, cfg.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            array = interleave(array, cfg.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            array = array + 1
        tensors[gguf_name(name, names)] = (array, F32)
    metadata = {
        "block_count": cfg.num_hidden_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.num_attention_heads,
        "attention.head_count_kv": cfg.num_key_value_heads,
        "attention.key_length": cfg.head_dim
        if getattr(cfg, "head_dim", None)
        else cfg.hidden_size // cfg.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(cfg.rms_norm_eps),
        **extra,
    }
    write_gguf(path, arch, {f"{arch}.{key}": value for key, value in metadata.items()}, tensors)


def make(kind: str, folder: Path) -> Twin:
    """kind: "llama", "llama_bias", "mistral", "qwen2", "qwen2_tied", "gemma3"."""
    common = dict(
        vocab_size=301, hidden_size=72, intermediate_size=104, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if kind in ("llama", "llama_bias"):
        cfg = transformers.LlamaConfig(
            **common,
            attention_bias=kind == "llama_bias",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        model, arch, extra = transformers.LlamaForCausalLM(cfg), "llama", {"rope.freq_base": 10000.0}
    elif kind == "mistral":
        cfg = transformers.MistralConfig(
            **common, head_dim=20, sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        )
        model, arch, extra = transformers.MistralForCausalLM(cfg), "llama", {"rope.freq_base": 5e5}
    elif kind in ("qwen2", "qwen2_tied"):
        cfg = transformers.Qwen2Config(
            **common,
            tie_word_embeddings=kind == "qwen2_tied",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        model, arch, extra = transformers.Qwen2ForCausalLM(cfg), "qwen2", {"rope.freq_base": 1e6}
    else:
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        }
        common |= dict(num_hidden_layers=7)
        cfg = transformers.Gemma3TextConfig(
            **common, head_dim=20, query_pre_attn_scalar=20, sliding_window=9, rope_parameters=ropes
        )
        model, arch = transformers.Gemma3ForCausalLM(cfg), "gemma3"
        extra = {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "attention.sliding_window": 9,
        }
    model = model.eval().float()
    randomize(model)
    model.tie_weights()
    path = folder / f"{kind}.gguf"
    save(model, arch, path, extra)
    return Twin(model, path)


KINDS = ("llama", "llama_bias", "mistral", "qwen2", "qwen2_tied", "gemma3")
