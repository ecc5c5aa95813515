"""What transformers calls the architectures of GGUF files: `general.architecture` and the config's `model_type`."""

# Architecture -> model_type of the text decoder's config.
MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "llama": "llama",
    "mistral3": "ministral3",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
    "smollm3": "smollm3",
}
# model_type -> architecture; several of the former may have become one of the latter.
ARCHITECTURES = {
    **{model_type: arch for arch, model_type in MODEL_TYPES.items()},
    "mistral": "llama",
    "qwen2_5_vl_text": "qwen2vl",
}
