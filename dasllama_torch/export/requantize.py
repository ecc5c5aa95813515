"""A GGUF file of other types: a type for all matrices, and others for those whose names match patterns.

    report = requantize("f32.gguf", "mixed.gguf", "Q4_0", {"blk.*.ffn_down.weight": "Q8_0", "output.weight": "F16"})
    print(report)      # of each tensor that changed: type before and after, error

The types are those of `TYPES`: plain ones and blocks as the `gguf` package's quantizers write them, K-types and IQ4_NL
as ggml (searched_types.py). One tensor is in memory at a time.
"""

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.export.searched_types import SEARCHED, pack
from dasllama_torch.files import appearing
from dasllama_torch.gguf.reader import GGUFFile, GGUFTensor
from dasllama_torch.gguf.values import quote
from dasllama_torch.gguf.writer import write_gguf_stream
from dasllama_torch.ops import ggml_types as t
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.quantize import quantize
from dasllama_torch.tables import Table

_OURS = (t.F32, t.F16, t.BF16, t.Q4_0, t.Q8_0)  # what ops/quantize.py packs
_GGUF_PY = (t.Q4_1, t.Q5_0, t.Q5_1, t.TQ1_0, t.TQ2_0, t.MXFP4)
TYPES = tuple(t.GGML_TYPES[qtype].name for qtype in (*_OURS, *_GGUF_PY, *SEARCHED))

# What llama-quantize takes where rows are no multiple of a block of 256; where that does not fit either, F16.
_INSTEAD = {
    t.TQ1_0: t.Q4_0, t.TQ2_0: t.Q4_0, t.Q2_K: t.IQ4_NL, t.Q3_K: t.IQ4_NL, t.Q4_K: t.Q5_0, t.Q5_K: t.Q5_1,
    t.Q6_K: t.Q8_0,
}  # fmt: skip

_ROWS = 4096  # at a time, so that f32 copies stay small
# Matrices that models read as they are, in floats: what is small and sensitive stays so, as in llama-quantize.
_FLOAT_ONLY = ("*_norm.weight", "*norm.weight", "*ffn_gate_inp*.weight", "*ssm_conv1d.weight", "rope_f*.weight")


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a tensor. asked: the type that was wanted, another than `after` where the tensor's rows are no
    multiple of its block. error: root mean square of the difference, relative to that of the values before."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    asked: str
    error: float


@dataclass(frozen=True)
class Requantized:
    """The result of `requantize`: the tensors whose type changed, how many kept theirs, bytes of all before and
    after.
    """

    path: Path
    changes: list[Change]
    n_kept: int
    nbytes_before: int
    nbytes_after: int

    def to_dict(self) -> dict:
        return {**asdict(self), "path": str(self.path)}

    def table(self) -> Table:
        rows = [
            (c.name, " x ".join(map(str, c.shape)), c.before, c.after + f" ({c.asked})" * (c.asked != c.after),
             f"{c.error:.2e}")
            for c in self.changes
        ]  # fmt: skip
        notes = [
            f"{self.n_kept} tensors as they were; {self.nbytes_before / 1e6:.1f} MB became "
            f"{self.nbytes_after / 1e6:.1f} MB"
        ]
        if replaced := sum(c.asked != c.after for c in self.changes):
            notes.append(f"{replaced} have rows that are no multiple of the wanted type's block (in parentheses)")
        marked = frozenset(i for i, c in enumerate(self.changes) if c.asked != c.after)
        return Table(str(self.path), ("tensor", "shape", "before", "after", "error"), rows, marked, notes)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def requantize(
    path_in: str | os.PathLike,
    path_out: str | os.PathLike,
    default: str | None = None,
    types: Mapping[str, str] | None = None,
    *,
    done: Callable[[str], object] = lambda name: None,
) -> Requantized:
    """Write the file (or the whole set of shards) as one file, with other types.

    default: of all matrices that models multiply or look up; norms, biases, routers and convolutions keep theirs, as in
    llama-quantize. None: they keep theirs. types: shell patterns of GGUF names -> type, the first that matches counts;
    each must match a tensor. Names of types are those of `TYPES`. A tensor whose rows are no multiple of a type's block
    gets the type that llama-quantize would give it, and the report says so. done: called with each tensor's name when
    it is written.
    The file is complete or not there: it gets its name at the end, and then replaces one of that name.
    Raises UnsupportedModel for a type that cannot be written, for a packed type of a tensor that models read in floats,
    and for values that the type cannot hold; GGUFError for a pattern without a tensor, and for a path that is read or
    where no file can be.
    """
    types = dict(types or {})
    for name in (*types.values(), *([default] if default else [])):
        if name not in TYPES:
            raise UnsupportedModel(f"cannot write type {name!r}; possible: {', '.join(TYPES)}")
    path_out = Path(path_out)
    file = GGUFFile(path_in)
    _check_out(path_out, file)
    for pattern in types:
        if not fnmatch.filter(file.tensors, pattern):
            like = quote(next(iter(file.tensors), ""))
            raise GGUFError(f"{file.path}: has no tensor {quote(pattern)}, wanted a pattern of names such as {like}")
    asked = {name: _asked(tensor, default, types) for name, tensor in file.tensors.items()}
    after = {name: _fitting(qtype, file.tensors[name].shape) for name, qtype in asked.items()}
    infos = {name: (file.tensors[name].shape, qtype) for name, qtype in after.items()}
    errors: dict[str, float] = {}

    def data() -> Iterator[np.ndarray]:
        for name, tensor in file.tensors.items():
            packed, errors[name] = _converted(tensor, after[name])
            yield packed
            done(name)

    metadata = {key: file.metadata.typed(key) for key in file.metadata if not key.startswith("split.")}
    if default:
        metadata["general.file_type"] = np.uint32(_file_type(default))
        metadata["general.quantization_version"] = np.uint32(gguf.GGML_QUANT_VERSION)
    with appearing(path_out) as unfinished:
        write_gguf_stream(unfinished, file.metadata.architecture, metadata, infos, data())
    name_of = {qtype: kind.name for qtype, kind in t.GGML_TYPES.items()}
    changes = [
        Change(
            name, tensor.shape, name_of[tensor.qtype], name_of[after[name]], name_of[asked[name]], errors[name]
        )
        for name, tensor in file.tensors.items()
        if tensor.qtype != after[name]
    ]  # fmt: skip
    sizes = [GGUFFile(path).nbytes for path in (path_in, path_out)]
    return Requantized(path_out, changes, len(file.tensors) - len(changes), *sizes)


def _check_out(path: Path, file: GGUFFile) -> None:
    """Before anything is computed."""
    if path.is_dir() or not path.parent.is_dir():
        raise GGUFError(f"{path}: no file can be written there, wanted a name in a folder that exists")
    if path.exists() and any(path.samefile(part) for part in file.paths):
        raise GGUFError(f"{path}: is read, wanted another file to write")


def _asked(tensor: GGUFTensor, default: str | None, types: Mapping[str, str]) -> int:
    """The type that the caller wants of a tensor."""
    name = tensor.name
    floats = (
        len(tensor.shape) < 2 or not name.endswith(".weight") or any(fnmatch.fnmatchcase(name, p) for p in _FLOAT_ONLY)
    )
    for pattern, wanted in types.items():
        if fnmatch.fnmatchcase(name, pattern):
            if floats and not t.by_name(wanted).is_float:
                raise UnsupportedModel(
                    f"tensor {quote(name)} cannot be {wanted}: models read it in floats, wanted F32, F16 or BF16"
                )
            return t.by_name(wanted).id
    return tensor.qtype if floats or default is None else t.by_name(default).id


def _fitting(qtype: int, shape: tuple[int, ...]) -> int:
    """The type, or what llama-quantize takes for it where a row is no multiple of its block."""
    for fitting in (qtype, _INSTEAD.get(qtype, t.F16), t.F16):
        if prod(shape[-1:]) % t.GGML_TYPES[fitting].block == 0:
            return fitting
    raise AssertionError("a block of F16 is one element")


def _converted(tensor: GGUFTensor, qtype: int) -> tuple[np.ndarray, float]:
    """The tensor's rows in a type, uint8 [..., row_bytes], and the error of `Change`."""
    if tensor.qtype == qtype:
        return tensor.data, 0.0
    rows = torch.from_numpy(tensor.data).reshape(-1, tensor.data.shape[-1])
    parts, squared, norm = [], 0.0, 0.0
    for part in rows.split(_ROWS):
        floats = dequantize(part, tensor.qtype)
        if not floats.isfinite().all():
            raise UnsupportedModel(f"tensor {quote(tensor.name)} holds NaN or infinity: it can only stay as it is")
        parts.append(_quantized(floats, qtype))
        again = dequantize(parts[-1], qtype)
        if not again.isfinite().all():
            kind = t.GGML_TYPES[qtype].name
            raise UnsupportedModel(
                f"tensor {quote(tensor.name)} holds {floats.abs().max():g}, beyond {kind}: wanted F32 or BF16 for it"
            )
        squared += (again - floats).double().square().sum().item()
        norm += floats.double().square().sum().item()
    packed = torch.cat(parts).reshape(*tensor.shape[:-1], -1)
    return packed.numpy(), (squared / norm) ** 0.5 if norm else 0.0


def _quantized(floats: Tensor, qtype: int) -> Tensor:
    if qtype in _OURS:
        return quantize(floats, qtype)
    if qtype in SEARCHED:
        return pack(floats, qtype)
    return torch.from_numpy(gguf.quants.quantize(floats.numpy(), gguf.GGMLQuantizationType(qtype)))


def _file_type(name: str) -> int:
    """llama.cpp's number for files of mostly one type."""
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"} | {f"Q{n}_K": f"MOSTLY_Q{n}_K_S" for n in (3, 4, 5)}
    return gguf.LlamaFileType[names.get(name, f"MOSTLY_{name}")].value
