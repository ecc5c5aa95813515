"""A vocabulary as a GGUF file's metadata gives it: read, checked, and completed with what files are known to leave
out or get wrong.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dasllama_torch.errors import TokenizerError

from .pretokenizers import Pre, pre_tokenizer
from .special import CONTROL_NAMES, END_NAMES, END_NAMES_IF_CONTROL, TokenType, end_ids

_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """tokens: texts by id, [V]; empty in a file without a vocabulary. types: int8 [V], a TokenType each. scores:
    float32 [V], of SentencePiece vocabularies only. merges: "left right", best first, and pre, how text is cut: of
    the others only. Ids are None where the file has none. eog_ids: what ends a generation. name: `general.name`.
    """

    model: str
    tokens: Sequence[str]
    types: np.ndarray
    scores: np.ndarray | None = None
    merges: Sequence[str] | None = None
    pre_name: str | None = None
    pre: Pre | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eog_ids: frozenset[int] = frozenset()
    name: str = ""


def read_vocabulary(md: Mapping[str, Any]) -> Vocabulary:
    """Raises TokenizerError for a vocabulary that is inconsistent or of a kind that is not implemented."""
    model = _scalar(md, "model", "none", str)
    if model in ("none", "no_vocab"):
        return Vocabulary(model=model, tokens=(), types=np.zeros(0, np.int8))
    if model not in ("llama", "gpt2", "gemma4"):
        raise TokenizerError(f"{_PREFIX}model is {model!r}, which is not implemented; wanted llama, gpt2 or gemma4")
    tokens = _strings(md, "tokens")
    n = len(tokens)
    types = _types(md, n)
    kind = _sentencepiece(md, n) if model == "llama" else _merge_list(md, model)
    ids = {
        # SentencePiece's own numbering stands where a file says nothing.
        "bos_id": _id(md, "bos_token_id", n, 1 if model == "llama" else None),
        "eos_id": _id(md, "eos_token_id", n, 2 if model == "llama" else None),
        "unk_id": _id(md, "unknown_token_id", n, 0 if model == "llama" else None),
        "eot_id": _id(md, "eot_token_id", n),
        "eom_id": _id(md, "eom_token_id", n),
        "pad_id": _id(md, "padding_token_id", n),
    }
    fills = [_id(md, f"fim_{part}_token_id", n) for part in ("pad", "rep", "sep")]
    ends = {tokens[i]: i for i in (ids["eos_id"], ids["eot_id"], ids["eom_id"], *fills) if i is not None}
    named = CONTROL_NAMES | END_NAMES | END_NAMES_IF_CONTROL
    for i, text in ((i, text) for i, text in enumerate(tokens) if text in named):
        if text in CONTROL_NAMES:
            types[i] = TokenType.CONTROL
        if text in END_NAMES or (text in END_NAMES_IF_CONTROL and types[i] == TokenType.CONTROL):
            ends[text] = i
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        add_eos=_scalar(md, "add_eos_token", False, bool),
        eog_ids=end_ids(ends),
        name=_scalar(md, "general.name", "", str),
        **kind,
        **ids,
    )


def _sentencepiece(md: Mapping[str, Any], n: int) -> dict[str, Any]:
    return {
        "scores": _numbers(md, "scores", n, "iuf").astype(np.float32),
        "add_bos": _scalar(md, "add_bos_token", True, bool),
        "add_space_prefix": _scalar(md, "add_space_prefix", True, bool),
    }


def _merge_list(md: Mapping[str, Any], model: str) -> dict[str, Any]:
    pre_name = "gemma4" if model == "gemma4" else _scalar(md, "pre", "", str)
    if not pre_name:
        warnings.warn(
            f"{_PREFIX}pre is missing: text is cut as by 'default', which the model may not know", stacklevel=4
        )
        pre_name = "default"
    pre = pre_tokenizer(pre_name)
    # Some Gemma 4 files say add_bos_token = false, but the model does not work without (llama.cpp pull request 21500).
    add_bos = _scalar(md, "add_bos_token", pre.add_bos, bool) or not pre.byte_level
    return {"merges": _strings(md, "merges"), "pre_name": pre_name, "pre": pre, "add_bos": add_bos}


def _types(md: Mapping[str, Any], n: int) -> np.ndarray:
    if _PREFIX + "token_type" not in md:
        return np.full(n, TokenType.NORMAL, np.int8)
    types = _numbers(md, "token_type", n, "iu")
    if n and not 1 <= types.min() <= types.max() <= len(TokenType):
        i = int(np.flatnonzero((types < 1) | (types > len(TokenType)))[0])
        raise TokenizerError(f"{_PREFIX}token_type is {types[i]} at index {i}, wanted 1 to {len(TokenType)}")
    return types.astype(np.int8)


def _scalar(md: Mapping[str, Any], key: str, default: Any, kind: type) -> Any:
    key = key if "." in key else _PREFIX + key
    value = md.get(key, default)
    if not isinstance(value, kind) and not (kind is bool and isinstance(value, np.bool_)):
        raise TokenizerError(f"{key} is {type(value).__name__}, wanted {kind.__name__}")
    return kind(value)


def _id(md: Mapping[str, Any], key: str, n: int, default: int | None = None) -> int | None:
    value = md.get(_PREFIX + key, default)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TokenizerError(f"{_PREFIX}{key} is {type(value).__name__}, wanted an integer")
    if 0 <= value < n:
        return int(value)
    if _PREFIX + key in md:  # some converters write -1, as an unsigned number, for a token that the model lacks
        warnings.warn(f"{_PREFIX}{key} is {value}, but there are {n} tokens: taken as absent", stacklevel=4)
    return None


def _strings(md: Mapping[str, Any], key: str) -> Sequence[str]:
    value = _required(md, key)
    if isinstance(value, str) or not isinstance(value, Sequence) or (len(value) and not isinstance(value[0], str)):
        raise TokenizerError(f"{_PREFIX}{key} is {type(value).__name__}, wanted an array of strings")
    return value


def _numbers(md: Mapping[str, Any], key: str, n: int, kinds: str) -> np.ndarray:
    value = _required(md, key)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds or len(value) < n:
        found = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TokenizerError(f"{_PREFIX}{key} is {found}, wanted {n} numbers, one for each token")
    return value[:n]


def _required(md: Mapping[str, Any], key: str) -> Any:
    if _PREFIX + key not in md:
        raise TokenizerError(f"{_PREFIX}{key} is missing; {_PREFIX}model = {md[_PREFIX + 'model']!r} needs it")
    return md[_PREFIX + key]
