"""The registry of families: `general.architecture` -> config, model, ignored keys. One file per family."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from dasllama_torch.config import DecoderConfig
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.modules.causal_lm import CausalLM

# architecture: (file here, prefix of its classes)
FAMILIES = {
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma4": ("gemma4", "Gemma4"),
    "glm4moe": ("glm4moe", "Glm4Moe"),
    "gpt-oss": ("gptoss", "GptOss"),
    "llama": ("llama", "Llama"),
    "mistral3": ("mistral3", "Mistral3"),
    "phi3": ("phi3", "Phi3"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen2moe": ("qwen2", "Qwen2"),
    "qwen2vl": ("qwen2", "Qwen2VL"),
    "qwen35": ("qwen35", "Qwen35"),
    "qwen35moe": ("qwen35", "Qwen35"),
    "qwen3next": ("qwen3next", "Qwen3Next"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3moe": ("qwen3", "Qwen3"),
    "qwen3vl": ("qwen3", "Qwen3VL"),
    "qwen3vlmoe": ("qwen3", "Qwen3VL"),
    "smollm3": ("smollm3", "SmolLM3"),
}


@dataclass(frozen=True)
class Family:
    """config.from_gguf(metadata, source) -> config; model(config, source) -> module; ignored: {key or tensor: why}."""

    config: type[DecoderConfig]
    model: type[CausalLM]
    ignored: Mapping[str, str]


def family(arch: str, origin: str) -> Family:
    """The family of a `general.architecture`. origin: the file, for the error's text. Raises UnsupportedModel."""
    if arch not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"{origin}: architecture {arch!r} is not implemented; implemented: {known}")
    file, prefix = FAMILIES[arch]
    module = import_module(f"dasllama_torch.arch.{file}")
    return Family(getattr(module, prefix + "Config"), getattr(module, prefix + "ForCausalLM"), module.IGNORED)
