"""How the next token is drawn: SamplingParams and pure functions on logits f32 [V].

Order of work: logit bias and mask, penalties, temperature, top-k, softmax, top-p, min-p, one draw from what is left,
renormalized (ops/sample_token.py). Bias and mask come first, as in vLLM: top-k, top-p and min-p then choose among the
tokens that may come at all, and never leave none of them. Among equal logits the lower id comes first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dasllama_torch.errors import ConstraintError, DasllamaError
from dasllama_torch.ops import sample_token as op

if TYPE_CHECKING:
    from dasllama_torch.constraints import Constraint


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
    logit_bias: {token id: what is added to its logit before all else}; -infinity bans the token. Kept as sorted pairs.
    seed: reseeds the session's generator at the start of `generate`; None goes on with its state.

    Of `generate` alone, which says what they do: stop, strings that end the text; stop_ids, tokens that end it;
    constraint, the language that the text must belong to; logprobs, how many of the most likely tokens to note with
    their log-probabilities beside each token's own, None: nothing.
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
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_ids: Iterable[int] = ()
    constraint: "Constraint | None" = None
    logprobs: int | None = None
    # logit_bias as tensors, made once: ids int64 [n], values f32 [n]
    _bias: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        bias = sorted((index(token), float(value)) for token, value in dict(self.logit_bias).items())
        normal = {
            "logit_bias": tuple(bias),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "stop_ids": tuple(sorted(set(map(index, self.stop_ids)))),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        checks = {
            "temp": (self.temp == self.temp and self.temp < float("inf"), "a finite number"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "presence_penalty": (abs(self.presence_penalty) < float("inf"), "a finite number"),
            "frequency_penalty": (abs(self.frequency_penalty) < float("inf"), "a finite number"),
            "penalty_last_n": (self.penalty_last_n >= -1, "-1 or more"),
            "logit_bias": (
                all(i >= 0 and value < torch.inf for i, value in bias),
                "token ids and values below infinity",
            ),
            "stop": (all(isinstance(text, str) and text for text in self.stop), "strings that are not empty"),
            "stop_ids": (all(token >= 0 for token in self.stop_ids), "token ids"),
            "constraint": (self.constraint is None or hasattr(self.constraint, "matcher"), "a Constraint"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "a number of 64 bits, or None"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more, or None"),
        }
        for name, (ok, wanted) in checks.items():
            if not ok:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}, wanted {wanted}")
        if bias:
            ids, values = zip(*bias, strict=True)
            tensors = torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
            object.__setattr__(self, "_bias", tensors)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def reads_logits(self) -> bool:
        """Whether `generate` has to see the logits of every token on the host, wherever they were made."""
        return self.constraint is not None or self.logprobs is not None

    def check_ids(self, n_vocab: int) -> None:
        """Raise ValueError where logit_bias or stop_ids name a token that a vocabulary of n_vocab tokens lacks."""
        largest = {"logit_bias": [token for token, _ in self.logit_bias[-1:]], "stop_ids": self.stop_ids[-1:]}
        for name, ids in largest.items():
            for token in ids:
                if token >= n_vocab:
                    raise ValueError(f"sampling: {name} has token id {token}, outside the vocabulary of {n_vocab}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """token: the one that came. logprob: natural logarithm of its probability. top: the most likely tokens and theirs,
    most likely first, the lower id first among equals; the one that came is among them if it is one of them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def restrict(logits: Tensor, params: SamplingParams, allowed: Tensor | None = None) -> Tensor:
    """Logits f32 [V], or rows of them, with params.logit_bias added, and -infinity where `allowed`, bool [V], says no;
    None allows all. The input is left as it is."""
    if params._bias:
        params.check_ids(logits.shape[-1])
        ids, values = (part.to(logits.device, non_blocking=True) for part in params._bias)
        logits = logits.index_add(-1, ids, values.expand(*logits.shape[:-1], -1))
    if allowed is not None:
        logits = torch.where(allowed.to(logits.device), logits, -torch.inf)
    return logits


def penalize(logits: Tensor, history: Sequence[int], params: SamplingParams) -> Tensor:
    """Logits f32 [V] after the penalties for the last tokens of `history`; the input is left as it is."""
    seen = _seen(history, params).to(logits.device)
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return op.penalized(logits, seen, *penalties) if len(seen) else logits


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Token ids int64 [n] and their renormalized probabilities f64 [n], most likely first, after temperature, top-k,
    top-p and min-p, of logits f32 [V] after `restrict` and `penalize`: what `sample` draws from. For looking at: it
    sorts all of them. Greedy params leave the most likely token."""
    _check(logits)
    if params.temp <= 0:
        return logits.argmax().cpu()[None], torch.ones(1, dtype=torch.float64)
    return op.candidates(logits.cpu(), params.temp, params.top_k, params.top_p, params.min_p)


@torch.inference_mode()
def sample(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    generator: torch.Generator,
    allowed: Tensor | None = None,
) -> int:
    """The next token's id. logits f32 [V], on any device, which does the work; history: the session's tokens; allowed:
    bool [V], the tokens that may come, None: all; one uniform number of the generator is used unless greedy.

    Raises DasllamaError for logits that are no distribution: one is NaN or +infinity, or all are -infinity;
    ConstraintError if all that are allowed are -infinity.
    """
    token = draw(logits, history, params, generator, allowed).item()
    return checked(token, logits, history, params, allowed)


@torch.inference_mode()
def draw(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    generator: torch.Generator,
    allowed: Tensor | None = None,
) -> Tensor:
    """`sample`, as an id int64 [] where the logits are, which waits for nothing; -1 for what that would raise."""
    logits = restrict(logits, params, allowed)
    seen = _seen(history, params).to(logits.device, non_blocking=True)
    return op.sample_token(logits, seen, *_settings(params), 0.0 if params.temp <= 0 else _number(generator))


def _settings(params: SamplingParams) -> tuple[float, float, float, float, int, float, float]:
    """What the op takes of them, in its order."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return *penalties, max(params.temp, 0.0), params.top_k, params.top_p, params.min_p


def _number(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator, dtype=torch.float64).item()


@torch.inference_mode()
def draw_together(
    logits: Sequence[Tensor],
    histories: Sequence[Sequence[int]],
    params: SamplingParams,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """`draw` for each of several logits f32 [V] of one device, by one op -> ids int64 [n] there."""
    rows = restrict(torch.stack(list(logits)), params)
    seen = pad_sequence([_seen(history, params) for history in histories], batch_first=True, padding_value=-1)
    return op.sample_tokens(
        rows,
        seen.to(rows.device, non_blocking=True),
        *_settings(params),
        [0.0 if params.temp <= 0 else _number(generator) for generator in generators],
    )


def checked(
    token: int, logits: Tensor, history: Sequence[int], params: SamplingParams, allowed: Tensor | None = None
) -> int:
    """A token that `draw` has drawn from the others; raises for -1 as `sample` does."""
    if token < 0:
        logits = logits.cpu()
        _check(logits)
        if allowed is not None:
            raise ConstraintError(
                f"no token is left to sample: {int(allowed.sum())} of {len(allowed)} are allowed, and logit_bias or "
                f"the model puts all of them at -infinity"
            )
        _check(penalize(restrict(logits, params), history, params))
        raise DasllamaError("sampling: the logits are no distribution")
    return token


def token_logprob(logits: Tensor, token: int, n: int = 0) -> TokenLogprob:
    """What logits f32 [V] say about a token and the n most likely ones: log_softmax, in f64, of the logits as the model
    gives them, before bias, mask, penalties and temperature, as in OpenAI's API and vLLM."""
    total = logits.double().logsumexp(0)
    n = min(n, len(logits))
    top: tuple[tuple[int, float], ...] = ()
    if n:
        least = logits.topk(n).values[-1]
        ids = (logits >= least).nonzero().flatten()  # n, and more where some are equal to the last
        values, order = logits[ids].sort(descending=True, stable=True)
        top = tuple(zip(ids[order[:n]].tolist(), (values[:n].double() - total).tolist(), strict=True))
    return TokenLogprob(token, (logits[token].double() - total).item(), top)


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
