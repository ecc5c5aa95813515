"""The logit lens (nostalgebraist 2020): what the head would say of the residual stream between the layers.

n layers looked at, B batch, T rows, C embedding, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.inspect.activations import run_with_cache
from dasllama_torch.inspect.prompts import Prompt, Target, model_of


@dataclass(frozen=True)
class LogitLens:
    """layers: which, n of them; layer i is the residual stream before decoder layer i, so 0 is the embeddings and the
    number of layers what the model says. ids int64, logits and log_probs f32 [n, B, T, k]: the k likeliest tokens of
    each, best first. Where all were asked for k is V and ids are 0 ... V-1 in order."""

    layers: tuple[int, ...]
    ids: Tensor
    logits: Tensor
    log_probs: Tensor


def logit_lens(
    target: Target, prompt: Prompt, layers: Sequence[int] | None = None, top_k: int | None = 10
) -> LogitLens:
    """Evaluate a prompt, and put the residual stream before each layer through the final norm and the head, with the
    bound of the logits where a model has one. The last is what the model itself says.

    target, prompt: as of `run_with_cache`. layers: see `LogitLens`; None: all. top_k: of each row; None keeps the whole
    vocabulary, n * B * T * V floats, twice. Raises ValueError for a layer that the model has not.
    """
    model = model_of(target)
    count, vocab = len(model.config.layers), model.config.n_vocab
    layers = tuple(range(count + 1) if layers is None else layers)
    for layer in layers:
        if not 0 <= layer <= count:
            raise ValueError(f"layer is {layer}, wanted 0 (the embeddings) to {count} (behind the last)")
    k = vocab if top_k is None else min(top_k, vocab)
    names = {layer: _name(layer) for layer in layers}
    _, cache = run_with_cache(target, prompt, names.values())
    with torch.no_grad():
        found = [_read(model, cache[names[layer]], k, in_order=top_k is None) for layer in layers]
    return LogitLens(layers, *map(torch.stack, zip(*found, strict=True)))


def _name(layer: int) -> str:
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "hook_embed"


def _read(model, stream: Tensor, k: int, in_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """ids, logits and log-probabilities [B, T, k] of the residual stream [B, T, C]."""
    logits = model.compute_logits(model.get_decoder().norm(stream)).float()
    total = logits.logsumexp(-1, keepdim=True)
    if in_order:
        ids = torch.arange(k, device=logits.device).expand(logits.shape)
    else:
        logits, ids = logits.topk(k, -1)
    return ids, logits, logits - total
