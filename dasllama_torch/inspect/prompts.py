"""What the functions of this package are given to evaluate: text or ids, by a model or at the end of a session."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dasllama_torch.cache.pool import KVPool
from dasllama_torch.engine.placement import layer_devices
from dasllama_torch.engine.session import Session
from dasllama_torch.memory import physical_memory
from dasllama_torch.modules.causal_lm import CausalLM

Target = CausalLM | Session
Prompt = str | Sequence[int] | Tensor


def model_of(target: Target) -> CausalLM:
    return target.model if isinstance(target, Session) else target


def ids_of(target: Target, prompt: Prompt) -> Tensor:
    """int64 [B, T] of text, of ids [T], or of a batch of them [B, T], without padding. Text has the tokens that begin
    every text, but where a session goes on. Raises ValueError for no tokens."""
    if isinstance(prompt, str):
        has_begun = isinstance(target, Session) and bool(target.n_past or target.pending)
        prompt = model_of(target).encode(prompt, add_special=not has_begun)
    elif not isinstance(prompt, Tensor) and any(isinstance(part, str) for part in prompt):
        raise ValueError("wanted one text, or ids [T] or [B, T], found several texts")
    device = model_of(target).get_input_embeddings().qweight.device
    ids = torch.as_tensor(prompt, dtype=torch.int64, device=device)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"wanted ids [T] or [B, T], at least one, found shape {list(ids.shape)}")
    return ids


def evaluate(target: Target, prompt: Prompt) -> Tensor:
    """Logits f32 [B, T, V]: of a model without a cache and without a gradient, or of a session at its end, which takes
    one sequence."""
    ids = ids_of(target, prompt)
    if isinstance(target, Session):
        if len(ids) != 1:
            raise ValueError(f"a session takes one sequence, found {len(ids)}")
        return target.eval(ids[0].tolist(), "all")[None]
    with torch.no_grad():
        return target(ids).logits


def settle(target: Target) -> None:
    """Evaluate what a session has pending, so that the rows that follow are those of the ids that it is given."""
    if isinstance(target, Session) and target.pending:
        target.eval([])


@contextlib.contextmanager
def session_of(target: Target, n_ctx: int) -> Iterator[Session]:
    """The session itself, or a new one of n_ctx tokens with an f32 cache of its own."""
    if isinstance(target, Session):
        yield target
        return
    pool = KVPool([layer.cache for layer in target.config.layers], "f32", physical_memory(), layer_devices(target))
    with Session(target, pool, n_ctx) as session:
        yield session
