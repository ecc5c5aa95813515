r"""How vocabularies with a merge list cut text into words before merging: one row for each `tokenizer.ggml.pre`.

The names, and which of them share a row, are those of llama.cpp (src/llama-vocab.cpp). The patterns are the ones that
the models' own `tokenizer.json` publishes. llama.cpp replaces capitals and small letters of gpt-4o and tekken by ASCII
ranges, because its engine cannot tell `\p{Lu}` from `\p{Ll}`; the models were trained on the published patterns.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Sequence, Split

from dasllama_torch.errors import TokenizerError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Capitals, then small letters; letters without case and marks go with either.
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWERCASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+"
_CAPITALIZED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_GPT4O = rf"{_LOWERCASED}{_ENDINGS}?|{_CAPITALIZED}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_BLANKS}"
_TEKKEN = rf"{_LOWERCASED}|{_CAPITALIZED}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_BLANKS}"


@dataclass(frozen=True, slots=True)
class Pre:
    """One way to cut text.

    patterns: applied in turn, each to the pieces that the ones before it left; matches and what lies between them
    become pieces. add_bos: the default where a file has no `tokenizer.ggml.add_bos_token`. ignore_merges: a piece that
    is a token is taken whole, without asking the merges. byte_level: pieces are spelled in GPT-2's alphabet, one
    character for each byte; otherwise in UTF-8 with U+2581 for the space, and characters that are no token become
    `<0xXX>` tokens.
    """

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False
    byte_level: bool = True

    def splitter(self) -> PreTokenizer:
        """The `tokenizers` object that cuts a text into these pieces."""
        return Sequence([Split(Regex(pattern), "isolated") for pattern in self.patterns])


_ROWS = {
    # A converter once named the vocabulary of Llama 3 smaug-bpe (llama.cpp issue 7881).
    "llama-bpe llama3 llama-v3 smaug-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pre(
        (_LLAMA3,), add_bos=True, ignore_merges=True
    ),
    "dbrx chatglm-bpe": Pre((_LLAMA3,)),
    "glm4 glm5": Pre((_LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Pre((_QWEN2,)),
    "qwen35": Pre((_QWEN35,)),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert roberta-bpe"
    " jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": Pre((GPT2_PATTERN,)),
    "gpt-4o llama4 kanana2 talkie": Pre((_GPT4O,)),
    "tekken": Pre((_TEKKEN,), add_bos=True, ignore_merges=True),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Pre((r"\p{N}", GPT2_PATTERN)),
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gemma4 granite-embed-multi-311m": Pre((r"\n+",), add_bos=True, byte_level=False),
}
PRE_TOKENIZERS = {name: pre for names, pre in _ROWS.items() for name in names.split()}


def pre_tokenizer(name: str) -> Pre:
    """The row of `tokenizer.ggml.pre = name`. TokenizerError for another name: other rules would give other ids."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre is {name!r}, which is not implemented; wanted one of {known}")
    return PRE_TOKENIZERS[name]
