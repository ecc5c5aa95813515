"""Names of what a forward computes: paths of modules, which are transformers', and TransformerLens' hook names.

    model.layers.3.mlp                     what the module gives
    model.layers.3.mlp.down_proj:in        what it is given
    blocks.3.hook_resid_mid                an alias, see `_aliases`
    model.layers.*.mlp                     a pattern: * is any part between two dots, ** any run of them

B batch, T rows, C embedding, H query heads, G kv heads, D head dim, S keys, F width of a feed-forward part.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from dasllama_torch.config import MoESpec
from dasllama_torch.errors import UnknownName
from dasllama_torch.modules.causal_lm import CausalLM

_ROUTERS = ("mlp.gate", "mlp.router", "router")  # below a layer


@dataclass(frozen=True)
class Site:
    """Where a value of the forward is had: what the module at `path` gives, or what it is given.

    argument: which positional argument; None: the output. item: which part of a tuple; None: all of it. call: which
    call of the module within a forward, of one that is called more than once; None: every one. chunk: (i, n), part i of
    n equal parts of the last dim; None: all. derived: "scale", "normalized" or "pattern", computed from what the module
    is given and nowhere to be replaced; "": the value itself.
    """

    path: str
    argument: int | None = None
    item: int | None = None
    call: int | None = None
    chunk: tuple[int, int] | None = None
    derived: str = ""


class Names:
    """The names of a model. decoder: the path of its decoder stack. sites: what each name stands for; two names of one
    value stand for one site."""

    def __init__(self, model: CausalLM):
        decoder = model.get_decoder()
        modules = dict(model.named_modules())
        self.decoder = next(path for path, module in modules.items() if module is decoder)
        called = [path for path, module in modules.items() if path and not isinstance(module, nn.ModuleList)]
        self.sites = {path: Site(path) for path in called}
        # A forward is known from where its decoder begins.
        self.sites |= {
            f"{path}:in": Site(path, argument=0) for path in called if not self.decoder.startswith(f"{path}.")
        }
        # What enters the decoder is what its table gives, with rows of embeddings in their places.
        del self.sites[f"{self.decoder}.embed_tokens:in"]
        self.sites[f"{self.decoder}.embed_tokens"] = Site(self.decoder, argument=0)
        self.sites |= dict(_aliases(model, self.decoder))

    def find(self, names: str | Iterable[str]) -> dict[str, Site]:
        """The sites of names and patterns, in the order given. Raises UnknownName."""
        found: dict[str, Site] = {}
        for name in [names] if isinstance(names, str) else names:
            matches = [name] if name in self.sites else self._match(name)
            if not matches:
                raise UnknownName(f"{name!r} names nothing in this model{self._hint(name)}")
            found |= {match: self.sites[match] for match in matches}
        return found

    def _match(self, pattern: str) -> list[str]:
        if "*" not in pattern:
            return []
        parts = re.split(r"(\*\*?)", pattern)
        regex = re.compile("".join({"*": "[^.:]*", "**": "[^:]*"}.get(part, re.escape(part)) for part in parts))
        return [name for name in self.sites if regex.fullmatch(name)]

    def _hint(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.sites, n=4)
        return f"; close: {', '.join(close)}" if close else ""


def names(model: CausalLM, pattern: str = "**") -> list[str]:
    """The names of what can be recorded or patched that match a pattern, see this module's head. Raises UnknownName
    where none does."""
    return list(Names(model).find(pattern))


def router_of(layer: nn.Module) -> str | None:
    """The path below a decoder layer of the module that chooses experts, None where there is none."""
    modules = dict(layer.named_modules())
    return next((path for path in _ROUTERS if isinstance(getattr(modules.get(path), "spec", None), MoESpec)), None)


def mixer_of(layer: nn.Module) -> str:
    """The path below a decoder layer of its attention or delta net."""
    return "self_attn" if hasattr(layer, "self_attn") else "linear_attn"


def _aliases(model: CausalLM, decoder: str) -> Iterator[tuple[str, Site]]:
    """TransformerLens' names for a decoder whose layers are transformers'.

    blocks.N.  hook_resid_pre, _mid, _post    the residual stream before, within and after layer N [B, T, C]
               hook_attn_out, hook_mlp_out    what its two parts add, behind their own norms where they have some
               ln1., ln2., ln1_post., ln2_post. hook_scale [B, T, 1], hook_normalized (before the weight): its norms
               attn.hook_q, hook_k            before norms and rotation [B, T, H, D], [B, T, G, D]
               attn.hook_rot_q, hook_rot_k, hook_v    as attention takes them; hook_z: what it gives [B, T, H, D]
               attn.hook_pattern              probabilities [B, H, T, S], without a sink's share
               attn.pattern                   (not TransformerLens') these, and the sinks' share [B, H, T] or None
               mlp.hook_pre, hook_pre_linear, hook_post    gate, up, and what goes into the last matrix [B, T, F]
               mlp.hook_expert_weights, hook_expert_indices    of the experts chosen [B * T, k]
    hook_embed, ln_final.hook_scale, ln_final.hook_normalized
    """
    yield "hook_embed", Site(decoder, argument=0)
    yield from _norm("ln_final", f"{decoder}.norm")
    for i, layer in enumerate(model.get_decoder().layers):
        path, block = f"{decoder}.layers.{i}", f"blocks.{i}"
        sandwiched = hasattr(layer, "pre_feedforward_layernorm")  # norms behind both parts, too
        ln2 = f"{path}.pre_feedforward_layernorm" if sandwiched else f"{path}.post_attention_layernorm"
        yield f"{block}.hook_resid_pre", Site(path, argument=0)
        yield f"{block}.hook_resid_mid", Site(ln2, argument=0)
        yield f"{block}.hook_resid_post", Site(path)
        yield from _norm(f"{block}.ln1", f"{path}.input_layernorm")
        yield from _norm(f"{block}.ln2", ln2)
        if sandwiched:
            for norm, part, after in (("ln1_post", "attn", "attention"), ("ln2_post", "mlp", "feedforward")):
                yield from _norm(f"{block}.{norm}", f"{path}.post_{after}_layernorm")
                yield f"{block}.hook_{part}_out", Site(f"{path}.post_{after}_layernorm")
        else:
            yield f"{block}.hook_attn_out", Site(f"{path}.{mixer_of(layer)}")
            # gpt-oss gives the experts' weights, too, as transformers does.
            yield f"{block}.hook_mlp_out", Site(f"{path}.mlp", item=0 if hasattr(layer.mlp, "router") else None)
        if hasattr(layer, "self_attn"):
            yield from _attention(f"{block}.attn", f"{path}.self_attn", layer.self_attn)
        yield from _feed_forward(f"{block}.mlp", path, layer)


def _norm(alias: str, path: str) -> Iterator[tuple[str, Site]]:
    yield f"{alias}.hook_scale", Site(path, argument=0, derived="scale")
    yield f"{alias}.hook_normalized", Site(path, argument=0, derived="normalized")


def _attention(alias: str, path: str, attention: nn.Module) -> Iterator[tuple[str, Site]]:
    attn = Site(f"{path}.attn")
    has_kv = attention.attn.source == attention.attn.layer  # of its own
    for i, kind in enumerate("qk" if has_kv else "q"):
        turned = replace(attn, argument=i)
        yield f"{alias}.hook_rot_{kind}", turned
        if hasattr(attention, f"{kind}_norm"):
            yield f"{alias}.hook_{kind}", Site(f"{path}.{kind}_norm", argument=0)
        elif attention.rope is not None:  # it turns queries, then keys
            yield f"{alias}.hook_{kind}", Site(f"{path}.rope", argument=0, call=i)
        else:
            yield f"{alias}.hook_{kind}", turned
    if has_kv:
        yield f"{alias}.hook_v", replace(attn, argument=2)
    yield f"{alias}.hook_z", attn
    yield f"{alias}.hook_pattern", replace(attn, item=0, derived="pattern")
    yield f"{alias}.pattern", replace(attn, derived="pattern")  # with what goes to sinks


def _feed_forward(alias: str, path: str, layer: nn.Module) -> Iterator[tuple[str, Site]]:
    if router := router_of(layer):
        yield f"{alias}.hook_expert_weights", Site(f"{path}.{router}", item=1)
        yield f"{alias}.hook_expert_indices", Site(f"{path}.{router}", item=2)
    if not hasattr(layer.mlp, "down_proj"):
        return
    if hasattr(layer.mlp, "gate_up_proj"):
        yield f"{alias}.hook_pre", Site(f"{path}.mlp.gate_up_proj", chunk=(0, 2))
        yield f"{alias}.hook_pre_linear", Site(f"{path}.mlp.gate_up_proj", chunk=(1, 2))
    else:
        yield f"{alias}.hook_pre", Site(f"{path}.mlp.gate_proj")
        yield f"{alias}.hook_pre_linear", Site(f"{path}.mlp.up_proj")
    yield f"{alias}.hook_post", Site(f"{path}.mlp.down_proj", argument=0)
