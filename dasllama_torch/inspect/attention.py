"""Attention patterns, computed again from queries and the cache: the kernels keep none.

B batch, T rows, H query heads, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dasllama_torch.engine.embeddings import EMBEDDING
from dasllama_torch.engine.session import Session
from dasllama_torch.errors import DasllamaError
from dasllama_torch.inspect.activations import run_with_cache
from dasllama_torch.inspect.prompts import Prompt, Target, model_of
from dasllama_torch.inspect.sites import mixer_of


@dataclass(frozen=True)
class AttentionPattern:
    """Of one layer. heads: which, H of them. weights f32 [B, H, T, S]: what row t takes from the key at position s of
    its sequence, 0 for what it does not see. sink f32 [B, H, T]: what goes to the head's sink instead, None where a
    layer has no sinks. Those of a row sum to 1."""

    layer: int
    heads: tuple[int, ...]
    weights: Tensor
    sink: Tensor | None


def attention_pattern(
    target: Target, prompt: Prompt = (), layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> dict[int, AttentionPattern]:
    """Evaluate a prompt, and give the attention of its rows by layer.

    A cache holds keys but no queries, so those are taken from the prompt's forward; the keys are the session's own, of
    all that it holds, as its codec keeps them. Windows, bounds of the scores and sinks are the layer's; a query that
    meets codes is rounded as the kernel does.
    target: a session, at whose end the prompt is evaluated, or a model, which evaluates it without a cache. Without a
    prompt a session's last token is evaluated once more, in a fork that goes back by one: CannotRewind where that is
    not possible. layers, heads: None: all that have attention, all of these. Raises ValueError for a layer without, or
    a head that there is not.
    """
    stack = model_of(target).get_decoder().layers
    having = [i for i, layer in enumerate(stack) if mixer_of(layer) == "self_attn"]
    layers = having if layers is None else list(layers)
    for layer in layers:
        if layer not in having:
            raise ValueError(f"layer {layer} has no attention, wanted some of {having}")
        n_heads = model_of(target).config.layers[layer].n_heads
        for head in heads or ():
            if not 0 <= head < n_heads:
                raise ValueError(f"head is {head}, wanted 0 to {n_heads - 1}")
    names = {layer: f"blocks.{layer}.attn.pattern" for layer in layers}
    if isinstance(target, Session) and not len(prompt):
        with _before_the_last(target) as again:
            _, cache = run_with_cache(again, [target.tokens[-1]], names.values())
    else:
        _, cache = run_with_cache(target, prompt, names.values())
    found = {}
    for layer, name in names.items():
        weights, sink = cache[name]
        chosen = list(range(weights.shape[1]) if heads is None else heads)
        found[layer] = AttentionPattern(
            layer, tuple(chosen), weights[:, chosen], None if sink is None else sink[:, chosen]
        )
    return found


def _before_the_last(session: Session) -> Session:
    if not session.tokens or session.tokens[-1] == EMBEDDING:
        raise DasllamaError("the session ends in no token that could be evaluated once more: wanted a prompt")
    again = session.fork()
    try:
        again.truncate(session.n_past - 1)
    except BaseException:
        again.close()
        raise
    return again
