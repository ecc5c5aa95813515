"""Where a model's constructor gets its weights from: it asks a `TensorSource` for each tensor by GGUF name and shape.

    w = GGUFSource(GGUFFile("model.gguf"))
    w.get("token_embd.weight", n_vocab, n_embd)            # PackedTensor, refused unless its shape is this
    w.layer(3).f32("attn_norm.weight", n_embd)             # "blk.3.attn_norm.weight" as float32 [n_embd]
    w.unasked()                                            # names that nobody asked for

The same constructor takes a file, tensors from a state dict (`StateDictSource`) or random ones
(`random_source.RandomSource`).
"""

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.reader import ModelFile
from dasllama_torch.gguf.values import quote
from dasllama_torch.ops.ggml_types import BF16, F16, F32, GGML_TYPES

FLOAT_TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
_QTYPES = {dtype: qtype for qtype, dtype in FLOAT_TYPES.items()}
_MAX_CANDIDATES = 4096  # names compared for a hint: a comparison takes some 10 us, and a file may hold very many


@dataclass(frozen=True, eq=False, slots=True)
class PackedTensor:
    """A tensor in a ggml type. data: uint8 [*shape[:-1], row_bytes]; shape: in elements, slowest first; qtype: key of
    `GGML_TYPES`."""

    name: str
    shape: tuple[int, ...]
    qtype: int
    data: Tensor


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return _without_ones(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


class TensorSource(ABC):
    """Tensors by GGUF name, with a record of which names were asked for. Views made by `scoped` and `layer` share
    that record."""

    half_dtype = torch.bfloat16  # in which a GPU multiplies many rows, see ops/halves.py
    native = True  # whether matrices are to be multiplied on their own types' lattices, or dequantized to f32

    def __init__(self, origin: str):
        self.origin = origin  # for messages: the file
        self.prefix = ""
        self._asked: set[str] = set()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Full names of all tensors held, whatever the scope; empty if tensors are made on demand."""

    @abstractmethod
    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        """The tensor of this full name in whatever shape it has, or None. `shape` is what is wanted."""

    def scoped(self, prefix: str) -> "TensorSource":
        """The same source, with `prefix` before every name that is asked for."""
        view = copy.copy(self)
        view.prefix = self.prefix + prefix
        return view

    def layer(self, index: int) -> "TensorSource":
        """The tensors of one block, `blk.<index>.`."""
        return self.scoped(f"blk.{index}.")

    def has(self, name: str) -> bool:
        """Whether the tensor is there. Looking is not asking: it stays in `unasked`."""
        return self.prefix + name in self.names()

    def rows(self, name: str) -> int:
        """The first dimension of a tensor, where no key tells it. Looking is not asking. Raises GGUFError if there is
        none to tell: the tensor is missing, or made to measure."""
        full = self.prefix + name
        tensor = self._fetch(full, ())
        if tensor is None:
            raise GGUFError(
                f"{self.origin}: tensor {quote(full)} is missing, wanted its number of rows{self._hint(full)}"
            )
        if not tensor.shape:
            raise GGUFError(f"{self.origin}: tensor {quote(full)} has no number of rows of its own, wanted one")
        return tensor.shape[0]

    def get(self, name: str, *shape: int) -> PackedTensor:
        """The tensor, packed as it is held and not copied. Raises GGUFError if it is missing or its shape is not
        `shape`. Leading dimensions of 1 do not matter: ggml drops them when it writes a file."""
        full = self.prefix + name
        self._asked.add(full)
        tensor = self._fetch(full, shape)
        if tensor is None:
            raise GGUFError(
                f"{self.origin}: tensor {quote(full)} is missing, wanted with shape {list(shape)}{self._hint(full)}"
            )
        if tensor.shape == shape:
            return tensor
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise GGUFError(f"{self.origin}: tensor {quote(full)} has shape {list(tensor.shape)}, wanted {list(shape)}")
        return replace(tensor, shape=shape, data=tensor.data.reshape(*shape[:-1], -1))

    def f32(self, name: str, *shape: int) -> Tensor:
        """A norm weight, bias or other small tensor as float32 of `shape`: a view of F32 data, F16 and BF16
        converted.

        Raises GGUFError as `get`, and UnsupportedModel for any other type."""
        tensor = self.get(name, *shape)
        dtype = FLOAT_TYPES.get(tensor.qtype)
        if dtype is None:
            kind = GGML_TYPES[tensor.qtype].name
            raise UnsupportedModel(
                f"{self.origin}: tensor {quote(tensor.name)} has type {kind}, wanted F32, F16 or BF16"
            )
        return tensor.data.view(dtype).reshape(shape).float()

    def leave(self) -> None:
        """Take all tensors of this scope as dealt with: the caller knows them and does without."""
        self._asked.update(name for name in self.names() if name.startswith(self.prefix))

    def unasked(self) -> list[str]:
        """Full names within this scope that were never asked for, in the source's order."""
        return [name for name in self.names() if name.startswith(self.prefix) and name not in self._asked]

    def _hint(self, full: str) -> str:
        nearby = [name for name in self.names() if name.startswith(self.prefix)] or list(self.names())
        close = difflib.get_close_matches(full, nearby[:_MAX_CANDIDATES], n=3)
        return f"; close: {', '.join(map(quote, close))}" if close else ""


class GGUFSource(TensorSource):
    """The tensors of a file, as views of where it holds them."""

    def __init__(self, file: ModelFile):
        super().__init__(str(file.path))
        self._tensors = file.tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        return PackedTensor(name, tensor.shape, tensor.qtype, torch.from_numpy(tensor.data))


class StateDictSource(TensorSource):
    """Float tensors from a state dict, served without a copy as F32, F16 or BF16.

    state_dict: name -> float tensor. name_map: gives the GGUF name of each entry, or None to leave the entry out;
    without it the names are GGUF names already. Values are taken as they are: where a GGUF file holds something else
    than the state dict does (row orders, norms plus one), the caller converts first. Raises GGUFError for two entries
    of one name, UnsupportedModel for another dtype.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        name_map: Callable[[str], str | None] | None = None,
        origin: str = "state dict",
    ):
        super().__init__(origin)
        self._tensors: dict[str, Tensor] = {}
        came_from: dict[str, str] = {}
        for key, tensor in state_dict.items():
            name = key if name_map is None else name_map(key)
            if name is None:
                continue
            if name in came_from:
                raise GGUFError(
                    f"{origin}: {quote(came_from[name])} and {quote(key)} both become tensor {quote(name)}, wanted one"
                )
            _check_dtype(key, tensor, origin)
            came_from[name] = key
            self._tensors[name] = tensor

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else pack(name, tensor, self.origin)


def pack(name: str, tensor: Tensor, origin: str) -> PackedTensor:
    """A float tensor as F32, F16 or BF16, a view of it where it is contiguous. origin: for the message of
    UnsupportedModel, which another dtype raises."""
    _check_dtype(name, tensor, origin)
    data = tensor.contiguous().reshape(tensor.shape or (1,)).view(torch.uint8)
    return PackedTensor(name, tuple(tensor.shape), _QTYPES[tensor.dtype], data)


def _check_dtype(name: str, tensor: Tensor, origin: str) -> None:
    if tensor.dtype not in _QTYPES:
        wanted = ", ".join(map(str, _QTYPES))
        raise UnsupportedModel(f"{origin}: tensor {quote(name)} has dtype {tensor.dtype}, wanted one of {wanted}")
