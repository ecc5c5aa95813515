"""Text to token ids and back, from nothing but a GGUF file's metadata.

    tokenizer = Tokenizer.from_metadata(md)
    ids = tokenizer.encode("The capital of France is")
    tokenizer.decode(ids)                                # the text again
    tokenizer.encode(chat_prompt, add_special=False, parse_special=True)

The rules are those of llama.cpp (src/llama-vocab.cpp), with which files are made and tried, except where those lose or
mistake something:
- `decode` does not "clean up" spaces before punctuation: it gives back the text that was encoded.
- Text becomes a control token only where `parse_special` asks for it: control tokens take no part in merges, and the
  channel markers of gpt-oss stay the control tokens that the file says they are.
- `</s>` ends a generation only where the file calls it a control token or its end; in Gemma's vocabularies it is the
  HTML tag.
- gpt-4o and tekken tell capitals from small letters in every script (pretokenizers.py).

Text is taken as it is. The tokenizers that transformers has for Qwen normalize to NFC first: where their ids are wanted
for text that is not in NFC, do the same.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dasllama_torch.errors import TokenizerError

from .bpe import BPE, SPACE, byte_level_bytes
from .detokenizer import StreamingDetokenizer
from .special import SPECIAL_TYPES, Special, SpecialTokens, TokenType, strips
from .spm import SPM
from .vocabulary import Vocabulary, read_vocabulary

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")  # bytes of the file that are not UTF-8; no text has them
_NOT_TEXT = (TokenType.CONTROL, TokenType.UNKNOWN)


class Tokenizer:
    """The vocabulary of a file. `len(tokenizer)` and `vocab_size`: its number of tokens, V.

    bos_id, eos_id, eot_id, eom_id, unk_id, pad_id: int, or None where the file has none. eog_ids: frozenset of the ids
    that end a generation, from metadata and well-known names. add_bos, add_eos: whether `encode(add_special=True)` puts
    `bos_id` before and `eos_id` after the text. add_space_prefix: whether text at the beginning and after a special
    token gets a space before it (SentencePiece only).
    model, pre: `tokenizer.ggml.model` and `tokenizer.ggml.pre` as they are applied; pre is None for SentencePiece.
    """

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any]) -> "Tokenizer":
        """`md`: the GGUF keys of a file and their values.

        A file without a vocabulary (`tokenizer.ggml.model` absent, "none" or "no_vocab") gives an empty tokenizer,
        whose `encode` and `decode` raise. TokenizerError for a vocabulary that is inconsistent or of a kind that is not
        implemented. What `encode` needs is built when it is called first.
        """
        return cls(read_vocabulary(md))

    def __init__(self, vocab: Vocabulary):
        self._vocab = vocab
        self.model = vocab.model
        self.pre = vocab.pre_name
        self.vocab_size = len(vocab.tokens)
        self.has_vocab = self.vocab_size > 0
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eot_id = vocab.eot_id
        self.eom_id = vocab.eom_id
        self.unk_id = vocab.unk_id
        self.pad_id = vocab.pad_id
        self.eog_ids = vocab.eog_ids
        self.add_bos = vocab.add_bos
        self.add_eos = vocab.add_eos
        self.add_space_prefix = vocab.add_space_prefix

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        kind = self.model if self.pre is None else f"{self.model}/{self.pre}"
        return f"Tokenizer({kind}, {self.vocab_size} tokens)"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        add_special: with `bos_id` and `eos_id` around them as the vocabulary wants it. For a rendered chat prompt say
        False: templates write their own. parse_special: the names of control tokens in the text ("<|im_end|>") become
        those tokens; otherwise they are text like any other. User-defined tokens are found either way. Warns where the
        text begins with the name of the very `bos_id` that add_special puts before it. TokenizerError for a file
        without a vocabulary, lone surrogates, and text that the vocabulary cannot spell.
        """
        self._need_vocab("encode")
        _valid(text)
        bos = [self._required_id("bos")] if add_special and self.add_bos else []
        eos = [self._required_id("eos")] if add_special and self.add_eos else []
        if bos and (name := self._vocab.tokens[bos[0]]) and text.startswith(name):
            warnings.warn(
                f"text begins with {name!r}, and add_special puts another before it; "
                "for a text that brings its own, say add_special=False",
                stacklevel=2,
            )
        ids = bos
        for part in (self._specials if parse_special else self._user_defined).split(text):
            if isinstance(part, Special):
                ids.append(part.id)
            else:
                ids += self._encode_run(part)
        return ids + eos

    def encode_segments(self, segments: Iterable[tuple[str, bool]], *, prev_id: int | None = None) -> list[int]:
        """The ids of a text in segments of (text, whether the names of special tokens in it become those tokens), with
        nothing put around them. No name goes over from one segment into the next; apart from that, where segments meet
        makes no difference. prev_id: the id that comes before, None where the segments begin a text; after one of a
        text no space is put before the first word. TokenizerError as in `encode`.
        """
        self._need_vocab("encode")
        ids: list[int] = []
        run = ""
        goes_on = prev_id is not None and self.token_type(prev_id) not in SPECIAL_TYPES
        for text, special in segments:
            for part in self._specials.split(_valid(text)) if special else [_valid(text)]:
                if isinstance(part, str):
                    run += part
                else:
                    ids += self._encode_run(run, goes_on)
                    ids.append(part.id)
                    run, goes_on = "", False
        return ids + self._encode_run(run, goes_on)

    def to_tokenizers(self):
        """The vocabulary as a `tokenizers.Tokenizer`, see fast.py. TokenizerError as in `encode`."""
        from .fast import as_tokenizers

        self._need_vocab("encode")
        return as_tokenizers(self._vocab)

    def special_types(self) -> dict[str, TokenType]:
        """Name -> type of the tokens that are found in a text as they stand: control, unknown and user-defined ones."""
        vocab = self._vocab
        return {
            vocab.tokens[i]: TokenType(int(vocab.types[i]))
            for i in np.flatnonzero(np.isin(vocab.types, list(SPECIAL_TYPES))).tolist()
        }

    def special_ids(self) -> dict[str, int]:
        """Name -> id of the same tokens; of several of one name the first."""
        vocab = self._vocab
        ids = np.flatnonzero(np.isin(vocab.types, list(SPECIAL_TYPES))).tolist()
        return {vocab.tokens[i]: i for i in reversed(ids)}

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`. decode(encode(text)) == text, but that U+2581 comes back as a space in vocabularies that
        write spaces so, and without the white space that some special tokens swallow.

        skip_special: leave out control and unknown tokens. Bytes that are not UTF-8 become U+FFFD, as
        StreamingDetokenizer says. TokenizerError for a file without a vocabulary and for an id that it does not have.
        """
        self._need_vocab("decode")
        stream = StreamingDetokenizer(self, skip_special=skip_special)
        return "".join([stream.feed(i) for i in ids]) + stream.finish()

    def piece(self, token_id: int) -> str:
        """The text of one token, with its leading space. Part of a character shows as U+FFFD; StreamingDetokenizer
        puts the parts together.
        """
        return self.piece_bytes(token_id).decode("utf-8", "replace")

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; a control token's are its name."""
        kind = self.token_type(token_id)
        token = self._vocab.tokens[token_id]
        if kind is TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if kind not in SPECIAL_TYPES:
            if self._byte_level:
                return byte_level_bytes(token)
            token = token.replace(SPACE, " ")
        return token.encode("utf-8", "surrogateescape")

    def token_type(self, token_id: int) -> TokenType:
        """The file's `tokenizer.ggml.token_type`, but CONTROL for tokens with the names of control tokens."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is not in the vocabulary, which has {self.vocab_size} tokens")
        return TokenType(int(self._vocab.types[token_id]))

    def is_control(self, token_id: int) -> bool:
        return self.token_type(token_id) is TokenType.CONTROL

    @property
    def _byte_level(self) -> bool:
        return self._vocab.pre is not None and self._vocab.pre.byte_level

    @cached_property
    def _text_model(self) -> BPE | SPM:
        vocab = self._vocab
        ids = self._text_ids()
        if vocab.pre is not None:
            return BPE(ids, vocab.merges, vocab.pre)
        byte_ids = [ids.get(f"<0x{b:02X}>", ids.get(chr(b)) if b < 0x80 else None) for b in range(256)]
        for i in np.flatnonzero(vocab.types == TokenType.BYTE).tolist():
            ids.pop(vocab.tokens[i], None)
        return SPM(ids, vocab.scores, byte_ids, vocab.unk_id)

    def _text_ids(self) -> dict[str, int]:
        """Token -> id, of what text may become or, as bytes, fall back to."""
        ids: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(self._vocab.tokens, self._vocab.types.tolist(), strict=True)):
            if kind in _NOT_TEXT or not text or (not text.isascii() and _SURROGATE.search(text)):
                continue
            if ids.setdefault(text, i) != i:
                raise TokenizerError(f"tokenizer.ggml.tokens has {text!r} at {ids[text]} and at {i}, wanted it once")
        return ids

    @cached_property
    def _specials(self) -> SpecialTokens:
        return self._find(*SPECIAL_TYPES)

    @cached_property
    def _user_defined(self) -> SpecialTokens:
        return self._find(TokenType.USER_DEFINED)

    def _find(self, *kinds: TokenType) -> SpecialTokens:
        vocab = self._vocab
        found = ((vocab.tokens[i], i) for i in np.flatnonzero(np.isin(vocab.types, kinds)).tolist())
        return SpecialTokens(Special(text, i, *strips(text, vocab.name, vocab.pre_name)) for text, i in found if text)

    def _encode_run(self, text: str, goes_on: bool = False) -> list[int]:
        """The ids of the text between two special tokens. goes_on: there is text before it."""
        if not text:
            return []
        return self._text_model.encode(" " + text if self.add_space_prefix and not goes_on else text)

    def _need_vocab(self, verb: str) -> None:
        if not self.has_vocab:
            found = f"tokenizer.ggml.model is {self.model!r}"
            raise TokenizerError(f"cannot {verb}: the file has no vocabulary ({found}); wanted token ids, not text")

    def _required_id(self, name: str) -> int:
        token_id = getattr(self, f"{name}_id")
        if token_id is None:
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id is missing; wanted an id, or add_special=False")
        return token_id


def _valid(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"wanted text to encode, found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        found = f"a lone surrogate, U+{ord(text[e.start]):04X}, at character {e.start}"
        raise TokenizerError(f"the text has {found}; wanted valid Unicode") from None
    return text
