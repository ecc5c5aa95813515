"""Markers are found alike however a text is cut into pieces; the oracle is `re` on the whole text."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from dasllama_torch.chat.markers import MarkerBuffer

Parts = list[tuple[str, str | None]]


def joined(parts: Parts) -> Parts:
    """Without the borders that only the pieces made: the texts up to each marker, and what follows the last."""
    result: Parts = [("", None)]
    for text, marker in parts:
        result[-1] = (result[-1][0] + text, marker)
        if marker is not None:
            result.append(("", None))
    return result


def streamed(pieces: list[str], markers: list[str]) -> Parts:
    buffer = MarkerBuffer()
    parts: Parts = []
    for piece in [*pieces, None]:
        if piece is None:
            buffer.finish()
        else:
            buffer.feed(piece)
        marker: str | None = ""
        while marker is not None:
            text, marker = buffer.take(*markers)
            parts.append((text, marker))
    assert buffer.take(*markers) == ("", None)
    return joined(parts)


def whole(text: str, markers: list[str]) -> Parts:
    if not markers:
        return [(text, None)]
    pattern = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    texts = re.split(f"({pattern})", text)
    return list(zip(texts[::2], [*texts[1::2], None], strict=True))


@given(st.lists(st.text("ab<", max_size=4)), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4))
@example(["a", "a", "ab"], ["aab", "ab"])
@example(["a", "b", "a"], ["ab", "abc"])
@example(["<", "<", "a"], ["<a", "<<b"])
def test_pieces_make_no_difference(pieces: list[str], markers: list[str]):
    assert streamed(pieces, markers) == whole("".join(pieces), markers)


def test_only_what_may_become_a_marker_is_held_back():
    buffer = MarkerBuffer()
    buffer.feed("so it is 4 < 5</thi")
    assert buffer.take("</think>", "<tool>") == ("so it is 4 < 5", None)
    buffer.feed("s")
    assert buffer.take("</think>", "<tool>") == ("</this", None)
    buffer.feed("</think")
    assert buffer.take("</think>") == ("", None)
    assert buffer.take("<tool>") == ("</think", None)  # other markers, other beginnings


def test_the_longer_of_two_at_one_place_is_waited_for():
    buffer = MarkerBuffer()
    buffer.feed("<|channel|")
    assert buffer.take("<|channel|", "<|channel|>") == ("", None)
    buffer.feed(">")
    assert buffer.take("<|channel|", "<|channel|>") == ("", "<|channel|>")
    buffer.feed("<|channel|")
    buffer.finish()
    assert buffer.take("<|channel|", "<|channel|>") == ("", "<|channel|")
