"""A source that serves another's matrices in one chosen type: the load modes q8 and q4_0."""

from collections.abc import Collection

import torch

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES
from dasllama_torch.ops.quantize import quantize

from .source import PackedTensor, TensorSource

_ROWS = 4096  # dequantized at a time, so that f32 copies stay small


class RequantizedSource(TensorSource):
    """Tensors of rank 2 and more come as `qtype`, whatever they are in `inner`; vectors come as they are.

    Raises UnsupportedModel for a row that is no multiple of the type's block. Memory: the new tensors, not a view of a file.
    """

    def __init__(self, inner: TensorSource, qtype: int):
        super().__init__(inner.origin)
        self._inner, self._qtype = inner, qtype
        self._done: dict[str, PackedTensor] = {}  # a tied head asks for the embedding table a second time

    def names(self) -> Collection[str]:
        return self._inner.names()

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        tensor = self._inner._fetch(name, shape)
        if tensor is None or len(tensor.shape) < 2 or tensor.qtype == self._qtype:
            return tensor
        if name not in self._done:
            kind = GGML_TYPES[self._qtype]
            if tensor.shape[-1] % kind.block:
                raise UnsupportedModel(
                    f"{self.origin}: tensor {name!r} has rows of {tensor.shape[-1]}, wanted a multiple of {kind.block} "
                    f"to requantize it to {kind.name}"
                )
            rows = tensor.data.flatten(0, -2).split(_ROWS)
            packed = torch.cat([quantize(dequantize(part, tensor.qtype), self._qtype) for part in rows])
            data = packed.reshape(*tensor.shape[:-1], -1)
            self._done[name] = PackedTensor(tensor.name, tensor.shape, self._qtype, data)
        return self._done[name]
