"""Streaming: whole characters only, one U+FFFD for each maximal subpart, and the sum is `decode`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import bpe, spm

from dasllama_torch.errors import TokenizerError
from dasllama_torch.text.bpe import BYTE_ALPHABET
from dasllama_torch.text.detokenizer import StreamingDetokenizer
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

CHUNKS = [
    b" \xf0\x9f",
    b"\xa6",
    b"\x99",
    b" a",
    b"\xe5\xad",
    b"\x97",
    b"\xe5",
    b"\xad\x97",
    b"\xff",
    b"\xf0\x9f\xa6\x99x",
    b"\n",
]
LLAMA = "🦙"


def byte_token(raw):
    return "".join(BYTE_ALPHABET[b] for b in raw)


@pytest.fixture(scope="module")
def tok():
    specials = {byte_token(chunk): TokenType.NORMAL for chunk in CHUNKS}
    specials |= {"<|im_end|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED}
    return Tokenizer.from_metadata(bpe("qwen2", specials))


@pytest.fixture(scope="module")
def ids(tok):
    """Bytes -> the id of the token that spells them; names -> theirs."""
    table = {tok.piece_bytes(i): i for i in range(len(tok))}
    return lambda *chunks: [table[chunk if isinstance(chunk, bytes) else chunk.encode()] for chunk in chunks]


def stream(tok, ids, **options):
    detokenizer = StreamingDetokenizer(tok, **options)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@pytest.mark.parametrize(
    ("chunks", "wanted"),
    [
        # A14: " 🦙" as Qwen 2 has it, ids 11162, 99, 247
        ([b" \xf0\x9f", b"\xa6", b"\x99"], [" ", "", LLAMA, ""]),
        # (a) the end comes inside a character
        ([b"a", b" \xf0\x9f", b"\xa6"], ["a", " ", "", "\ufffd"]),
        ([b"\xe5\xad"], ["", "\ufffd"]),
        # (b) a byte that no character has, alone and inside a character
        ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b", ""]),
        ([b" \xf0\x9f", b"\xff", b"a"], [" ", "\ufffd\ufffd", "a", ""]),
        # (c) a word with its space after two of four bytes
        ([b" \xf0\x9f", b" a"], [" ", "\ufffd a", ""]),
        # (d) what follows a character in the same token comes with it
        ([b" \xf0\x9f", b"\xa6", b"\x99", b"\n"], [" ", "", LLAMA, "\n", ""]),
        ([b"\xf0\x9f\xa6\x99x"], [LLAMA + "x", ""]),
        # (e) three bytes, cut 1 + 2 and 2 + 1
        ([b"\xe5", b"\xad\x97"], ["", "字", ""]),
        ([b"\xe5\xad", b"\x97"], ["", "字", ""]),
        ([b"\xe5\xad", b"\xe5\xad", b"\x97"], ["", "\ufffd", "字", ""]),
        # special tokens: control ones are silent, user-defined ones are text; a character that was begun stays begun
        ([b"a", b"<|im_end|>", b"b", b"<think>"], ["a", "", "b", "<think>", ""]),
        ([b"\xe5\xad", b"<think>"], ["", "\ufffd<think>", ""]),
        ([b"\xe5\xad", b"<|im_end|>", b"\x97"], ["", "", "字", ""]),
        ([], [""]),
    ],
)
def test_pieces(tok, ids, chunks, wanted):
    assert stream(tok, ids(*chunks)) == wanted
    assert tok.decode(ids(*chunks)) == "".join(wanted)


def test_control_tokens_on_demand(tok, ids):
    assert stream(tok, ids("a", "<|im_end|>"), skip_special=False) == ["a", "<|im_end|>", ""]
    assert stream(tok, ids(b"\xe5\xad", "<|im_end|>"), skip_special=False) == ["", "\ufffd<|im_end|>", ""]


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        # The Unicode standard, section 3.9, tables 3-8 to 3-11; there the letters are 0x41 and 0x42
        ("C0 AF E0 80 BF F0 81 82 41", "????????A"),
        ("ED A0 80 ED BF BF ED AF 41", "????????A"),
        ("F4 91 92 93 FF 41 80 BF 42", "?????A??B"),
        ("E1 80 E2 F0 91 92 F1 BF 41", "????A"),
    ],
)
def test_maximal_subparts(tok, ids, raw, wanted):
    single = ids(*(bytes([b]) for b in bytes.fromhex(raw)))
    assert "".join(stream(tok, single)) == wanted.replace("?", "\ufffd")


@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_text_cut_anywhere(text, cuts):
    """Tokens that end anywhere: no U+FFFD that the text does not have, nothing held back longer than a character."""
    raw = text.encode()
    at = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    chunks = [raw[a:b] for a, b in zip(at, at[1:], strict=False)]
    tok = Tokenizer.from_metadata(bpe("gpt-2", {byte_token(c): TokenType.NORMAL for c in set(chunks) if len(c) > 1}))
    table = {tok.piece_bytes(i): i for i in range(len(tok))}
    detokenizer = StreamingDetokenizer(tok)
    shown = b""
    for end, chunk in zip(at[1:], chunks, strict=True):
        shown += detokenizer.feed(table[chunk]).encode()
        assert raw.startswith(shown)
        assert end - len(shown) < 4
    assert detokenizer.finish() == ""
    assert shown == raw


@given(raw=st.binary(max_size=40))
def test_any_bytes(raw):
    tok = Tokenizer.from_metadata(bpe("gpt-2"))
    table = {tok.piece_bytes(i): i for i in range(256)}
    pieces = stream(tok, [table[bytes([b])] for b in raw])
    assert "".join(pieces) == raw.decode("utf-8", "replace") == tok.decode([table[bytes([b])] for b in raw])


def test_bytes_of_sentencepiece():
    tok = Tokenizer.from_metadata(spm({"▁a": -1.0}))
    first = tok.encode("", add_special=False) or [3]
    byte = lambda b: first[0] + b  # noqa: E731
    assert stream(tok, [byte(0xF0), byte(0x9F), byte(0xA6), byte(0x99)]) == ["", "", "", LLAMA, ""]


@pytest.mark.parametrize(
    ("prev", "first"), [(None, "a"), ("<s>", "a"), ("<think>", "a"), ("▁a", " a"), ("<0x0A>", " a")]
)
def test_first_space(prev, first):
    """The space before the first word is the vocabulary's own where a text begins or a special token came before."""
    tok = Tokenizer.from_metadata(spm({"▁a": -1.0}, {"<think>": TokenType.USER_DEFINED}))
    tokens = tok._vocab.tokens
    prev_id = None if prev is None else tokens.index(prev)
    word, bos = tokens.index("▁a"), tokens.index("<s>")
    assert stream(tok, [word, word, bos, word], prev_id=prev_id) == [first, " a", "", "a", ""]


def test_space_stays_in_other_vocabularies(tok, ids):
    assert stream(tok, ids(b" a")) == [" a", ""]


def test_unknown_id(tok):
    with pytest.raises(TokenizerError, match="token id 99999 is not in the vocabulary"):
        StreamingDetokenizer(tok).feed(99999)
