"""Direct logit attribution: what each part of a model adds to a logit through the residual stream alone (Elhage et al.
2021, A Mathematical Framework for Transformer Circuits). C embedding, H heads, D their dim."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dasllama_torch.inspect.activations import run_with_cache
from dasllama_torch.inspect.prompts import Prompt, Target, ids_of, model_of
from dasllama_torch.inspect.sites import Names, mixer_of
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.linear import Linear
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.tables import Table


@dataclass(frozen=True)
class LogitAttribution:
    """parts: "embed", then "L0 attn" and "L0 mlp" of each layer, or by head "L0H0", "L0H1", ... in place of the former,
    and "L0 bias" where the projection behind the heads has one. values: f64, what each adds. logit: what the head says,
    before it is bounded; of two tokens the difference."""

    parts: tuple[str, ...]
    values: Tensor
    logit: float

    @property
    def rest(self) -> float:
        """What no part accounts for: roundings of the arithmetic, which are large where activations are quantized."""
        return self.logit - self.values.sum().item()

    def table(self, most: int = 20) -> Table:
        """The parts that add or take away most, largest first."""
        order = self.values.abs().argsort(descending=True)[:most].tolist()
        rows = [(self.parts[i], f"{self.values[i].item():+.4f}") for i in order]
        return Table(f"logit {self.logit:.4f}", ("part", "adds"), rows)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def logit_attribution(
    target: Target, prompt: Prompt, token: int, other: int | None = None, *, position: int = -1, heads: bool = False
) -> LogitAttribution:
    """What the embedding, each layer's attention (or delta net) and its feed-forward part add to a token's logit, or to
    its difference from another token's.

    The residual stream is a sum, and the final norm divides it by one number; with that number held fixed, the logit is
    a sum of the same parts. heads: attention by head, through the projection behind it and the norm that a family puts
    there, whose scale is held fixed as well. In native mode, the head and that projection round what they are given,
    and the sum is off by that: see `rest`; mode="fp32" has none.
    target, prompt: as of `run_with_cache`, one sequence. position: of the prompt, from its end if negative. Raises
    ValueError for a token or position that there is not.
    """
    model, n = model_of(target), ids_of(target, prompt).shape[1]
    if not -n <= position < n:
        raise ValueError(f"position is {position}, wanted {-n} to {n - 1}")
    for each in (token, token if other is None else other):
        if not 0 <= each < model.config.n_vocab:
            raise ValueError(f"token id {each} is outside the vocabulary of {model.config.n_vocab}")
    decoder, stack = Names(model).decoder, model.get_decoder().layers
    outputs = [f"{decoder}.layers.{i}.{_output_of(layer)}" for i, layer in enumerate(stack)] if heads else []
    streams = [f"blocks.*.hook_resid_{where}" for where in ("pre", "mid", "post")]
    _, cache = run_with_cache(target, prompt, [*streams, "lm_head", *outputs, *(f"{output}:in" for output in outputs)])

    def at(name: str) -> Tensor:
        return cache[name][0, position].double()

    logits = at("lm_head")
    weight = _head_row(model, token) - (0 if other is None else _head_row(model, other))
    # What a unit of the residual stream adds, from the end on: a layer's scalar (gemma4) scales all that went in.
    direction = _through(model.get_decoder().norm, at(f"blocks.{len(stack) - 1}.hook_resid_post"), weight)
    found: list[tuple[str, Tensor]] = []  # from the last part to the first
    for i, layer in reversed(list(enumerate(stack))):
        pre, mid, post = (at(f"blocks.{i}.hook_resid_{where}") for where in ("pre", "mid", "post"))
        behind, direction = direction, direction * getattr(layer, "layer_scalar", 1.0)
        found.append((f"L{i} mlp", post @ behind - mid @ direction))
        if heads:
            n_heads = _heads(model, i)
            found += reversed(list(_by_head(f"L{i}", layer, n_heads, outputs[i], at, direction)))
        else:
            found.append((f"L{i} attn", (mid - pre) @ direction))
    found.append(("embed", at("blocks.0.hook_resid_pre") @ direction))
    parts, values = zip(*reversed(found), strict=True)
    logit = logits[token] - (0 if other is None else logits[other])
    return LogitAttribution(parts, torch.stack(values), logit.item())


def _output_of(layer: nn.Module) -> str:
    return "self_attn.o_proj" if mixer_of(layer) == "self_attn" else "linear_attn.out_proj"


def _heads(model: CausalLM, layer: int) -> int:
    """Heads whose outputs a layer's projection takes side by side."""
    spec = model.config.layers[layer]
    return spec.delta.n_v_heads if spec.delta else spec.n_heads


def _head_row(model: CausalLM, token: int) -> Tensor:
    """The head's weights of a token, f64 [C]."""
    return dequantize(model.lm_head.qweight[token], model.lm_head.qtype).double()


def _through(norm: nn.Module, x: Tensor, direction: Tensor) -> Tensor:
    """What a unit of x [C] adds along a direction behind a norm whose scale is held fixed."""
    return direction * norm.weight.double() / (x.square().mean() + norm.eps).sqrt()


def _by_head(
    prefix: str, layer: nn.Module, n_heads: int, output: str, at: Callable[[str], Tensor], direction: Tensor
) -> Iterator[tuple[str, Tensor]]:
    projection = layer.get_submodule(_output_of(layer))
    if hasattr(layer, "pre_feedforward_layernorm"):  # then the norm behind attention is of what it gives
        direction = _through(layer.post_attention_layernorm, at(output), direction)
    adds = (at(f"{output}:in") * _transposed(projection, direction)).view(n_heads, -1).sum(-1)
    yield from ((f"{prefix}H{head}", value) for head, value in enumerate(adds))
    if projection.bias is not None:
        yield f"{prefix} bias", projection.bias.double() @ direction


def _transposed(projection: Linear, direction: Tensor) -> Tensor:
    """W^T times a direction, f64, by the gradient of the packed matrix."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, projection.in_features, device=direction.device, requires_grad=True)
        return torch.autograd.grad(projection(x), x, direction.float()[None])[0][0].double()
