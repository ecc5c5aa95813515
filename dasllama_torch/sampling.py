"""How the next token is drawn: SamplingParams and pure functions on logits f32 [V].

Order of work: penalties, temperature, top-k, softmax, top-p, min-p, one draw from what is left, renormalized.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    n = params.penalty_last_n
    seen = history if n < 0 else history[max(0, len(history) - n) :]
    if not params.has_penalties or not seen:
        return logits
    ids, counts = torch.tensor(seen, device=logits.device).unique(return_counts=True)
    values = logits[ids]
    values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = values - params.presence_penalty - params.frequency_penalty * counts
    return logits.index_put((ids,), values)


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token ids and their renormalized probabilities, most likely first, after temperature, top-k, top-p and min-p."""
    scaled = logits.float() / params.temp
    n = len(scaled)
    if params.top_k and params.top_k < n:
        values, ids = scaled.topk(params.top_k)
        probs = values.softmax(0)
    else:
        probs, ids = _head_of(scaled.softmax(0), params)
    kept = len(probs)
    if params.top_p < 1.0:
        # A candidate stays if those before it do not reach top_p yet; the first always stays.
        before = probs.cumsum(0) - probs
        kept = max(1, int((before < params.top_p).sum()))
    if params.min_p > 0.0:
        kept = min(kept, max(1, int((probs >= params.min_p * probs[0]).sum())))
    probs, ids = probs[:kept], ids[:kept]
    return ids, probs / probs.sum()


def _head_of(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order and their ids, as many as top-p or min-p can keep: seldom a sort of all V."""
    n, k = len(probs), 256
    while k < n and (params.top_p < 1.0 or params.min_p > 0.0):
        head, ids = probs.topk(k)
        enough_mass = params.top_p < 1.0 and head.sum() >= params.top_p
        if enough_mass or head[-1] < params.min_p * head[0]:
            return head, ids
        k *= 8
    return probs.sort(descending=True)


def sample(logits: Tensor, history: Sequence[int], params: SamplingParams, generator: torch.Generator) -> int:
    """The next token's id. logits f32 [V]; history: the session's tokens; one uniform number is drawn unless greedy."""
    logits = penalize(logits, history, params)
    if params.temp <= 0:
        # One thread of NumPy is faster than all of torch's, which have to wake.
        return int(logits.numpy().argmax() if logits.device.type == "cpu" else logits.argmax())
    ids, probs = candidates(logits, params)
    draw = torch.rand((), generator=generator, dtype=torch.float64)
    index = int(torch.searchsorted(probs.double().cumsum(0).cpu(), draw, right=True))
    return int(ids[min(index, len(ids) - 1)])
