"""Vectors of texts: the hidden states of a text's tokens, made one. C embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dasllama_torch.cache.pool import KVPool
from dasllama_torch.engine import runner
from dasllama_torch.engine.session import Session
from dasllama_torch.errors import ContextFull, UnsupportedModel
from dasllama_torch.modules.causal_lm import CausalLM

POOLINGS = {
    "mean": lambda rows: rows.mean(0, dtype=torch.float64),
    "cls": lambda rows: rows[0].double(),
    "last": lambda rows: rows[-1].double(),
}


def embed(model: CausalLM, pool: KVPool, texts: Sequence[Sequence[int]], pooling: str | None) -> Tensor:
    """Vectors f32 [n, C] of n texts, given as ids, see `api.embed`. What they hold in the pool goes back to it."""
    pooling = pooling or {"none": "mean"}.get(model.config.pooling, model.config.pooling)
    if pooling == "rank":
        raise UnsupportedModel(
            f"{model.config.arch}: the file's pooling is 'rank', a score of pairs of texts, no vector"
        )
    if pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}, wanted one of {', '.join(POOLINGS)}")
    for i, ids in enumerate(texts):
        if not ids:
            raise ValueError(f"text {i} has no tokens, and so no vector")
        if len(ids) > model.config.n_ctx:
            raise ContextFull(f"text {i} has {len(ids)} tokens, more than the model's context of {model.config.n_ctx}")
    pool_rows = POOLINGS[pooling]
    vectors = [pool_rows(torch.cat(rows)) for group in _groups(texts) for rows in _hidden(model, pool, group)]
    if not vectors:
        return torch.empty(0, model.config.n_embd)
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1).float()


def _groups(texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Texts that together fill a window of rows, so that the pool holds no more than these at a time."""
    groups, rows = [], runner.MAX_ROWS
    for ids in texts:
        if rows + len(ids) > runner.MAX_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(ids)
        rows += len(ids)
    return groups


def _hidden(model: CausalLM, pool: KVPool, texts: list[Sequence[int]]) -> list[list[Tensor]]:
    """Of each text its hidden states f32 [T, C] in parts."""
    # A context of the text's own length: LongRoPE goes by it, as transformers does without a cache.
    sessions = [Session(model, pool, len(ids)) for ids in texts]
    try:
        return runner.hidden(sessions, texts)
    finally:
        for session in sessions:
            session.close()
