"""How a long text is cut into windows, and which of its tokens each window scores: the two conventions in use.

`llama.cpp` (its `perplexity` tool, whose figures are published with quantized files): windows of n_ctx tokens without
overlap, what remains at the end left out; the first token of each is replaced by BOS where the vocabulary puts one
before a text; only the second half is scored, so that every scored token has at least n_ctx / 2 before it.
`hf` (transformers' guide "Perplexity of fixed-length models"): windows of n_ctx tokens that begin every `stride`; each
scores what no window before it has scored, but not its own first token. So every token of the text but the first is
scored once, where stride is less than n_ctx.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONVENTIONS = ("llama.cpp", "hf")


@dataclass(frozen=True, slots=True)
class Window:
    """ids: what the model reads. first: index in ids of the first token that is scored; all behind it are too."""

    ids: list[int]
    first: int

    @property
    def n_scored(self) -> int:
        return len(self.ids) - self.first


def cut(ids: Sequence[int], convention: str, n_ctx: int, stride: int, bos: int | None) -> Iterator[Window]:
    """The windows of a text's token ids, which begin with BOS where a text has one.

    bos: what replaces the first token of a window of llama.cpp's; None: nothing does. stride: of `hf`'s, at most n_ctx.
    """
    if convention == "llama.cpp":
        for start in range(0, len(ids) - n_ctx + 1, n_ctx):
            window = list(ids[start : start + n_ctx])
            if bos is not None:
                window[0] = bos
            yield Window(window, n_ctx // 2 + 1)
        return
    scored = 0
    for start in range(0, len(ids), stride):
        end = min(start + n_ctx, len(ids))
        first = max(scored - start, 1)
        if first < end - start:
            yield Window(list(ids[start:end]), first)
        scored = end
        if end == len(ids):
            return
