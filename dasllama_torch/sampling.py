"""How the next token is drawn: SamplingParams and pure functions on logits f32 [V].

Order of work: penalties, temperature, top-k, softmax, top-p, min-p, one draw from what is left, renormalized
(ops/sample_token.py). Among equal logits the lower id comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.errors import DasllamaError
from dasllama_torch.ops import sample_token as op


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The defaults are greedy: `SamplingParams()` takes the most likely token, the lowest id among equals.

    temp: divides the logits; 0 or less is greedy, after penalties. top_k: candidates kept; 0 keeps all.
    top_p: the smallest set of most likely candidates whose probabilities reach it; 1 keeps all.
    min_p: candidates at least this fraction as likely as the likeliest; 0 keeps all.
    repetition_penalty: logits of tokens seen are divided by it if positive, multiplied if negative (Keskar et al. 2019,
    arXiv:1909.05858); 1 is none. presence_penalty: subtracted once from tokens seen; frequency_penalty: once per
    occurrence.
    penalty_last_n: how many of the session's last tokens, prompt included, count as seen; 0: none, -1: all.
    seed: reseeds the session's generator at the start of `generate`; None goes on with its state.
    Raises ValueError for a value outside its range.
    """

    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None

    def __post_init__(self):
        checks = {
            "temp": (self.temp == self.temp and self.temp < float("inf"), "a finite number"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "presence_penalty": (abs(self.presence_penalty) < float("inf"), "a finite number"),
            "frequency_penalty": (abs(self.frequency_penalty) < float("inf"), "a finite number"),
            "penalty_last_n": (self.penalty_last_n >= -1, "-1 or more"),
        }
        for name, (ok, wanted) in checks.items():
            if not ok:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}, wanted {wanted}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def penalize(logits: Tensor, history: Sequence[int], params: SamplingParams) -> Tensor:
    """Logits f32 [V] after the penalties for the last tokens of `history`; the input is left as it is."""
    seen = _seen(history, params).to(logits.device)
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return op.penalized(logits, seen, *penalties) if len(seen) else logits


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token ids int64 [n] and their renormalized probabilities f64 [n], most likely first, after temperature, top-k,
    top-p and min-p, of logits f32 [V] after `penalize`: what `sample` draws from. For looking at: it sorts all of them.
    Greedy params leave the most likely token."""
    _check(logits)
    if params.temp <= 0:
        return logits.argmax().cpu()[None], torch.ones(1, dtype=torch.float64)
    return op.candidates(logits.cpu(), params.temp, params.top_k, params.top_p, params.min_p)


@torch.inference_mode()
def sample(logits: Tensor, history: Sequence[int], params: SamplingParams, generator: torch.Generator) -> int:
    """The next token's id. logits f32 [V]; history: the session's tokens; one uniform number is drawn unless greedy.

    Raises DasllamaError for logits that are no distribution: one is NaN or +infinity, or all are -infinity.
    """
    seen = _seen(history, params).to(logits.device)
    greedy = params.temp <= 0
    draw = 0.0 if greedy else torch.rand((), generator=generator, dtype=torch.float64).item()
    token = op.sample_token(
        logits,
        seen,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        max(params.temp, 0.0),
        params.top_k,
        params.top_p,
        params.min_p,
        draw,
    ).item()
    if token < 0:
        _check(penalize(logits, history, params))
        raise DasllamaError("sampling: the logits are no distribution")
    return token


def _seen(history: Sequence[int], params: SamplingParams) -> Tensor:
    """The ids int64 [n] that are penalized, with repetitions."""
    n = params.penalty_last_n if params.has_penalties else 0
    seen = history if n < 0 else history[max(0, len(history) - n) :]
    return torch.tensor(seen, dtype=torch.int64)


def _check(logits: Tensor) -> None:
    bad = (~(logits < torch.inf)).nonzero().flatten()
    if len(bad) or (logits == -torch.inf).all():
        found = f"{logits[bad[0]].item()} for token {bad[0].item()}" if len(bad) else "-inf for every token"
        raise DasllamaError(f"sampling: the logits hold {found}, wanted numbers below infinity, one of them finite")
