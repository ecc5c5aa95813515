"""The tiny models of the golden data, by family, and what is particular about a case."""

# Golden case -> times FP32_LOGITS that its logits may differ from transformers: more than 1 only where the references
# themselves are noisier (golden data's README, "Where the two references disagree").
TINY = {
    "llama": 1,
    "llama_tied": 1,
    "llama_headdim": 1,
    "llama_rope3": 1,
    "llama_yarn_betas": 1,
    "qwen2": 1,
    "qwen2_yarn": 1,
    "qwen3": 1,
    "qwen2moe": 1,
    "qwen3moe": 1,
    "smollm3": 1,
    "qwen2vl": 1,
    "qwen3vl": 1,
    "qwen3vlmoe": 1,
    "mistral3_yarn": 1,
    "phi3": 1,
    "phi3_longrope": 1,
    "glm4moe": 1,
    "gpt-oss": 1,
    "gpt-oss_untruncated": 1,
    "gemma2": 1,
    "gemma2_27b": 1,
    "qwen3next": 3,
    "qwen35": 3,
    "qwen35moe": 3,
    "gemma3": 1,
    "gemma4": 1,
    "gemma4_moe": 1,
    "gemma4_e": 1,
}

# One case of each graph of modules, for what looks at modules: the others differ from one of these in numbers only.
GRAPHS = [
    name
    for name in TINY
    if name
    not in (
        "llama_tied", "llama_headdim", "llama_rope3", "llama_yarn_betas", "qwen2_yarn", "phi3_longrope",
        "gpt-oss_untruncated", "gemma2_27b",
    )
]  # fmt: skip
