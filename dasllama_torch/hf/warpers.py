"""What transformers puts between logits and a draw, on all rows at once: for scores that are handed out, and for beams,
which keep more than one token. A single draw goes by `sampling.py`, which has the same distribution.

Source: transformers' generation/logits_process.py. R rows, V vocab.
"""

import torch
from torch import Tensor

from dasllama_torch.sampling import SamplingParams


def warped(scores: Tensor, params: SamplingParams, keep: int = 1) -> Tensor:
    """Scores f32 [R, V] by temperature, and -infinity where top-k, top-p and min-p leave a token out; `keep` tokens
    stay whatever these say. Greedy params change nothing."""
    if params.temp <= 0:
        return scores
    scores = scores / params.temp
    if params.top_k:
        least = scores.topk(min(max(params.top_k, keep), scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1:
        ordered, places = scores.sort()
        out = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        scores = _without(scores, out, places, keep)
    if params.min_p:
        chances, places = scores.softmax(-1).sort()
        scores = _without(scores, chances < params.min_p * chances[:, -1:], places, keep)
    return scores


def _without(scores: Tensor, out: Tensor, places: Tensor, keep: int) -> Tensor:
    """out: bool [R, V], which of the tokens at these places, the best last, shall go."""
    out[:, -keep:] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(-1, places, out), -torch.inf)
