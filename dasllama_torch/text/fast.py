"""A vocabulary as an object of the `tokenizers` library, which transformers builds its tokenizers on.

Its ids are those of `Tokenizer.encode(text, parse_special=True)`: names of special tokens in a text are always taken
for them. For SentencePiece vocabularies that holds for natural text; where different merges have one score (see spm.py)
the library has to put one of them first.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from .bpe import SPACE, bpe_model, pre_tokenizer_of
from .special import SPECIAL_TYPES, TokenType, strips
from .vocabulary import Vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8: no text has them


def as_tokenizers(vocab: Vocabulary) -> Tokenizer:
    """The `tokenizers` object of a vocabulary that is not empty. Raises TokenizerError as `Tokenizer.encode`."""
    ids = {text: i for i, text in enumerate(vocab.tokens) if text.isascii() or not _SURROGATE.search(text)}
    tokenizer = _sentencepiece(vocab, ids) if vocab.pre is None else _merge_list(vocab, ids)
    found = np.flatnonzero(np.isin(vocab.types, list(SPECIAL_TYPES))).tolist()
    added = [_added(vocab, i) for i in found if vocab.tokens[i] in ids and vocab.tokens[i]]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.post_processor = _template(vocab)
    return tokenizer


def _added(vocab: Vocabulary, i: int) -> AddedToken:
    lstrip, rstrip = strips(vocab.tokens[i], vocab.name, vocab.pre_name)
    special = vocab.types[i] != TokenType.USER_DEFINED
    return AddedToken(vocab.tokens[i], special=special, normalized=False, lstrip=lstrip, rstrip=rstrip)


def _merge_list(vocab: Vocabulary, ids: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(bpe_model(ids, vocab.merges, vocab.pre))
    tokenizer.pre_tokenizer = pre_tokenizer_of(vocab.pre)
    if vocab.pre.byte_level:
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = _spelled_spaces(strip=False)
    return tokenizer


def _sentencepiece(vocab: Vocabulary, ids: dict[str, int]) -> Tokenizer:
    unknown = None if vocab.unk_id is None else vocab.tokens[vocab.unk_id]
    merges = _Merges(vocab, ids)
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps = [normalizers.Prepend(SPACE)] if vocab.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _spelled_spaces(strip=vocab.add_space_prefix)
    return tokenizer


class _Merges(Sequence):
    """The pairs that make a piece of the vocabulary, best score first. They are made while they are handed over: half a
    million tuples at once would keep the garbage collector busy."""

    def __init__(self, vocab: Vocabulary, ids: dict[str, int]):
        texts, numbers = [text for text in ids if text], np.array([i for text, i in ids.items() if text], np.int64)
        text_types = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        order = np.lexsort([numbers, -vocab.scores[numbers]])
        chosen = order[np.isin(vocab.types[numbers[order]], text_types)].tolist()
        ranks = {texts[at]: rank for rank, at in enumerate(chosen)}
        self._lefts, self._rights, made = [], [], []
        begins: list[str] = []  # the pieces that a text begins with, shortest first: in this order it follows them
        for text in sorted(ranks):
            while begins and not text.startswith(begins[-1]):
                begins.pop()
            for left in begins:
                if (right := text[len(left) :]) in ranks:
                    self._lefts.append(left)
                    self._rights.append(right)
                    made.append(ranks[text])
            begins.append(text)
        self._order = np.argsort(made, kind="stable").tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> tuple[str, str]:
        at = self._order[index]
        return self._lefts[at], self._rights[at]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((self._lefts[at], self._rights[at]) for at in self._order)


def _spelled_spaces(strip: bool) -> decoders.Decoder:
    """strip: a space at the beginning is not text."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)


def _template(vocab: Vocabulary) -> processors.PostProcessor:
    """What `encode(add_special=True)` puts around a text."""
    bos = [vocab.bos_id] if vocab.add_bos and vocab.bos_id is not None else []
    eos = [vocab.eos_id] if vocab.add_eos and vocab.eos_id is not None else []
    names = {i: vocab.tokens[i] for i in bos + eos}

    def around(text: str, kind: int) -> list[str]:
        return [f"{names[i]}:{kind}" for i in bos] + [f"${text}:{kind}"] + [f"{names[i]}:{kind}" for i in eos]

    return processors.TemplateProcessing(
        single=around("A", 0),
        pair=around("A", 0) + around("B", 1),
        special_tokens=[(name, i) for i, name in names.items()],
    )
