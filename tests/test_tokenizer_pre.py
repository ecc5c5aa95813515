"""How text is cut into words, against other engines: the `regex` module on the patterns that the models' tokenizer.json
files publish, and the hand-written GPT-2 rules of `tokenizers`."""

import sys
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from dasllama_torch.errors import TokenizerError
from dasllama_torch.text.bpe import BYTE_ALPHABET, byte_level_bytes
from dasllama_torch.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer

# From the tokenizer.json of Meta-Llama-3-8B, Qwen2.5-0.5B, Qwen3.5-0.8B, gpt-oss-20b and Mistral-Nemo-Base-2407; the
# first of "default" and "smollm" from llama.cpp, which alone knows the former.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PUBLISHED = {
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gemma4": [r"[^\n]+|[\n]+"],
}

# Engines know different versions of Unicode: only characters that Python's own (older) tables have assigned.
ASSIGNED = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
WORDS = [
    "'s",
    "'S",
    "'Re",
    "'LL",
    "'ſ",
    "x",
    "A",
    "a",
    "é",
    "e\u0301",
    "ß",
    "ǅ",
    "ʰ",
    "字",
    "क्षि",
    "ا",
    "1",
    "٣",
    "½",
    "²",
]
BLANKS = [" ", "  ", "\t", "\n", "\r\n", "\n\n", "\r", "\v", "\x1c", "\x85", "\xa0", "\u3000", "\u2028", "\u200b"]
SIGNS = ["'", "''", "!", "->", "==", "$", "+", "|", "^", "//", "€", "_", "🦙", "\u0488", "\u0301", "\0"]
TEXTS = st.lists(st.sampled_from(WORDS + BLANKS + SIGNS) | st.sampled_from(ASSIGNED), max_size=12).map("".join)


def cut(text, patterns):
    """Matches and what lies between them, pattern by pattern."""
    pieces = [text] if text else []
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.splititer(f"({pattern})", piece, flags=regex.V0) if part]
    return pieces


def pieces_of(pre, text):
    return [piece for piece, _ in pre_tokenizer(pre).splitter().pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", PUBLISHED)
@given(text=TEXTS)
@settings(max_examples=400, deadline=None)
def test_published_patterns(pre, text):
    assert pieces_of(pre, text) == cut(text, PUBLISHED[pre])


def test_every_row_has_an_oracle():
    assert {PRE_TOKENIZERS[name].patterns for name in PUBLISHED} == {pre.patterns for pre in PRE_TOKENIZERS.values()}


@given(text=TEXTS)
@settings(max_examples=400, deadline=None)
def test_gpt2_rules_of_tokenizers(text):
    """ByteLevel has GPT-2's pattern built in, and SmolLM's tokenizer.json puts Digits before it."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for pre, oracle in (("gpt-2", gpt2), ("smollm", smollm)):
        wanted = [byte_level_bytes(piece).decode() for piece, _ in oracle.pre_tokenize_str(text)]
        assert pieces_of(pre, text) == wanted


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("qwen2", "w048 7tuijk", ["w", "0", "4", "8", " ", "7", "tuijk"]),
        ("qwen2", "333", ["3", "3", "3"]),
        ("llama-bpe", "3333", ["333", "3"]),
        ("llama-bpe", "33333333", ["333", "333", "33"]),
        ("qwen2", "Hello\n\n world", ["Hello", "\n\n", " world"]),  # \s*[\r\n]+ leaves the space to the word
        ("qwen2", "\t\n", ["\t\n"]),
        ("qwen2", "(x):\n", ["(x", "):\n"]),
        ("qwen2", "e\u0301té", ["e", "\u0301té"]),
        ("qwen35", "e\u0301té", ["e\u0301té"]),
        ("qwen2", "क्षि", ["क", "्ष", "ि"]),
        ("qwen35", "क्षि", ["क्षि"]),
        ("gpt-4o", "ÀéÉa", ["Àé", "Éa"]),  # capitals of every script begin a word
        ("tekken", "ΑΒγΔ", ["ΑΒγ", "Δ"]),
        ("gpt-4o", "don't", ["don't"]),
        ("tekken", "don't", ["don", "'t"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),  # GPT-2 knows small letters only
        ("llama-bpe", "I'LL", ["I", "'LL"]),
        ("smollm", "a12", ["a", "1", "2"]),
        ("default", "a==12345", ["a", "==", "123", "45"]),
    ],
)
def test_cases(pre, text, wanted):
    assert pieces_of(pre, text) == wanted


def test_unknown_name():
    with pytest.raises(TokenizerError, match="tokenizer.ggml.pre is 'qwen9'.*wanted one of.*qwen2"):
        pre_tokenizer("qwen9")


def test_byte_alphabet():
    """GPT-2's own rule, from the library: the alphabet as a set, and each byte's character by spelling it."""
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for char in ["\0", "A", " ", "\n", "é", "字", "🦙", "\x7f", "\xad"]:
        ((spelled, _),) = level.pre_tokenize_str(char)
        assert spelled == "".join(BYTE_ALPHABET[b] for b in char.encode())
        assert byte_level_bytes(spelled) == char.encode()
