"""A llama of two narrow layers and random weights, with a vocabulary of its own: for what needs text and no sense."""

from pathlib import Path

import numpy as np
import vocabularies

from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops.ggml_types import F32
from dasllama_torch.text.special import TokenType

WIDTH, FFN, HEADS = 64, 96, 4


def write(path: Path, seed: int = 0, **keys) -> Path:
    """keys: of the architecture, in the place of the usual ones."""
    rng = np.random.default_rng(seed)
    vocabulary = vocabularies.bpe("llama-bpe", {"<bos>": TokenType.CONTROL}, bos_token_id=700, add_bos_token=True)
    n_vocab = len(vocabulary["tokenizer.ggml.tokens"])
    vocabulary["tokenizer.ggml.bos_token_id"] = n_vocab - 1
    shapes = {"token_embd": (n_vocab, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(2):
        parts = {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH),
            "attn_v": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH),
            "ffn_down": (WIDTH, FFN),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else np.ones(shape)
        tensors[f"{name}.weight"] = values.astype(np.float32), F32
    facts = {
        "block_count": 2, "context_length": 256, "embedding_length": WIDTH, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, **keys,
    }  # fmt: skip
    write_gguf(path, "llama", {f"llama.{key}": value for key, value in facts.items()} | vocabulary, tensors)
    return path
