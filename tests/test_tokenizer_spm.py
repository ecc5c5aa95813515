"""Merges by score, against SentencePiece itself and against the plain algorithm."""

import io

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models
from vocabularies import CORPUS, spm

from dasllama_torch.text.special import TokenType
from dasllama_torch.text.spm import SPM
from dasllama_torch.text.tokenizer import Tokenizer

USER_DEFINED = ["<tool>", "\n\n", "\n\n\n"]
TEXTS = st.lists(
    st.sampled_from(
        ["the ", "lighthouse", " ", "  ", "    ", "aaaa", "====", "é", "字", "灯塔", "\n", "\t", "<s>", "<0x41>"]
    )
    | st.sampled_from(USER_DEFINED + CORPUS)
    | st.characters(codec="utf-8", exclude_characters="\0"),  # which ends a text for SentencePiece
    max_size=10,
).map("".join)


def train(space_prefix):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in CORPUS for _ in range(3)] + ["====", "aaaaaa aaa", "- - -"]),
        model_writer=file,
        model_type="bpe",
        vocab_size=620,
        byte_fallback=True,
        add_dummy_prefix=space_prefix,
        split_by_whitespace=space_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=USER_DEFINED,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def metadata_of(model):
    """What a converter writes; scores are negated ranks."""
    n = model.vocab_size()
    types = [TokenType.NORMAL] * n
    for i in range(n):
        if model.is_control(i):
            types[i] = TokenType.CONTROL
        elif model.is_unknown(i):
            types[i] = TokenType.UNKNOWN
        elif model.is_byte(i):
            types[i] = TokenType.BYTE
        elif model.id_to_piece(i) in USER_DEFINED:
            types[i] = TokenType.USER_DEFINED
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in range(n)], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
    }


@pytest.fixture(scope="module")
def llama():
    """Like Llama's: a space before the first word, and no piece goes on after a space."""
    model = train(space_prefix=True)
    return model, Tokenizer.from_metadata(metadata_of(model))


@pytest.fixture(scope="module")
def gemma():
    """Like Gemma's: no space that is not in the text, and pieces may span words."""
    model = train(space_prefix=False)
    return model, Tokenizer.from_metadata(metadata_of(model) | {"tokenizer.ggml.add_space_prefix": False})


@given(text=TEXTS)
@settings(max_examples=400, deadline=None)
def test_sentencepiece_with_space_prefix(llama, text):
    model, ours = llama
    text = text.replace("<tool>", "").replace("\n", "")  # after these, unlike SentencePiece, llama.cpp writes a space
    ids = ours.encode(text, add_special=False)
    assert ids == model.encode(text)
    assert ours.decode(ids) == text.replace("▁", " ")


@given(text=TEXTS)
@settings(max_examples=400, deadline=None)
def test_sentencepiece(gemma, text):
    model, ours = gemma
    ids = ours.encode(text, add_special=False)
    assert ids == model.encode(text)
    assert ours.decode(ids) == text.replace("▁", " ")


def plain_merge(text, pieces, scores):
    """One merge at a time: the best score, then the leftmost."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[pieces[a + b]], i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in pieces
        ]
        if not pairs:
            return [pieces[symbol] for symbol in symbols]
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(
    pieces=st.dictionaries(st.text("ab▁", min_size=2, max_size=5), st.integers(-3, 0), max_size=25),
    text=st.text("ab ", max_size=60),
)
@settings(max_examples=500, deadline=None)
def test_plain_algorithm(pieces, text):
    """Few different scores, so that ties are the rule, and words long and short of the cache."""
    pieces = dict.fromkeys("ab▁", -9) | pieces
    ids = {piece: i for i, piece in enumerate(pieces)}
    scores = np.array([*pieces.values()], np.float32)
    ours = SPM(ids, scores, [None] * 256, None)
    wanted = plain_merge(text.replace(" ", "▁"), ids, scores)
    assert ours.encode(text) == wanted
    assert list(ours._merge(text.replace(" ", "▁"))) == wanted  # the same without cutting first


def test_greedy_merges_and_not_the_likeliest_pieces():
    """A7: a vocabulary on which merging by score and the unigram model (the `t5` kind) differ."""
    pieces = {"ab": -1.0, "bc": -2.0, "a": -3.0, "b": -9.0, "c": -10.0}
    unigram = HFTokenizer(models.Unigram([*pieces.items()], None))
    assert unigram.encode("abc").tokens == ["a", "bc"]
    tok = Tokenizer.from_metadata(spm(pieces, add_space_prefix=False))
    assert [tok.piece(i) for i in tok.encode("abc", add_special=False)] == ["ab", "c"]


def test_bytes_stand_in():
    tok = Tokenizer.from_metadata(spm({"a": -1.0}, add_space_prefix=False))
    first = 3  # <unk>, <s>, </s>, then <0x00>
    assert tok.encode("aéa", add_special=False) == [first + 256, first + 0xC3, first + 0xA9, first + 256]
