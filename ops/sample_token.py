"""How the next token is drawn from logits f32 [V]: penalties, temperature, top-k, softmax, top-p, min-p, one draw from
what is left, renormalized.

Penalties: logits of tokens seen are divided by the repetition penalty if positive, multiplied if negative (Keskar et
al. 2019, arXiv:1909.05858); the presence penalty is subtracted once, the frequency penalty once per occurrence. top-k:
the k largest logits. top-p: the fewest of the most likely candidates whose probabilities reach it (Holtzman et al.
2020, arXiv:1904.09751). min-p: those at least that fraction as likely as the likeliest (Nguyen et al. 2024,
arXiv:2407.01082). Among equals the lower id comes first. The draw, from [0, 1), falls into the running sum of the
probabilities that are left, in the order of their ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, refuse_gradient
from dasllama_torch.ops.require import require


def penalized(logits: Tensor, seen: Tensor, repetition: float, presence: float, frequency: float) -> Tensor:
    """A copy of logits f32 [V] after the penalties for the tokens seen, int64 [n], with repetitions."""
    ids, counts = seen.unique(return_counts=True)
    values = logits[ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    return logits.index_put((ids,), values - presence - frequency * counts)


def candidates(logits: Tensor, temp: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """Ids int64 [n] of the tokens that are left and their renormalized probabilities f64 [n], most likely first.

    logits f32 [V] below infinity, on the CPU; temp > 0; top_k 0 keeps all. By a sort of all, in f64.
    """
    values, ids = logits.double().sort(descending=True, stable=True)
    kept = min(top_k or len(values), len(values))
    probs = ((values[:kept] - values[0]) / temp).softmax(0)
    if top_p < 1.0:
        # A candidate stays if those before it do not reach top_p yet; the first always stays.
        kept = max(1, int((probs.cumsum(0) - probs < top_p).sum()))
    kept = min(kept, int((probs >= min_p * probs[0]).sum()))
    probs = probs[:kept]
    return ids[:kept], probs / probs.sum()


def _check(logits: Tensor, seen: Tensor, temp: float, top_k: int, top_p: float, min_p: float, *draws: float) -> None:
    require(
        logits.dtype == torch.float32 and logits.dim() == 1 and len(logits) >= 1,
        lambda: (
            f"dasllama::sample_token: logits must be f32 [V] with V >= 1, found {logits.dtype} {list(logits.shape)}"
        ),
    )
    require(
        seen.dtype == torch.int64 and seen.dim() == 1 and seen.device == logits.device,
        lambda: (
            f"dasllama::sample_token: seen must be int64 [n] on {logits.device}, found {seen.dtype} "
            f"{list(seen.shape)} on {seen.device}"
        ),
    )
    require(
        temp >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1 and all(0 <= draw < 1 for draw in draws),
        lambda: (
            "dasllama::sample_token: wanted temp >= 0, top_k >= 0, top_p in (0, 1], min_p in [0, 1] and draw in "
            f"[0, 1), found {temp}, {top_k}, {top_p}, {min_p} and {', '.join(map(str, draws))}"
        ),
    )


def _fake(logits, seen, repetition, presence, frequency, temp, top_k, top_p, min_p, draw):
    _check(logits, seen, temp, top_k, top_p, min_p, draw)
    return seen.new_empty(())


@define(fake=_fake)
def sample_token(
    logits: Tensor,
    seen: Tensor,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draw: float,
) -> Tensor:
    """The id int64 [] that `draw` falls on, of logits f32 [V]; -1 if one of them, penalized, is NaN or +infinity, or
    none above -infinity.

    seen: int64 [n], ids whose logits are penalized, with repetitions. temp: 0 takes the largest logit, the first of
    equals. top_k: 0 keeps all. top_p in (0, 1], min_p in [0, 1], draw in [0, 1).
    """
    _check(logits, seen, temp, top_k, top_p, min_p, draw)
    for bad in seen[(seen < 0) | (seen >= len(logits))].tolist():
        raise RuntimeError(f"dasllama::sample_token: id {bad} of seen is not one of {len(logits)} logits")
    logits = penalized(logits, seen, repetition_penalty, presence_penalty, frequency_penalty).cpu()
    if not (logits < torch.inf).all() or logits.max() == -torch.inf:
        return seen.new_tensor(-1)
    if temp == 0:
        return seen.new_tensor(int(logits.argmax()))
    ids, probs = candidates(logits, temp, top_k, top_p, min_p)
    ids, order = ids.sort()
    index = int((probs[order].cumsum(0) <= draw).sum())
    return seen.new_tensor(int(ids[min(index, len(ids) - 1)]))


refuse_gradient(sample_token, "a draw is a step function of its logits")


def _check_rows(
    logits: Tensor, seen: Tensor, temp: float, top_k: int, top_p: float, min_p: float, draws: Sequence[float]
) -> None:
    n = len(draws)
    require(
        logits.dim() == 2 and len(logits) == n >= 1 and seen.dim() == 2 and len(seen) == n,
        lambda: (
            f"dasllama::sample_tokens: wanted logits [n, V], seen [n, s] and n draws, found {list(logits.shape)}, "
            f"{list(seen.shape)} and {n}"
        ),
    )
    _check(logits[0], seen[0], temp, top_k, top_p, min_p, *draws)


def _fake_rows(logits, seen, repetition, presence, frequency, temp, top_k, top_p, min_p, draws):
    _check_rows(logits, seen, temp, top_k, top_p, min_p, draws)
    return seen.new_empty(len(draws))


@define(fake=_fake_rows)
def sample_tokens(
    logits: Tensor,
    seen: Tensor,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draws: Sequence[float],
) -> Tensor:
    """`sample_token` of each row of logits f32 [n, V], which differ in what was seen, int64 [n, s], filled up with -1,
    and in the draws -> ids int64 [n]."""
    _check_rows(logits, seen, temp, top_k, top_p, min_p, draws)
    rest = repetition_penalty, presence_penalty, frequency_penalty, temp, top_k, top_p, min_p
    rows = zip(logits, seen, draws, strict=True)
    return torch.stack([sample_token.reference(row, ids[ids != -1], *rest, draw) for row, ids, draw in rows])


refuse_gradient(sample_tokens, "a draw is a step function of its logits")
