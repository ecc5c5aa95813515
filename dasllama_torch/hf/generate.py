"""`model.generate` as in transformers: greedy, sampling and beams, on sessions that go through the model as one ragged
batch.

Padding takes no part: a padded row gets what it would have got alone. A row that has ended is not evaluated any more.
B rows of the batch, T positions of the prompts, C embedding, V vocab.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dasllama_torch.engine.session import Session
from dasllama_torch.hf.beams import beam_search
from dasllama_torch.hf.cache import ROOM, SessionCache
from dasllama_torch.hf.options import Options
from dasllama_torch.hf.sample import sample
from dasllama_torch.hf.steps import GenerateOutput, Prompts, Rules, Steps
from dasllama_torch.modules.causal_lm import CausalLM


def generate(
    model: CausalLM,
    open_session: Callable[..., Session],
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    logits_processor: Iterable[Callable[[Tensor, Tensor], Tensor]] = (),
    stopping_criteria: Iterable[Callable[[Tensor, None], Any]] = (),
    kv_dtype: str | tuple[str, str] | None = None,
    **settings,
) -> Tensor | GenerateOutput:
    """See `CausalLM.generate`. open_session: of n_ctx and kv_dtype."""
    options = Options.of(model.generation_config, generation_config, settings)
    beams = options.num_beams > 1
    if beams and streamer is not None:
        raise ValueError("generate: a streamer gets tokens as they come, and beams change theirs: wanted num_beams=1")
    ends, pad = options.ends(model), options.pad(model)
    prompts = _prompts(inputs, input_ids, inputs_embeds, attention_mask, pad, ends)
    n_new = options.n_new(prompts.real.shape[1], model.config.n_ctx)
    n_ctx = int(prompts.real.sum(1).max()) + n_new
    if options.return_dict_in_generate:  # the caller may go on
        n_ctx = max(n_ctx, min(model.config.n_ctx, ROOM))
    rules = Rules(options, n_new, ends, pad, list(logits_processor), list(stopping_criteria))
    with contextlib.ExitStack() as stack:
        cache = SessionCache([open_session(n_ctx=n_ctx, kv_dtype=kv_dtype) for _ in prompts.real])
        stack.callback(cache.close)
        steps = Steps(model, cache, options, prompts.given.device)
        found = beam_search(steps, prompts, rules) if beams else sample(steps, prompts, rules, streamer)
        if options.return_dict_in_generate:
            stack.pop_all()  # the cache is handed out
    return found


def _prompts(
    inputs: Tensor | None,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    pad: int | None,
    ends: list[int],
) -> Prompts:
    if inputs is not None and input_ids is not None:
        raise ValueError("generate: inputs and input_ids are one argument, wanted only one of them")
    ids = inputs if input_ids is None else input_ids
    if ids is not None:
        if ids.dim() != 2 or not ids.shape[0] or not ids.shape[1] or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"generate: inputs are {ids.dtype} {list(ids.shape)}, wanted ids int64 [B, T]")
        given, ids = ids, ids.to("cpu", torch.int64)
    if inputs_embeds is None:
        if ids is None:
            raise ValueError("generate: wanted inputs, which may be called input_ids, or inputs_embeds")
        return Prompts(ids, given, _real(ids, attention_mask, pad, ends))
    if inputs_embeds.dim() != 3 or not all(inputs_embeds.shape) or not inputs_embeds.is_floating_point():
        found = f"{inputs_embeds.dtype} {list(inputs_embeds.shape)}"
        raise ValueError(f"generate: inputs_embeds are {found}, wanted embeddings f32 [B, T, C]")
    B, T, _ = inputs_embeds.shape
    if ids is None:
        ids = torch.empty(B, 0, dtype=torch.int64)
    elif ids.shape != (B, T):
        raise ValueError(f"generate: inputs are {list(ids.shape)} beside inputs_embeds, wanted {[B, T]}")
    real = torch.ones(B, T, dtype=torch.bool) if attention_mask is None else _masked(attention_mask, B, T)
    return Prompts(ids, inputs_embeds, real)


def _real(ids: Tensor, attention_mask: Tensor | None, pad: int | None, ends: list[int]) -> Tensor:
    """bool [B, T]: which positions are tokens. Without a mask, as in transformers, what is `pad` is padding, unless
    that also ends a generation."""
    if attention_mask is not None:
        return _masked(attention_mask, *ids.shape)
    real = torch.ones_like(ids, dtype=torch.bool) if pad is None or pad in ends else ids != pad
    return real if real.any(1).all() else torch.ones_like(real)


def _masked(attention_mask: Tensor, B: int, T: int) -> Tensor:
    real = torch.as_tensor(attention_mask).bool().cpu()
    if real.shape != (B, T):
        raise ValueError(f"generate: attention_mask has shape {list(real.shape)}, wanted {[B, T]}")
    if not real.any(1).all():
        raise ValueError("generate: attention_mask leaves a row without any token, wanted one at least")
    return real
