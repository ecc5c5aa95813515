"""A conversation's messages, and the tokens in which the model said its own.

A template writes the model's earlier replies as text. Encoded anew, that text may become other tokens than were
sampled, which the model never said and no cache holds. So a reply keeps its ids, and a prompt in which it stands as it
was said, behind the prompt that it answered, gets those.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dasllama_torch.text.detokenizer import StreamingDetokenizer
from dasllama_torch.text.special import SPECIAL_TYPES
from dasllama_torch.text.tokenizer import Tokenizer

from .escape import Segment, cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """How a reply was said. ids: the tokens, without the one that ended it; text: theirs, names of special tokens
    included. start: characters of the prompt that it answered; digest: of that prompt. message: what became of it;
    once that has been changed, the ids are not its own any more.
    """

    ids: tuple[int, ...]
    text: str
    start: int
    digest: str
    message: Mapping[str, Any]


class Message(dict):
    """{"role": ..., "content": ...}, see messages.py. escape_special: whether the names of special tokens in it stay
    text. sampled: of a reply of the model, otherwise None."""

    __slots__ = ("escape_special", "sampled")

    def __init__(self, fields: Mapping[str, Any], *, escape_special: bool = True, sampled: Sampled | None = None):
        super().__init__(fields)
        self.escape_special, self.sampled = escape_special, sampled


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt: its text, and its ids."""

    text: str
    ids: list[int]


def digest(text: str) -> str:
    return _hash(text).hexdigest()


def encode(tokenizer: Tokenizer, segments: Sequence[Segment], messages: Iterable[Mapping[str, Any]]) -> Rendered:
    """The prompt of a conversation that a template has written as `segments`."""
    text = "".join(segment.text for segment in segments)
    ids: list[int] = []
    at = 0  # characters of the text that are encoded

    def encode_until(stop: int) -> None:
        prev_id = ids[-1] if ids else None
        ids.extend(tokenizer.encode_segments(cut(segments, at, stop), prev_id=prev_id))

    for sampled in _in_place(messages, text):
        if sampled.start < at:
            continue
        encode_until(sampled.start)
        said, at = _kept(tokenizer, sampled, text, ids[-1] if ids else None)
        ids.extend(said)
    encode_until(len(text))
    return Rendered(text, ids)


def _in_place(messages: Iterable[Mapping[str, Any]], text: str) -> Iterable[Sampled]:
    """The replies that stand unchanged in the conversation and whose prompt the text begins with."""
    state, at = _hash(""), 0
    for message in messages:
        sampled = getattr(message, "sampled", None)
        if sampled is None or message != sampled.message or not at <= sampled.start <= len(text):
            continue
        state.update(_bytes(text[at : sampled.start]))
        at = sampled.start
        if state.hexdigest() == sampled.digest:
            yield sampled


def _kept(tokenizer: Tokenizer, sampled: Sampled, text: str, prev_id: int | None) -> tuple[Sequence[int], int]:
    """The ids of a reply that stand for what the text has in its place, and where in the text they end.

    That is all of them, or those before the white space at its end, which templates trim. Otherwise those up to a
    special token from which on the text differs: what follows that is encoded as it would be after any other.
    """
    start = sampled.start
    if text.startswith(sampled.text, start):
        return sampled.ids, start + len(sampled.text)
    solid = len(sampled.text.rstrip())
    stream = StreamingDetokenizer(tokenizer, skip_special=False, prev_id=prev_id)
    n, end, at = 0, start, start
    for i, token in enumerate(sampled.ids):
        piece = stream.feed(token)
        if not text.startswith(piece, at):
            break
        at += len(piece)
        if tokenizer.token_type(token) in SPECIAL_TYPES:
            n, end = i + 1, at
        if at - start >= solid:
            if at - start == solid and not stream.finish():  # no character is cut in two
                n, end = i + 1, at
            break
    return sampled.ids[:n], end


def _hash(text: str):
    return blake2b(_bytes(text), digest_size=16)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
