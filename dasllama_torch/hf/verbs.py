"""What a model does with sessions in the manner of transformers. The modules know nothing of sessions, so this is wired
to them: `api.build_model` gives each model its `Verbs`."""

from collections.abc import Callable

from torch import Tensor

from dasllama_torch.engine.session import Session
from dasllama_torch.hf import cache as cached
from dasllama_torch.hf.generate import generate
from dasllama_torch.hf.steps import GenerateOutput
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.outputs import CausalLMOutput


class Verbs:
    """open_session: `api.create_session`."""

    def __init__(self, open_session: Callable[..., Session]):
        self.open_session = open_session

    def open(self, model: CausalLM, n_ctx: int | None = None, kv_dtype: str | tuple[str, str] | None = None) -> Session:
        """A session; keys and values are kept in f32 where the model computes in f32, and as usual elsewhere."""
        return self.open_session(model, kv_dtype or (None if model.lm_head.native else "f32"), n_ctx)

    def forward(
        self,
        model: CausalLM,
        given: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: cached.Cache | None,
        logits_to_keep: int | Tensor,
        hidden_states: bool | int | list[int],
        attentions: bool,
    ) -> CausalLMOutput:
        """A forward that goes on from a cache, or from a new one; see `cache.forward`."""
        if cache is None:
            n_ctx = max(min(model.config.n_ctx, cached.ROOM), 2 * given.shape[1])  # a long prompt may go on for as much
            cache = cached.SessionCache([self.open(model, n_ctx) for _ in range(given.shape[0])])
        return cached.forward(
            model, cache, given, attention_mask, position_ids, logits_to_keep, hidden_states, attentions
        )

    def generate(self, model: CausalLM, inputs: Tensor | None, **how) -> Tensor | GenerateOutput:
        return generate(model, lambda **session: self.open(model, **session), inputs, **how)
