"""How far the values of packed matrices are from those that they were made of. N rows of K elements, E experts."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from dasllama_torch.arch import family
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.linear import Packed
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES
from dasllama_torch.tables import Table

ROWS = 4096  # dequantized at a time: in f64, 4,096 rows of 4,096 elements take 134 MB

Reference = CausalLM | str | os.PathLike | Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorError:
    """Of one matrix, or of all of a layer. name: its path, or "layer 3". type: of the values, as ggml names it. n: how
    many. rms: of the error, relative to that of the reference. largest: |error|. cosine: between the two.

    sqnr: signal to quantization noise, in dB: -20 log10(rms).
    """

    name: str
    layer: int | None
    type: str
    n: int
    rms: float
    largest: float
    cosine: float

    @property
    def sqnr(self) -> float:
        return -20 * math.log10(self.rms) if self.rms else math.inf


@dataclass(frozen=True)
class _Sums:
    """What measures are made of, so that those of a layer's matrices add up."""

    n: int
    error: float
    reference: float
    found: float
    product: float
    largest: float

    def __add__(self, other: "_Sums") -> "_Sums":
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-1])
        return _Sums(*sums, max(self.largest, other.largest))

    def measures(self) -> dict[str, float]:
        def ratio(a: float, b: float) -> float:
            return a / b if b else (0.0 if not a else math.inf)

        rms = math.sqrt(ratio(self.error, self.reference))
        norms = math.sqrt(self.found * self.reference)
        return dict(n=self.n, rms=rms, largest=self.largest, cosine=self.product / norms if norms else math.nan)


@dataclass(frozen=True)
class QuantizationErrors:
    """tensors: every packed matrix, in the order of the forward. layers: those of each layer together, and first what
    stands outside of them (layer None: embeddings and head)."""

    tensors: list[TensorError]
    layers: list[TensorError]

    def table(self, by: str = "tensor") -> Table:
        """by: "tensor" or "layer"."""
        rows = {"tensor": self.tensors, "layer": self.layers}[by]
        cells = [
            (
                row.name,
                row.type,
                f"{row.n:,}",
                f"{row.rms:.3g}",
                f"{row.largest:.3g}",
                f"{row.cosine:.6f}",
                f"{row.sqnr:.1f}",
            )
            for row in rows
        ]
        return Table(f"error of each {by}", (by, "type", "values", "rms", "max", "cosine", "SQNR dB"), cells)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_dict(self) -> dict[str, list[dict]]:
        """All figures as plain data; what is infinite or NaN, as the sqnr of an exact matrix, is None."""
        kinds = (("tensors", self.tensors), ("layers", self.layers))
        return {kind: [_plain(row) for row in rows] for kind, rows in kinds}


def quantization_error(model: CausalLM, reference: Reference) -> QuantizationErrors:
    """Every packed matrix of a model against the values that it was made of.

    reference: another model of the same modules (from a folder of safetensors, say), the path of a GGUF file of one
    (F32, F16, or any types), or tensors by `<path of the module>.weight`, in transformers' order of rows. Rows are
    dequantized some at a time. A head that is the embedding table counts once. Raises ValueError for a matrix that the
    reference has not, or has in another shape, and what `load_model` raises for a file.
    """
    rows_of = _rows_of(reference)
    tensors: list[tuple[str, int | None, str, _Sums]] = []
    for path, module in _packed(model):
        wanted = rows_of(path, module)
        total = _Sums(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        count = module.qweight.shape[:-1].numel()
        for start in range(0, count, ROWS):
            part = slice(start, min(start + ROWS, count))
            total += _compared(_values(module, part).double(), wanted(part).double())
        tensors.append((path, _layer(path), GGML_TYPES[module.qtype].name, total))
    layers: dict[int | None, tuple[set[str], _Sums]] = {}
    for _, layer, kind, sums in tensors:
        kinds, total = layers.get(layer, (set(), None))
        layers[layer] = kinds | {kind}, sums if total is None else total + sums
    return QuantizationErrors(
        [TensorError(name=path, layer=layer, type=kind, **sums.measures()) for path, layer, kind, sums in tensors],
        [
            TensorError(
                name="outside" if layer is None else f"layer {layer}",
                layer=layer,
                type=", ".join(sorted(kinds)),
                **sums.measures(),
            )
            for layer, (kinds, sums) in sorted(layers.items(), key=lambda item: -1 if item[0] is None else item[0])
        ],
    )


def _plain(row: TensorError) -> dict:
    figures = {**asdict(row), "sqnr": row.sqnr}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def _packed(model: CausalLM) -> Iterator[tuple[str, Packed]]:
    seen = set()
    for path, module in model.named_modules():
        if isinstance(module, Packed) and module.gguf_name not in seen:
            seen.add(module.gguf_name)
            yield path, module


def _layer(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


def _values(module: Packed, part: slice) -> Tensor:
    """Some rows of a matrix, or of the matrices of all experts one after the other, f32 [n, K]."""
    rows = dequantize(module.qweight.flatten(0, -2)[part], module.qtype)
    inputs = getattr(module, "file_inputs", None)
    return rows if inputs is None else rows[:, inputs.argsort()]


def _compared(found: Tensor, reference: Tensor) -> _Sums:
    error = found - reference
    return _Sums(
        error.numel(),
        error.square().sum().item(),
        reference.square().sum().item(),
        found.square().sum().item(),
        (found * reference).sum().item(),
        error.abs().max().item(),
    )


def _rows_of(reference: Reference) -> Callable[[str, Packed], Callable[[slice], Tensor]]:
    """A function of a module and its path that gives the reference's rows of it."""
    if isinstance(reference, Mapping):
        return lambda path, module: _of_tensor(f"{path}.weight", reference.get(f"{path}.weight"), module.shape)
    other = _open(Path(reference)) if isinstance(reference, (str, os.PathLike)) else reference
    theirs = dict(other.named_modules())

    def of_model(path: str, module: Packed) -> Callable[[slice], Tensor]:
        found = theirs.get(path)
        _check(path, found.shape if isinstance(found, Packed) else None, module.shape)
        return lambda part: _values(found, part)

    return of_model


def _of_tensor(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Callable[[slice], Tensor]:
    _check(name, None if tensor is None else tuple(tensor.shape), shape)
    return lambda part: tensor.detach().flatten(0, -2)[part].float()


def _check(name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]) -> None:
    if found is None:
        raise ValueError(f"the reference has no {name}, wanted one of shape {list(wanted)}")
    if tuple(found) != tuple(wanted):
        raise ValueError(f"the reference's {name} has shape {list(found)}, wanted {list(wanted)}")


def _open(path: Path) -> CausalLM:
    """A file's modules, mapped and not read."""
    file = GGUFFile(path)
    parts = family(file.metadata.architecture, file.metadata.origin)
    source = GGUFSource(file)
    with torch.no_grad():
        return parts.model(parts.config.from_gguf(file.metadata, source), source)
