"""Greedy search and sampling as in transformers: one token after another, of rows that end at different times."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.hf.steps import GenerateOutput, Prompts, Rules, Steps
from dasllama_torch.hf.warpers import warped


def sample(steps: Steps, prompts: Prompts, rules: Rules, streamer: Any = None) -> Tensor | GenerateOutput:
    """streamer: gets the prompts, the tokens of each step, and is told the end."""
    params, copies = rules.options.sampling(), rules.options.num_return_sequences
    # Between the penalties and the rest, where transformers has its callers' processors.
    later = replace(params, repetition_penalty=1.0)
    sequences = prompts.ids.repeat_interleave(copies, 0)
    R, T = sequences.shape
    # From torch's own generator, so that `torch.manual_seed` repeats a run.
    seeds = torch.randint(2**62, (R,)).tolist() if params.temp > 0 else [0] * R
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    histories = [prompts.history(row // copies) for row in range(R)]
    going = torch.ones(R, dtype=torch.bool)
    if streamer is not None:
        streamer.put(prompts.ids)
    steps.begin(prompts, copies)
    for left in reversed(range(rules.n_new)):
        logits, drawn = steps.logits, params
        if rules.processors or steps.keeps("scores"):
            pairs = zip(logits, histories, strict=True)
            scores = torch.stack([sampling.penalize(row, history, params) for row, history in pairs])
            scores = rules.processed(sequences, scores)
            steps.keep_scores(warped(scores, params), going)
            logits, drawn = scores.unbind(), later
        tokens = torch.tensor(
            [
                sampling.sample(logits[row], histories[row], drawn, generators[row]) if going[row] else rules.pad
                for row in range(R)
            ]
        )
        sequences = torch.cat([sequences, tokens[:, None]], 1)
        for history, token in zip(histories, tokens.tolist(), strict=True):
            history.append(token)
        if streamer is not None:
            streamer.put(tokens)
        going &= ~rules.stops(sequences)
        rules.check_padding(bool(going.any()) and not going.all())
        if not left or not going.any():
            break
        steps.advance(tokens, going)
    if streamer is not None:
        streamer.end()
    return steps.result(sequences)
