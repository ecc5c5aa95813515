"""Gradients with respect to embeddings, through packed weights: each matrix is dequantized a few rows at a time, and
never as a whole. B batch, T rows, C embedding, V vocab."""

from collections.abc import Callable

import torch
from torch import Tensor

from dasllama_torch.inspect.prompts import Prompt, ids_of
from dasllama_torch.inspect.sites import Names
from dasllama_torch.inspect.watching import watching
from dasllama_torch.modules.causal_lm import CausalLM

Score = int | Callable[[Tensor], Tensor]
SALIENCIES = ("norm", "input")


def embedding_gradients(model: CausalLM, prompt: Prompt, score: Score) -> Tensor:
    """d score / d embeddings f32 [B, T, C], with respect to what enters the decoder.

    score: a token's id, for its logit at the end, or a function of the logits f32 [B, T, V] that gives a number. The
    roundings of native mode pass gradients straight through.
    """
    return _gradients(model, prompt, score)[1]


def saliency(model: CausalLM, prompt: Prompt, score: Score, how: str = "norm") -> Tensor:
    """How much each token matters to a score, f32 [B, T], by the gradient at its embedding. how: "norm", the gradient's
    length (Simonyan et al. 2013, arXiv:1312.6034), or "input", its product with the embedding, which has a sign.
    score: as of `embedding_gradients`."""
    if how not in SALIENCIES:
        raise ValueError(f"how is {how!r}, wanted one of {', '.join(SALIENCIES)}")
    embeddings, gradients = _gradients(model, prompt, score)
    return gradients.norm(dim=-1) if how == "norm" else (gradients * embeddings).sum(-1)


def _gradients(model: CausalLM, prompt: Prompt, score: Score) -> tuple[Tensor, Tensor]:
    known, ids, leaves = Names(model), ids_of(model, prompt), []
    if not callable(score) and not 0 <= score < model.config.n_vocab:
        raise ValueError(f"token id {score} is outside the vocabulary of {model.config.n_vocab}")

    def begin(embeddings: Tensor, forward) -> Tensor:
        leaves.append(embeddings.detach().requires_grad_())
        return leaves[0]

    with torch.inference_mode(False), torch.enable_grad():
        with watching(model, {known.sites["hook_embed"]: begin}):
            if callable(score):
                value = score(model(ids).logits)
            else:
                value = model(ids, logits_to_keep=1).logits[:, -1, score].sum()
        return leaves[0].detach(), torch.autograd.grad(value, leaves[0])[0]
