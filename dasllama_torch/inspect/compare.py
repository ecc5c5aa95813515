"""Two models on one prompt, module by module: where do they begin to differ, and by how much?

    result = compare(model, other, "The capital of France is")
    result.first     # the first module over the tolerance, in the order of the forward; None: there is none
    print(result)    # a table; in a notebook, `result` alone shows it
    result.to_dict() # all figures

B sequences (one here), T tokens, C features, V tokens of the vocabulary.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.inspect.divergence import divergence
from dasllama_torch.inspect.taps import Place, tapped
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.tables import Table

# Two f32 implementations of the same weights differ by 1e-6 to 1e-4 of a module's spread, as sums are folded in another
# order and layers add that up; a fault of any consequence by 1e-2 and more. Activations rounded to 8 bits (mode
# "native") differ from f32 by some 0.1, and quantized weights from their parents by more still.
TOLERANCE = 1e-3
TOP_K = 10
LOGITS = "logits"  # the place of the model's own output, which is what `lm_head` gives but for a bound on it


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """What one module gave in the tested model against the same module in the reference.

    kind: the class of the tested model's module. spread: standard deviation of the reference's values. max, mean: of
    |difference|, divided by nothing. cosine: of the angle between all values. token: the one in whose row the largest
    difference stands. within: max is at most tolerance * spread.
    """

    place: str
    kind: str
    shape: tuple[int, ...]
    spread: float
    max: float
    mean: float
    cosine: float
    token: int
    within: bool

    @property
    def relative(self) -> float:
        """max / spread."""
        return self.max / self.spread if self.spread else math.inf if self.max else 0.0


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    names: of the tested model and of the reference. ids: the prompt, T tokens. modules: in the order in which the
    tested model's forward left them; the last is its logits. kl, top1, overlap: of the next token's distribution at
    each position, see `Divergence`; k likeliest tokens count for the overlap. only_in_model, only_in_other: paths of
    the modules that the other side lacks or did not run. shapes_differ: those whose outputs cannot be compared.
    """

    names: tuple[str, str]
    ids: list[int]
    tolerance: float
    modules: list[ModuleDifference]
    kl: list[float]
    top1: list[bool]
    overlap: list[float]
    k: int
    only_in_model: list[str]
    only_in_other: list[str]
    shapes_differ: list[str]

    @property
    def first(self) -> ModuleDifference | None:
        """The first module over the tolerance: everything that was compared before it agrees, so that the fault lies in
        it, or in what stands between it and those before."""
        return next((module for module in self.modules if not module.within), None)

    @property
    def within(self) -> bool:
        """Whether no module is over the tolerance."""
        return self.first is None

    @property
    def mean_kl(self) -> float:
        """Nats, over all positions."""
        return sum(self.kl) / len(self.kl)

    def to_dict(self) -> dict:
        """All figures as plain data."""
        first = self.first
        return {**asdict(self), "within": self.within, "first": first and first.place, "mean_kl": self.mean_kl}

    def to_json(self) -> str:
        """`to_dict` as JSON, which has no NaN and no infinity: those are null."""
        return json.dumps(_finite(self.to_dict()), indent=1)

    def table(self, every: bool = False) -> Table:
        """every: all modules, not just the layers, what stands outside of them and the first over the tolerance."""
        shown = [m for m in self.modules if every or m is self.first or _is_landmark(m.place)]
        rows = [
            (m.place, m.kind, f"{m.max:.2e}", f"{m.mean:.2e}", f"{m.relative:.2e}", f"{m.cosine:.7f}", str(m.token))
            for m in shown
        ]
        marked = frozenset(i for i, m in enumerate(shown) if m is self.first)
        headings = ("module", "class", "max |diff|", "mean |diff|", "max / spread", "cosine", "token")
        return Table(f"{self.names[0]} against {self.names[1]}", headings, rows, marked, self.notes())

    def notes(self) -> list[str]:
        """What to say below the table."""
        n = len(self.ids)
        first = self.first
        over = sum(not m.within for m in self.modules)
        notes = [
            f"all {len(self.modules)} modules are within {self.tolerance:g} of their spread"
            if first is None
            else f"first over {self.tolerance:g} of its spread: {first.place}, at token {first.token}; "
            f"{over} of {len(self.modules)} modules are over",
            f"next token, mean of {n} positions: KL {self.mean_kl:.3g} nats (worst {max(self.kl):.3g} at "
            f"{self.kl.index(max(self.kl))}), same likeliest {sum(self.top1) / n:.1%}, "
            f"overlap of the {self.k} likeliest {sum(self.overlap) / n:.1%}",
        ]
        if self.shapes_differ:
            notes.append(f"of other shapes, not compared: {', '.join(self.shapes_differ)}")
        return notes

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@torch.no_grad()
def compare(
    model: nn.Module,
    other: nn.Module,
    prompt: str | Sequence[int] | Tensor,
    *,
    tolerance: float = TOLERANCE,
    top_k: int = TOP_K,
) -> Comparison:
    """Run both on the prompt, without a cache, and hold every module's output against that of the same path.

    model, other: ours or transformers', in any combination: a file and its parent, one file in two modes, a model and
    its original. other is the reference. It runs first; its outputs are kept, and go as the model's are compared with
    them, so that no two sets are ever held. prompt: text, or T token ids. tolerance: of the largest difference,
    relative to the spread (standard deviation) of what the reference's module gives. top_k: likeliest tokens whose
    overlap is counted, at most V.
    What ours show as modules and transformers computes by functions (rotation, attention, the convolution and the rule
    of a delta net) is compared as well, see taps.py.
    Raises UnsupportedModel where the two have vocabularies of different sizes, or tokenize the prompt differently.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}, wanted a number above 0")
    ids = prompt_ids(model, other, prompt)
    paths = _paths(model) | _paths(other)  # of both: attention of transformers is seen at paths that ours have
    kept: dict[Place, Tensor] = {}
    with tapped(other, paths, kept.__setitem__):
        reference = _logits(other, ids)
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    only_in_model, shapes_differ, modules = [], [], []

    def hold_against(place: Place, found: Tensor) -> None:
        wanted = kept.pop(place, None)
        if wanted is None:
            only_in_model.append(str(place))
            return
        found = tokens_first(found.cpu(), len(ids))
        wanted = in_shape(tokens_first(wanted.cpu(), len(ids)), found)
        if wanted is None:
            shapes_differ.append(str(place))
        else:
            modules.append(_difference(str(place), kinds.get(place.path, ""), found, wanted, len(ids), tolerance))

    with tapped(model, paths, hold_against):
        logits = _logits(model, ids)
    if logits.shape != reference.shape:
        raise UnsupportedModel(
            f"{name_of(model)} gives logits of {logits.shape[-1]} tokens and {name_of(other)} of "
            f"{reference.shape[-1]}, wanted one vocabulary"
        )
    modules.append(_difference(LOGITS, "", logits, reference, len(ids), tolerance))
    apart = divergence(logits, reference, min(top_k, logits.shape[-1]))
    return Comparison(
        names=(name_of(model), name_of(other)),
        ids=ids,
        tolerance=tolerance,
        modules=modules,
        kl=apart.kl.tolist(),
        top1=apart.top1.bool().tolist(),
        overlap=apart.overlap.tolist(),
        k=min(top_k, logits.shape[-1]),
        only_in_model=only_in_model,
        only_in_other=[str(place) for place in kept],
        shapes_differ=shapes_differ,
    )


def name_of(model: nn.Module) -> str:
    """What messages and tables call a model: its file, or its class."""
    if not isinstance(model, CausalLM) or model.metadata is None:
        return type(model).__name__
    return f"{model.metadata.origin}{'' if model.lm_head.native else ' (fp32)'}"


def prompt_ids(model: nn.Module, other: nn.Module, prompt: str | Sequence[int] | Tensor) -> list[int]:
    """The prompt's T token ids, T > 0; text by the tokenizer of whichever model is ours, or of both if they agree."""
    if isinstance(prompt, str):
        ours = [m for m in (model, other) if isinstance(m, CausalLM)]
        if not ours:
            raise ValueError("neither model brings a tokenizer: wanted token ids as the prompt")
        ids = ours[0].encode(prompt)
        if any(m.encode(prompt) != ids for m in ours[1:]):
            raise UnsupportedModel(f"{name_of(model)} and {name_of(other)} tokenize the text differently")
    else:
        ids = torch.as_tensor(prompt).reshape(-1).tolist()
    if not ids:
        raise ValueError("the prompt is empty, wanted at least one token")
    return ids


def _paths(model: nn.Module) -> set[str]:
    return {path for path, _ in model.named_modules() if path}


def _logits(model: nn.Module, ids: list[int]) -> Tensor:
    """[T, V] on the CPU."""
    device = next(model.parameters()).device
    # transformers would make a cache of what nobody goes on from.
    options = {} if isinstance(model, CausalLM) else {"use_cache": False}
    return model(input_ids=torch.tensor([ids], device=device), **options).logits[0].cpu()


def tokens_first(x: Tensor, n: int) -> Tensor:
    """x with the dim of its n tokens before that of its heads: some of transformers' modules have [B, H, T, D]."""
    return x.transpose(1, 2) if x.dim() == 4 and x.shape[1] != n and x.shape[2] == n else x


def in_shape(wanted: Tensor, found: Tensor) -> Tensor | None:
    """wanted with found's shape, if it is another view of the same rows: what is beside experts sees rows without a
    batch in transformers. None: it is not."""
    if wanted.shape == found.shape:
        if wanted.dim() == 4 and wanted.shape[1] == wanted.shape[2]:
            # As many heads as tokens: the shape does not tell which of the two comes first.
            swapped = wanted.transpose(1, 2)
            return min(wanted, swapped, key=lambda x: (x - found).abs().sum().item())
        return wanted
    same_rows = wanted.numel() == found.numel() and wanted.shape[-1] == found.shape[-1]
    return wanted.reshape(found.shape) if same_rows else None


def _difference(
    place: str, kind: str, found: Tensor, wanted: Tensor, n_tokens: int, tolerance: float
) -> ModuleDifference:
    found, wanted = found.double(), wanted.double()
    apart = (found - wanted).abs()
    spread = wanted.std(correction=0).item()
    largest = apart.max().item()
    norms = found.norm() * wanted.norm()
    return ModuleDifference(
        place=place,
        kind=kind,
        shape=tuple(found.shape),
        spread=spread,
        max=largest,
        mean=apart.mean().item(),
        cosine=((found * wanted).sum() / norms).item() if norms else float(largest == 0),
        token=int(apart.argmax()) * n_tokens // apart.numel(),
        within=largest <= tolerance * spread,  # false for NaN
    )


def _is_landmark(place: str) -> bool:
    """Whether the module is a decoder layer, or outside of them."""
    _, _, inside = place.partition(".layers.")
    return "." not in inside


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
