"""How well a model predicts a text, and how far a quantized file is from its parent on it.

    result = evaluate(model, Path("wiki.test.raw"), other=parent)
    print(result)                  # perplexity of both, KL divergence, agreement, with confidence intervals
    result.perplexity, result.kl   # estimates: .mean, .low, .high

Source of the measures: llama.cpp's `perplexity --kl-divergence`.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dasllama_torch.errors import DasllamaError, UnsupportedModel
from dasllama_torch.inspect.compare import name_of, prompt_ids
from dasllama_torch.inspect.divergence import ROWS, divergence
from dasllama_torch.inspect.windows import CONVENTIONS, Window, cut
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.step import Step
from dasllama_torch.tables import Table

N_CTX = 512  # llama.cpp's default, which published figures have
CONFIDENCE = 1.96  # standard errors on either side of a mean: 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over a text's tokens and the 95 % confidence interval of what it estimates. The standard error is taken
    over windows, not tokens: tokens of one window depend on each other. With one window there is none, and low and high
    are NaN.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, windows: Sequence[Tensor]) -> "Estimate":
        """windows: f64 [n] each, a figure for each scored token.

        The mean is that of all tokens. As windows may differ in length, it is a ratio of sums, whose error follows from
        what each window's sum departs from its share (Cochran, Sampling Techniques, 6.4).
        """
        sums = torch.stack([window.sum() for window in windows])
        counts = torch.tensor([float(len(window)) for window in windows], dtype=torch.float64)
        mean = (sums.sum() / counts.sum()).item()
        n = len(windows)
        if n < 2:
            return cls(mean, math.nan, math.nan)
        error = math.sqrt(((sums - mean * counts) ** 2).sum().item() * n / (n - 1)) / counts.sum().item()
        return cls(mean, mean - CONFIDENCE * error, mean + CONFIDENCE * error)

    def exp(self) -> "Estimate":
        """Of what is estimated, the exponential."""
        return Estimate(*(math.exp(x) if x < 700 else math.inf for x in (self.mean, self.low, self.high)))

    def __str__(self) -> str:
        return f"{self.mean:.5g} ± {(self.high - self.low) / 2:.2g}" if math.isfinite(self.low) else f"{self.mean:.5g}"


@dataclass(frozen=True)
class Scores:
    """Of one window, f64 [n], n scored tokens. nll: -log p(token), in nats. The rest is empty without another model:
    other_nll: the other's; kl: KL(other || model) of the token's distribution; top1: 1 where both hold the same token
    for the likeliest.
    """

    nll: Tensor
    other_nll: Tensor
    kl: Tensor
    top1: Tensor


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. windows: the figures of every token, for plots. nll: mean -log p(token), in nats, and
    perplexity its exponential. The rest is None without another model: other_nll, other_perplexity; nll_difference:
    nll - other_nll, whose interval is much the narrower as the text is the same; kl: mean KL(other || model) in nats;
    top1: share of tokens for which both hold the same one for the likeliest.
    """

    names: tuple[str, ...]
    convention: str
    n_ctx: int
    stride: int
    n_scored: int
    windows: list[Scores]
    nll: Estimate
    other_nll: Estimate | None
    nll_difference: Estimate | None
    kl: Estimate | None
    top1: Estimate | None

    @property
    def perplexity(self) -> Estimate:
        return self.nll.exp()

    @property
    def other_perplexity(self) -> Estimate | None:
        return self.other_nll and self.other_nll.exp()

    @property
    def kl_of_tokens(self) -> Tensor:
        """KL(other || model) of every scored token, f64 [n]; empty without another model."""
        return torch.cat([window.kl for window in self.windows])

    def to_dict(self) -> dict:
        """All figures but those of single tokens, as plain data; an interval that does not exist is None."""
        figures = ("nll", "perplexity", "other_nll", "other_perplexity", "nll_difference", "kl", "top1")
        plain = {name: _plain(getattr(self, name)) for name in figures}
        shown = ("names", "convention", "n_ctx", "stride", "n_scored")
        facts = {name: getattr(self, name) for name in shown} | {"n_windows": len(self.windows)}
        if self.kl is not None:
            of_tokens = self.kl_of_tokens
            facts |= {f"kl_{q}": of_tokens.quantile(q / 100).item() for q in (50, 90, 99, 100)}
        return facts | plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def table(self) -> Table:
        rows = [(f"perplexity of {self.names[0]}", str(self.perplexity), *_ends(self.perplexity))]
        if self.kl is not None:
            figures = {
                f"perplexity of {self.names[1]}": self.other_perplexity,
                "difference of log-perplexities": self.nll_difference,
                "KL divergence, nats": self.kl,
                "same likeliest token": self.top1,
            }
            rows += [(what, str(value), *_ends(value)) for what, value in figures.items()]
        windows = f"{len(self.windows)} windows of at most {self.n_ctx} tokens ({self.convention})"
        notes = [f"{self.n_scored} tokens scored in {windows}; intervals: 95 %, from the standard error over windows"]
        if self.kl is not None:
            of_tokens = self.kl_of_tokens
            parts = (f"{q} % of tokens below {of_tokens.quantile(q / 100).item():.3g}" for q in (50, 90, 99))
            notes.append(f"KL divergence: {', '.join(parts)}, largest {of_tokens.max().item():.3g}")
        return Table(" against ".join(self.names), ("measure", "mean", "from", "to"), rows, notes=notes)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    text: str | os.PathLike | Sequence[int] | Tensor,
    other: nn.Module | None = None,
    *,
    n_ctx: int = N_CTX,
    convention: str = "llama.cpp",
    stride: int | None = None,
    max_windows: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Perplexity of a text, and with another model the KL divergence from it: of a quantized file from its parent.

    model, other: ours or transformers' (for text one of them ours, as it brings the tokenizer), of one vocabulary.
    text: the text itself, a path object of a UTF-8 file, or token ids. n_ctx: tokens of a window, at least 4.
    convention, stride: how the text is cut and which tokens count, see windows.py; stride is of "hf" only, by default
    n_ctx / 2. max_windows: only the first so many. progress: a bar on standard error.
    Windows go through the models without a cache, so no rounding of keys and values is in the figures.
    Raises UnsupportedModel where vocabularies differ, DasllamaError for a text that is too short to score or no UTF-8.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention is {convention!r}, wanted one of {', '.join(CONVENTIONS)}")
    if n_ctx < 4:
        raise ValueError(f"n_ctx is {n_ctx}, wanted 4 or more")
    if stride is not None and convention != "hf":
        raise ValueError("stride is of convention 'hf': windows of 'llama.cpp' do not overlap")
    if stride is None:
        stride = n_ctx // 2 if convention == "hf" else n_ctx
    if not 1 <= stride <= n_ctx:
        raise ValueError(f"stride is {stride}, wanted 1 to n_ctx, {n_ctx}: else tokens between windows are lost")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows is {max_windows}, wanted 1 or more, or None for all")
    content = _read(Path(text)) if isinstance(text, os.PathLike) else text
    ids = prompt_ids(model, model if other is None else other, content)
    windows = list(cut(ids, convention, n_ctx, stride, _bos(model, other)))[:max_windows]
    if not windows:
        wanted = f"{n_ctx} for one window of {n_ctx}" if convention == "llama.cpp" else "2"
        raise DasllamaError(f"the text has {len(ids)} tokens, wanted at least {wanted}")
    scores = [_score(model, other, window) for window in _shown(windows, progress)]
    apart = other is not None
    return Evaluation(
        names=tuple(name_of(m) for m in (model, other) if m is not None),
        convention=convention,
        n_ctx=n_ctx,
        stride=stride,
        n_scored=sum(window.n_scored for window in windows),
        windows=scores,
        nll=Estimate.of([s.nll for s in scores]),
        other_nll=Estimate.of([s.other_nll for s in scores]) if apart else None,
        nll_difference=Estimate.of([s.nll - s.other_nll for s in scores]) if apart else None,
        kl=Estimate.of([s.kl for s in scores]) if apart else None,
        top1=Estimate.of([s.top1 for s in scores]) if apart else None,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise DasllamaError(f"{path}: not UTF-8 text: byte {e.start} is {e.object[e.start]:#04x}") from e


def _bos(model: nn.Module, other: nn.Module | None) -> int | None:
    """What the vocabulary puts before a text."""
    tokenizers = [m.tokenizer for m in (model, other) if isinstance(m, CausalLM)]
    return next((t.bos_id for t in tokenizers if t is not None and t.add_bos), None)


@contextlib.contextmanager
def _bar(n: int, progress: bool) -> Iterator:
    if not progress:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=n)
        yield lambda: bars.advance(task)


def _shown(windows: list[Window], progress: bool) -> Iterator[Window]:
    with _bar(len(windows), progress) as advance:
        for window in windows:
            yield window
            advance()


def _score(model: nn.Module, other: nn.Module | None, window: Window) -> Scores:
    targets = torch.tensor(window.ids[window.first :]).split(ROWS)
    ours = _logits(model, window)
    if other is None:
        nll = torch.cat([_nll(rows, ids) for rows, ids in zip(ours, targets, strict=True)])
        return Scores(nll, *[torch.empty(0, dtype=torch.float64)] * 3)
    parts = []
    for found, reference, ids in zip(ours, _logits(other, window), targets, strict=True):
        if found.shape != reference.shape:
            raise UnsupportedModel(
                f"{name_of(model)} has {found.shape[-1]} tokens and {name_of(other)} {reference.shape[-1]}, wanted one "
                "vocabulary"
            )
        apart = divergence(found, reference, k=1)
        parts.append((_nll(found, ids), _nll(reference, ids), apart.kl, apart.top1))
    return Scores(*map(torch.cat, zip(*parts, strict=True)))


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of each row's token, f64 [n]. logits [n, V], ids [n]."""
    return -logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _logits(model: nn.Module, window: Window) -> Iterator[Tensor]:
    """Logits of the rows before the scored tokens, at most `ROWS` of them at a time: all would take
    n_ctx * V * 4 bytes, half a gigabyte for 262,144 tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([window.ids], device=device)
    rows = slice(window.first - 1, len(window.ids) - 1)
    if isinstance(model, CausalLM):
        step = Step.padded(1, len(window.ids), None, None, device)
        step.input_ids = ids
        hidden = model.model(model.get_input_embeddings()(ids), step)[0, rows]
        yield from (model.compute_logits(part).cpu() for part in hidden.split(ROWS))
    else:
        yield from model(input_ids=ids, use_cache=False).logits[0, rows].cpu().split(ROWS)


def _plain(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {key: value if math.isfinite(value) else None for key, value in asdict(estimate).items()}


def _ends(estimate: Estimate) -> tuple[str, str]:
    return ("", "") if math.isnan(estimate.low) else (f"{estimate.low:.5g}", f"{estimate.high:.5g}")
