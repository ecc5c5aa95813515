"""Byte-pair merges in the order of a merge list, by the `tokenizers` library: byte-level (GPT-2, Llama 3, Qwen, ...)
and on UTF-8 (Gemma 4).
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreSequence

from dasllama_torch.errors import TokenizerError

from .pretokenizers import Pre

SPACE = "\u2581"


def _byte_alphabet() -> list[str]:
    """GPT-2's character for each of the 256 bytes: printable Latin-1 stands for itself, the others are U+0100
    onwards, in order. Source: openai/gpt-2 src/encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return [alphabet[b] for b in range(256)]


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {c: b for b, c in enumerate(BYTE_ALPHABET)}
_IN_UTF8 = [*range(0xC0), *range(0xC2, 0xF5)]  # the bytes that valid UTF-8 is made of


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for. A token with a character outside the alphabet (one that was added
    as plain text) is its own UTF-8.
    """
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode("utf-8", "surrogateescape")  # the reader keeps bytes that are not UTF-8 as lone surrogates


class _Pairs(Sequence):
    """Merges "left right" as pairs, made while they are handed over: half a million tuples at once would take 90 MB."""

    def __init__(self, merges: Sequence[str]):
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return self._pair(self._merges[index])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(self._pair, self._merges)

    @staticmethod
    def _pair(merge: str) -> tuple[str, str]:
        left, _, right = merge.partition(" ")
        return left, right


def bpe_model(vocab: dict[str, int], merges: Sequence[str], pre: Pre) -> models.BPE:
    """The merges as the `tokenizers` library applies them. Raises TokenizerError for some that do not fit."""
    try:
        return models.BPE(vocab, _Pairs(merges), ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
    except Exception as e:  # the library has no narrower class
        raise TokenizerError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {e}") from e


def pre_tokenizer_of(pre: Pre) -> PreTokenizer:
    """How text is cut, and spelled in the alphabet of the vocabulary."""
    alphabet = ByteLevel(add_prefix_space=False, use_regex=False)
    return PreSequence([pre.splitter(), alphabet]) if pre.byte_level else pre.splitter()


class BPE:
    """Text without special tokens -> ids.

    vocab: token -> id, of what text may become. merges: "left right", best first.
    """

    def __init__(self, vocab: dict[str, int], merges: Sequence[str], pre: Pre):
        self._byte_level = pre.byte_level
        spelled = BYTE_ALPHABET if pre.byte_level else [f"<0x{b:02X}>" for b in range(256)]
        # The library drops what it cannot spell without a word, so know what to look for.
        self._unspellable = frozenset(b for b in _IN_UTF8 if spelled[b] not in vocab)
        if self._unspellable and not pre.byte_level:
            missing = ", ".join(spelled[b] for b in sorted(self._unspellable))
            raise TokenizerError(f"tokenizer.ggml.tokens has no {missing}; wanted a token for each byte")
        self._tokenizer = Tokenizer(bpe_model(vocab, merges, pre))
        self._tokenizer.pre_tokenizer = pre_tokenizer_of(pre)

    def encode(self, text: str) -> list[int]:
        if not self._byte_level:
            text = text.replace(" ", SPACE)
        elif self._unspellable and (missing := self._unspellable & set(text.encode())):
            shown = ", ".join(f"0x{b:02X}" for b in sorted(missing))
            raise TokenizerError(f"tokenizer.ggml.tokens has no token for the bytes {shown} of this text")
        return self._tokenizer.encode(text, add_special_tokens=False).ids
