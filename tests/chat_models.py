"""Tiny models that can chat: the golden data's weights, a vocabulary that fits into their 256 rows, and a family's chat
template as published."""

from pathlib import Path

import numpy as np

import dasllama_torch as dl
from dasllama_torch.chat import families
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.text.bpe import BYTE_ALPHABET
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

ROWS = 256
N_CTX = 2048  # beyond what these files say
_BYTES = [9, 10, *range(32, 127), *range(128, 256)]
# So that text can be said in other tokens than it is encoded in.
_MERGES = ["h e", "l l", "\u0120 t"]

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_THINK = ["<think>", "</think>"]
_GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
_HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
# Template -> control tokens; bos and eos are those of these names.
SPECIALS = {
    "meta-llama-Llama-3.1-8B-Instruct": [*_HEADERS, "<|python_tag|>"],
    "HuggingFaceTB-SmolLM3-3B": [*CHATML, *_THINK],
    "Qwen-Qwen2.5-7B-Instruct": [*CHATML, "<tool_call>", "</tool_call>"],
    "Qwen-Qwen3-0.6B": [*CHATML, *_THINK, "<tool_call>", "</tool_call>"],
    "Qwen3-Coder": [*CHATML, "<tool_call>", "</tool_call>"],
    "Qwen3.5-4B": [*CHATML, *_THINK, "<tool_call>", "</tool_call>"],
    "microsoft-Phi-3.5-mini-instruct": ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "google-gemma-2-2b-it": _GEMMA,
    "Gemma 2 and 3": _GEMMA,
    "google-gemma-4-31B-it": (
        ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"]
        + ["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
    ),
    "GLM-4.6": (
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_THINK]
        + ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    ),
    "openai-gpt-oss-120b": (
        ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"]
        + ["<|call|>", "<|endoftext|>"]
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"]
        + ["[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    ),
}
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>")
_EOS = ("</s>", "<eos>", "<|eot_id|>", "<|return|>", "<|endoftext|>")

# Golden case -> its family's template, the first whose key its name begins with.
_TEMPLATES = {
    "llama": "meta-llama-Llama-3.1-8B-Instruct",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "qwen2": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3next": "Qwen3-Coder",
    "qwen35": "Qwen3.5-4B",
    "qwen3": "Qwen-Qwen3-0.6B",
    "phi3": "microsoft-Phi-3.5-mini-instruct",
    "gemma2": "google-gemma-2-2b-it",
    "gemma3": "Gemma 2 and 3",
    "gemma4": "google-gemma-4-31B-it",
    "glm4moe": "GLM-4.6",
    "gpt-oss": "openai-gpt-oss-120b",
    "mistral3": "mistralai-Ministral-3-14B-Reasoning-2512",
}


def template_of(name: str) -> str:
    return next(template for key, template in _TEMPLATES.items() if name.startswith(key))


def source(oracle: Path, template: str) -> str:
    """Jinja, as published, or ours of a family that is named."""
    ours = [family.source for family in families.FAMILIES if family.name == template]
    return ours[0] if ours else (oracle / "templates" / f"{template}.jinja").read_bytes().decode()


def vocabulary(specials: list[str], **keys) -> Metadata:
    """Bytes, a few merges, control tokens, and unused ones up to ROWS. keys: further ones below `tokenizer.ggml.`."""
    tokens = [BYTE_ALPHABET[b] for b in _BYTES] + [merge.replace(" ", "") for merge in _MERGES]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(specials)
    tokens += specials
    types += [TokenType.UNUSED] * (ROWS - len(tokens))
    tokens += [f"<unused{i}>" for i in range(ROWS - len(tokens))]
    assert len(tokens) == ROWS
    for key, names in (("bos_token_id", _BOS), ("eos_token_id", _EOS)):
        found = [tokens.index(name) for name in names if name in specials]
        if found:
            keys.setdefault(key, found[0])
    keys |= dict(model="gpt2", pre="qwen2", tokens=tokens, token_type=np.array(types, np.int32), merges=_MERGES)
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def give_vocabulary(model, specials: list[str], **keys):
    """The model, with a vocabulary."""
    model.tokenizer = Tokenizer.from_metadata(vocabulary(specials, **keys))
    return model


def create_chat(oracle: Path, model, template: str, **how):
    """A chat with a model that gets the vocabulary of that template."""
    give_vocabulary(model, SPECIALS[template])
    if "session" not in how:
        how.setdefault("n_ctx", N_CTX)
    return dl.create_chat(model, chat_template=source(oracle, template), **how)


def encode(chat, text: str, *, by_letter: bool = False) -> list[int]:
    """The ids of a text in which names of special tokens are those tokens; by letter: without merges."""
    if not by_letter:
        return chat.tokenizer.encode_segments([(text, True)])
    return [token for letter in text for token in chat.tokenizer.encode_segments([(letter, False)])]


def script(chat, ids: list[int], end: str | None = None) -> None:
    """Let the chat's session sample these ids next, and the control token `end` behind them."""
    session = chat.session
    left = iter(ids if end is None else [*ids, *encode(chat, end)])

    def sample(*_, **__):
        if session.pending:
            session.eval([])
        return next(left)

    session.sample = sample


def said(chat, reply: str, end: str | None = None, max_tokens: int | None = None, **how):
    """The pieces of a reply that was scripted."""
    script(chat, encode(chat, reply, **how), end)
    return list(chat.respond(max_tokens=max_tokens))
