"""Looking inside a model: what a forward computes, what becomes of it when some of that is replaced, and why.

Names are looked up when they are first used.
"""

from importlib import import_module

_WHERE = {
    "run_with_cache": "activations",
    "record": "activations",
    "ActivationCache": "activations",
    "patch": "patching",
    "steer": "patching",
    "logit_lens": "lens",
    "LogitLens": "lens",
    "attention_pattern": "attention",
    "AttentionPattern": "attention",
    "router_choices": "experts",
    "RouterChoices": "experts",
    "recurrent_states": "states",
    "RecurrentStates": "states",
    "quantization_error": "quantization",
    "QuantizationErrors": "quantization",
    "TensorError": "quantization",
    "logit_attribution": "attribution",
    "LogitAttribution": "attribution",
    "embedding_gradients": "gradients",
    "saliency": "gradients",
    "names": "sites",
    "plot_attention": "plots",
    "plot_logit_lens": "plots",
    "plot_attribution": "plots",
    "plot_heat_map": "plots",
}

__all__ = list(_WHERE)


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f"dasllama_torch.inspect.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
