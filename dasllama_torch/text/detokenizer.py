"""Ids to text as they arrive, in whole characters."""

import codecs
from typing import TYPE_CHECKING

from .special import SPECIAL_TYPES, TokenType

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns ids into text one by one; what `feed` and `finish` return adds up to `tokenizer.decode(ids)`.

    A character's bytes are held back until the last of them has come. Bytes that cannot become a character yield one
    U+FFFD for each maximal subpart (Unicode standard, section 3.9, "U+FFFD Substitution of Maximal Subparts"), and so
    does a character that is cut short by `finish`.

    skip_special: control and unknown tokens yield nothing.
    prev_id: the id that comes before the stream, such as the prompt's last one; None where the stream begins a text. It
    tells a word's own space from the one that SentencePiece vocabularies put before the first word, which is not text.
    """

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool = True, prev_id: int | None = None):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._after_special = prev_id is None or tokenizer.token_type(prev_id) in SPECIAL_TYPES
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def swallows_space(self) -> bool:
        """Whether the next token loses a space that it begins with."""
        return self._after_special and self._tokenizer.add_space_prefix

    def feed(self, token_id: int) -> str:
        """The characters that `token_id` completes; "" if none. TokenizerError if the vocabulary has no such id."""
        kind = self._tokenizer.token_type(token_id)
        raw = self._tokenizer.piece_bytes(token_id)
        if kind in SPECIAL_TYPES:
            self._after_special = True
            if self._skip_special and kind is not TokenType.USER_DEFINED:
                return ""
        else:
            if self.swallows_space:
                raw = raw.removeprefix(b" ")
            self._after_special = False
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is held back: one U+FFFD if the stream ended inside a character, else ""."""
        return self._utf8.decode(b"", final=True)
