"""SentencePiece vocabularies of the BPE kind: the neighbours that make the best-scored piece are merged first, and
bytes stand in for what has no piece.

Not the BPE model of `tokenizers`: there each pair has a rank of its own, here a pair's rank is the score of what it
becomes. So different pairs have one rank (`a` + `aa` and `aa` + `a`), and the leftmost of them goes first, which no
list of merges can say. Source: google/sentencepiece src/bpe_model.cc; llama.cpp src/llama-vocab.cpp, llm_tokenizer_spm.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from dasllama_torch.errors import TokenizerError

from .bpe import SPACE

_CACHED_WORDS = 1 << 14
_CACHED_LENGTH = 32  # characters; longer words hardly come twice


class SPM:
    """Text without special tokens -> ids.

    pieces: text -> id, of what text may become. scores: float32 [V], by id. byte_ids: the tokens of the 256 bytes, None
    where one is missing. unk_id: what stands in for a missing byte.
    """

    def __init__(
        self, pieces: Mapping[str, int], scores: np.ndarray, byte_ids: Sequence[int | None], unk_id: int | None
    ):
        self._pieces = pieces
        _, order = np.unique(-scores, return_inverse=True)  # equal scores share a rank; 0 is merged first
        self._ranks = memoryview(order.astype(np.int32))
        self._byte_ids = [unk_id if i is None else i for i in byte_ids]
        self._neighbours = _neighbours(pieces)
        self._word = lru_cache(_CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        ids: list[int] = []
        for word in self._words(text) if len(text) > _CACHED_LENGTH else [text]:
            ids += self._word(word) if len(word) <= _CACHED_LENGTH else self._merge(word)
        return ids

    def _words(self, text: str) -> list[str]:
        """Cut between characters that are neighbours in no piece: no merge can cross there, so the parts are merged on
        their own, and the short ones are mostly known words.
        """
        if not len(self._neighbours):
            return list(text)
        pairs = _pairs(text)
        at = np.searchsorted(self._neighbours, pairs).clip(max=len(self._neighbours) - 1)
        cuts = [0, *(np.flatnonzero(self._neighbours[at] != pairs) + 1).tolist(), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _merge(self, text: str) -> tuple[int, ...]:
        """The merges proper, O(n log n). A symbol is named by the index of its first character.

        The heap holds what two neighbours would become, as one number that sorts by rank, then left, then end: half the
        time of tuples.
        """
        id_of, ranks, n = self._pieces.get, self._ranks, len(text)
        # By symbol: one past its last character, or 0 once its left neighbour has taken it in.
        ends = [*range(1, n + 1), 0]
        lefts = list(range(-1, n))  # by symbol: its left neighbour
        by_left = n + 1
        by_rank = by_left * by_left
        heap = [
            ranks[i] * by_rank + at * by_left + at + 2
            for at in range(n - 1)
            if (i := id_of(text[at : at + 2])) is not None
        ]
        heapify(heap)
        while heap:
            left, end = divmod(heappop(heap) % by_rank, by_left)
            right = ends[left]
            if not right or ends[right] != end:
                continue  # one of the two has changed since
            ends[left], ends[right], lefts[end] = end, 0, left
            if end < n and (i := id_of(text[left : ends[end]])) is not None:
                heappush(heap, ranks[i] * by_rank + left * by_left + ends[end])
            before = lefts[left]
            if before >= 0 and (i := id_of(text[before:end])) is not None:
                heappush(heap, ranks[i] * by_rank + before * by_left + end)

        ids: list[int] = []
        at = 0
        while at < n:
            symbol = text[at : ends[at]]
            i = id_of(symbol)
            ids += self._bytes(symbol) if i is None else (i,)
            at = ends[at]
        return tuple(ids)

    def _bytes(self, char: str) -> list[int]:
        ids = [self._byte_ids[b] for b in char.encode()]
        if None in ids:
            raise TokenizerError(
                f"tokenizer.ggml.tokens has no piece for {char!r}, no byte tokens and no unknown token"
            )
        return ids


def _pairs(text: str) -> np.ndarray:
    """int64 [len(text) - 1]: each character and the next, in one number."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    return codes[:-1] << 32 | codes[1:]


def _neighbours(pieces: Mapping[str, int]) -> np.ndarray:
    """Sorted int64: the `_pairs` of all pieces. They are joined by a noncharacter; its pairs do no harm, they can only
    leave a text uncut.
    """
    return np.unique(_pairs("\uffff".join(pieces)))
