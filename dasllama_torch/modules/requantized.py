"""A source that serves another's matrices in one chosen type: the load modes q8 and q4_0."""

from collections.abc import Collection

import torch
from torch import Tensor

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.source import PackedTensor, TensorSource
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES
from dasllama_torch.ops.quantize import quantize

_ROWS = 4096  # dequantized at a time, so that f32 copies stay small


class RequantizedSource(TensorSource):
    """Packed matrices come as `qtype`, whatever they are in `inner`; what is asked for as f32 comes as it is.

    Raises UnsupportedModel for a row that is no multiple of the type's block. Memory: new tensors, no views of a file.
    """

    def __init__(self, inner: TensorSource, qtype: int):
        super().__init__(inner.origin)
        self._inner, self._qtype = inner, qtype
        self._done: dict[str, PackedTensor] = {}  # a tied head asks for the embedding table a second time

    def names(self) -> Collection[str]:
        return self._inner.names()

    def has(self, name: str) -> bool:
        return self._inner.has(self.prefix + name)

    def rows(self, name: str) -> int:
        return self._inner.rows(self.prefix + name)

    def f32(self, name: str, *shape: int) -> Tensor:
        self._asked.add(self.prefix + name)
        return self._inner.f32(self.prefix + name, *shape)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        tensor = self._inner._fetch(name, shape)
        if tensor is None or tensor.qtype == self._qtype:
            return tensor
        if name not in self._done:
            self._done[name] = self._requantized(tensor)
        return self._done[name]

    def _requantized(self, tensor: PackedTensor) -> PackedTensor:
        kind = GGML_TYPES[self._qtype]
        if tensor.shape[-1] % kind.block:
            raise UnsupportedModel(
                f"{self.origin}: tensor {tensor.name!r} has rows of {tensor.shape[-1]} elements, wanted a multiple of "
                f"{kind.block} to requantize it to {kind.name}"
            )
        rows = tensor.data.flatten(0, -2).split(_ROWS)
        packed = torch.cat([quantize(dequantize(part, tensor.qtype), self._qtype) for part in rows])
        return PackedTensor(tensor.name, tensor.shape, self._qtype, packed.reshape(*tensor.shape[:-1], -1))
