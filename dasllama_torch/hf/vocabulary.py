"""tokenizer.json and its neighbours as the metadata keys that a GGUF file of the same vocabulary has.

So a folder's model gets a `Tokenizer` of this package, and streams and chats as a file's does. Vocabularies of merge
lists are taken where text is cut as `text/pretokenizers.py` knows it, and those that come from SentencePiece where they
are of the BPE kind; others are refused by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dasllama_torch.errors import FolderError, TokenizerError
from dasllama_torch.hf.common import read_json
from dasllama_torch.text.pretokenizers import GPT2_PATTERN, PRE_TOKENIZERS
from dasllama_torch.text.special import TokenType

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_vocabulary(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.*` keys; none where the folder has no tokenizer.json. values: of `config.gguf_facts`.

    Raises FolderError for a broken file, TokenizerError for a vocabulary that is not implemented.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        return _keys(read_json(path), _settings(folder), values, str(path))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError) as error:
        raise FolderError(f"{path}: is no tokenizer of the `tokenizers` library: {error!r}") from None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text("utf-8")
    return settings


def _keys(file: dict, settings: dict, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    model, arch = file["model"], values["general.architecture"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{origin}: the model is {model['type']!r}, wanted 'BPE': nothing else is implemented")
    added = file.get("added_tokens") or []
    tokens, types = _tokens(model, added, values[f"{arch}.vocab_size"], origin)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        keys |= _spelled_in_utf8(file, tokens, merges, arch)
    else:
        keys |= {"model": "gpt2", "pre": _pre(file, bool(model.get("ignore_merges")), origin), "merges": merges}
    ids = {text: i for i, text in enumerate(tokens)}
    for name, key in _NAMED.items():
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            keys[f"{key}_token_id"] = ids[text]
    around = _around(file.get("post_processor"))
    for name, there in zip(("bos", "eos"), around or (None, None), strict=True):
        said = settings.get(f"add_{name}_token")
        keys[f"add_{name}_token"] = bool(said) if there is None else there
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    return named | ({"tokenizer.chat_template": template} if template else {})


def _tokens(model: dict, added: list[dict], n: int, origin: str) -> tuple[list[str], np.ndarray]:
    """The texts of all n ids, and their types. Ids without a token are filled up, as converters do."""
    texts = {i: text for text, i in model["vocab"].items()} | {each["id"]: each["content"] for each in added}
    if texts and max(texts) >= n:
        raise TokenizerError(f"{origin}: has a token of id {max(texts)}, and config.json {n} tokens")
    types = np.full(n, TokenType.NORMAL, np.int8)
    for i in range(n):
        if i not in texts:
            texts[i], types[i] = f"[PAD{i}]", TokenType.UNUSED
        elif model.get("byte_fallback") and _BYTE.fullmatch(texts[i]):
            types[i] = TokenType.BYTE
    for each in added:
        types[each["id"]] = TokenType.CONTROL if each.get("special") else TokenType.USER_DEFINED
    return [texts[i] for i in range(n)], types


def _pre(file: dict, ignore_merges: bool, origin: str) -> str:
    """The `tokenizer.ggml.pre` whose way to cut text is the file's."""
    cuts: list[str] = []
    for step in _steps(file.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            cuts.append(step["pattern"].get("Regex") or re.escape(step["pattern"]["String"]))
        elif step["type"] == "Digits" and step.get("individual_digits"):
            cuts.append(r"\p{N}")
        elif step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            cuts += [GPT2_PATTERN] * bool(step.get("use_regex", True))
        else:
            raise TokenizerError(f"{origin}: the pre-tokenizer has a step {step}, which is not implemented")
    for name, pre in PRE_TOKENIZERS.items():
        if pre.byte_level and pre.patterns == tuple(cuts) and pre.ignore_merges == ignore_merges:
            return name
    raise TokenizerError(f"{origin}: text is cut by {cuts}, which is not implemented")


def _spelled_in_utf8(file: dict, tokens: list[str], merges: list[str], arch: str) -> dict[str, Any]:
    """What has come from SentencePiece: pieces in UTF-8, with bytes in the place of characters without one."""
    if arch == "gemma4":
        return {"model": "gemma4", "pre": "gemma4", "merges": merges}
    # The list of merges comes from scores, best first: those of the pieces that they make.
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = np.array([-float(ranks.get(text, len(merges))) for text in tokens], np.float32)
    steps = _steps(file.get("normalizer"), "normalizers") + _steps(file.get("pre_tokenizer"), "pretokenizers")
    prefix = any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return {"model": "llama", "scores": scores, "add_space_prefix": prefix}


def _steps(part: dict | None, name: str) -> list[dict]:
    """The steps of a sequence, or the one that there is."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _around(processor: dict | None) -> tuple[bool, bool] | None:
    """Whether something stands before and behind every text; None where no template tells."""
    for step in _steps(processor, "processors"):
        if step["type"] == "TemplateProcessing":
            kinds = ["Sequence" in piece for piece in step["single"]]
            return not kinds[0], not kinds[-1]
    return None
