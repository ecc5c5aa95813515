"""Which experts were chosen, by layer and token. R rows, E experts, k of them per row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.inspect.activations import run_with_cache
from dasllama_torch.inspect.prompts import Prompt, Target, model_of
from dasllama_torch.inspect.sites import Names, router_of


@dataclass(frozen=True)
class RouterChoices:
    """Of one layer, a row for each token [B * T]. logits f32 [R, E]: of all experts. ids int64 [R, k]: of those chosen,
    best first. weights f32 [R, k]: what their outputs are multiplied by."""

    layer: int
    logits: Tensor
    ids: Tensor
    weights: Tensor

    def load(self) -> Tensor:
        """How many rows chose each expert, int64 [E]."""
        return torch.bincount(self.ids.flatten(), minlength=self.logits.shape[1])


def router_choices(target: Target, prompt: Prompt) -> dict[int, RouterChoices]:
    """Evaluate a prompt, and give what the router of each layer with experts chose, by layer. target, prompt: as of
    `run_with_cache`. Raises UnsupportedModel for a model without experts."""
    model = model_of(target)
    decoder = Names(model).decoder
    routers = {i: router_of(layer) for i, layer in enumerate(model.get_decoder().layers)}
    paths = {i: f"{decoder}.layers.{i}.{router}" for i, router in routers.items() if router}
    if not paths:
        raise UnsupportedModel(f"{model.config.arch}: no layer of this model has experts")
    _, cache = run_with_cache(target, prompt, paths.values())
    found = {}
    for layer, path in paths.items():
        logits, weights, ids = cache[path]
        found[layer] = RouterChoices(layer, logits, ids, weights)
    return found
