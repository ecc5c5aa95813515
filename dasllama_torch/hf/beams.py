"""Beam search as in transformers, on sessions: a beam that several go on from is forked.

Source: `_beam_search` of transformers' generation/utils.py, whose order of work, scores and early ends are kept.
B prompts, N beams of each, K candidates of each, n_new tokens at most, V vocab. Row b * N + i is beam i of prompt b.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.hf.options import Options
from dasllama_torch.hf.steps import GenerateOutput, Prompts, Rules, Steps
from dasllama_torch.hf.warpers import warped

# Added to a score, this puts it behind all others. Not infinite, so that what is lost keeps its order.
LOST = -1e9


@dataclass(frozen=True)
class Beams:
    """k continuations of each prompt. tokens: int64 [B, k, n_new], filled up with padding. scores: f32 [B, k].
    origins: int32 [B, k, n_new], the row that each token was chosen in, -1 for padding. ended: bool [B, k]."""

    tokens: Tensor
    scores: Tensor
    origins: Tensor
    ended: Tensor

    def at(self, places: Tensor) -> "Beams":
        """Those at places [B, n], in that order."""
        values = [getattr(self, each.name) for each in fields(self)]
        return Beams(*(x.take_along_dim(places if x.dim() == 2 else places[..., None], 1) for x in values))

    def best(self, n: int) -> "Beams":
        """The n of each prompt that have the best scores, best first."""
        return self.at(self.scores.topk(n).indices)

    def and_also(self, other: "Beams") -> "Beams":
        return Beams(*(torch.cat([getattr(x, each.name) for x in (self, other)], 1) for each in fields(self)))


def beam_search(steps: Steps, prompts: Prompts, rules: Rules) -> Tensor | GenerateOutput:
    """The best num_return_sequences of each prompt, best first."""
    options, B = rules.options, len(prompts.ids)
    N = options.num_beams
    K = N * max(2, 1 + len(rules.ends))  # so that N go on even if every end is among the best of every beam
    finished = _none(B, N, rules)
    # A prompt's beams begin alike: only the first may go on, so that they become different.
    running = replace(finished, scores=torch.tensor([[0.0] + [LOST] * (N - 1)]).repeat(B, 1))
    hopeful = torch.ones(B, 1, dtype=torch.bool)  # whether running beams may still beat finished ones
    steps.begin(prompts, N)
    for n in range(rules.n_new):
        scores = _scores(steps, prompts, running.tokens[..., :n], rules, keep=K // N)
        candidates = _candidates(running, scores, n, K, options.do_sample)
        stops = rules.stops(_texts(prompts, candidates.tokens[..., : n + 1])).view(B, K) | (n + 1 == rules.n_new)
        running = replace(candidates, scores=candidates.scores + LOST * stops).best(N)
        finished = _with_ended(finished, candidates, stops, hopeful, n + 1, options)
        steps.cache.reorder_cache(running.origins[..., n].flatten())
        hopeful = hopeful & _may_improve(running, finished, n + 1, rules)
        enough = options.early_stopping is True and bool(finished.ended.all())
        if enough or stops.all() or not hopeful.any():
            break
        steps.advance(running.tokens[..., n].flatten(), torch.ones(B * N, dtype=torch.bool))
    best = finished.at(torch.arange(options.num_return_sequences).repeat(B, 1))
    length = int((best.origins >= 0).sum(-1).max())
    rules.check_padding(bool((best.origins[..., :length] < 0).any()))
    return steps.result(
        _texts(prompts, best.tokens[..., :length]),
        sequences_scores=best.scores.flatten() if steps.keeps("scores") else None,
        beam_indices=best.origins[..., :length].flatten(0, 1),
    )


def _none(B: int, N: int, rules: Rules) -> Beams:
    return Beams(
        tokens=torch.full((B, N, rules.n_new), -1 if rules.pad is None else rules.pad),
        scores=torch.full((B, N), LOST),
        origins=torch.full((B, N, rules.n_new), -1, dtype=torch.int32),
        ended=torch.zeros(B, N, dtype=torch.bool),
    )


def _texts(prompts: Prompts, tokens: Tensor) -> Tensor:
    """Prompts and tokens [B, k, n] behind them as rows [B * k, T0 + n]."""
    return torch.cat([prompts.ids.repeat_interleave(tokens.shape[1], 0), tokens.flatten(0, 1)], 1)


def _scores(steps: Steps, prompts: Prompts, tokens: Tensor, rules: Rules, keep: int) -> Tensor:
    """Log-probabilities f32 [B * N, V] of what may follow tokens [B, N, n], as penalties, processors and warpers leave
    them; they need not sum to 1."""
    params, N = rules.options.sampling(), tokens.shape[1]
    scores = torch.stack(steps.logits).log_softmax(-1)
    if params.has_penalties:
        seen = [prompts.history(row // N) + drawn for row, drawn in enumerate(tokens.flatten(0, 1).tolist())]
        scores = torch.stack([sampling.penalize(row, ids, params) for row, ids in zip(scores, seen, strict=True)])
    scores = warped(rules.processed(_texts(prompts, tokens), scores), params, keep)
    steps.keep_scores(scores, torch.ones(len(scores), dtype=torch.bool))
    return scores


def _candidates(running: Beams, scores: Tensor, n: int, K: int, do_sample: bool) -> Beams:
    """The K best of all beams of a prompt by one token more, token n, or K that are drawn; best first."""
    B, N = running.scores.shape
    V = scores.shape[-1]
    total = (scores.view(B, N, V) + running.scores[..., None].to(scores.device)).flatten(1)
    if do_sample:
        drawn = torch.multinomial(total.softmax(-1), K)
        values, order = total.gather(1, drawn).sort(descending=True)
        at = drawn.gather(1, order)
    else:
        values, at = total.topk(K)
    values, beam, token = values.cpu(), at.cpu() // V, at.cpu() % V
    found = replace(running.at(beam), scores=values, ended=torch.zeros(B, K, dtype=torch.bool))
    found.tokens[..., n] = token
    found.origins[..., n] = beam + torch.arange(B)[:, None] * N
    return found


def _with_ended(
    finished: Beams, candidates: Beams, stops: Tensor, hopeful: Tensor, length: int, options: Options
) -> Beams:
    """The best that have ended, with those of the N best candidates that stop here, at so many tokens."""
    N = finished.scores.shape[1]
    ended = stops & (torch.arange(stops.shape[1]) < N)
    full = finished.ended.all(-1, keepdim=True) & (options.early_stopping is True)
    scores = candidates.scores / length**options.length_penalty
    for lost in (full, ~hopeful, ~ended):
        scores = scores + LOST * lost
    return finished.and_also(replace(candidates, scores=scores, ended=ended)).best(N)


def _may_improve(running: Beams, finished: Beams, length: int, rules: Rules) -> Tensor:
    """bool [B, 1]: whether the best running beam may come to beat one that has ended, as transformers guesses it."""
    options = rules.options
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = rules.n_new
    most = running.scores[:, :1] / length**options.length_penalty
    worst = torch.where(finished.ended, finished.scores.amin(1, keepdim=True), LOST)
    return (most > worst).any(-1, keepdim=True)
