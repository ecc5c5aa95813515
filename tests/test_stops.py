"""Stop strings found in a stream are those of a plain search in the whole text, however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasllama_torch.text.stops import StopStrings


def plain(text, stops):
    """The text before a stop string, and which it is: the first that is complete, of several the longest."""
    for end in range(len(text) + 1):
        if here := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop
    return text, None


def undecided(text, stops):
    """How much of a text's end may be the beginning of a stop string."""
    return max([n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])], default=0)


LETTERS = st.text("ab\n🦙", max_size=12)


@given(LETTERS, st.lists(st.text("ab\n🦙", min_size=1, max_size=5), max_size=4), st.data())
def test_every_cut_gives_what_a_plain_search_finds(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    wanted, found = plain(text, stops)
    search, passed, fed = StopStrings(stops), "", ""
    for start, end in zip(cuts, cuts[1:], strict=False):
        passed += search.feed(text[start:end])
        fed += text[start:end]
        if search.found:
            break
        assert passed == fed[: len(fed) - undecided(fed, stops)]  # no more is held back than has to be
    assert search.found == found
    assert passed + search.finish() == wanted


@pytest.mark.parametrize(
    ("stops", "pieces", "wanted", "found"),
    [
        (["\nUser:"], ["Hi", "\n", "Us", "er", ": x"], ["Hi", "", "", "", ""], "\nUser:"),
        (["\nUser:"], ["Hi", "\n", "Use", "d"], ["Hi", "", "", "\nUsed"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["abc", "b"], ["abc"], ["a"], "b"),  # complete before the longer one
        (["b", "ab"], ["ab"], [""], "ab"),
        (["abab", "bb"], ["aba", "bb"], ["", ""], "abab"),
    ],
)
def test_examples(stops, pieces, wanted, found):
    search = StopStrings(stops)
    assert [search.feed(piece) for piece in pieces] == wanted
    assert search.found == found
