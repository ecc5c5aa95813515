"""Packed matrices as modules: Linear and Embedding hold the file's bytes, and `.weight` dequantizes on access."""

from math import prod

import torch
from torch import Tensor, nn

from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.embedding import embedding
from dasllama_torch.ops.halves import multiplied_in
from dasllama_torch.ops.quant_linear import quant_linear


class Packed(Module):
    """A matrix [N, K] in a ggml type, or a stack of them [E, N, K].

    qweight: uint8 [..., N, row_bytes], a view of the source's data where possible. qtype: ggml type id. gguf_name: its
    name there.
    """

    def __init__(self, w: TensorSource, name: str, *shape: int):
        super().__init__()
        tensor = w.get(f"{name}.weight", *shape)
        self.register_buffer("qweight", tensor.data)
        self.qtype = tensor.qtype
        self.gguf_name = tensor.name.removesuffix(".weight")
        self.shape = shape

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, f32 of `shape`, computed on each access; writing to it changes nothing."""
        return dequantize(self.qweight, self.qtype)

    def numel(self) -> int:
        """How many numbers the bytes stand for."""
        return prod(self.shape)

    def extra_repr(self) -> str:
        *stack, n, k = self.shape
        times = "".join(f"{e} x " for e in stack)
        return f"{times}{k} -> {n}, {ggml_types.GGML_TYPES[self.qtype].name}, {self.gguf_name}"


class Linear(Packed):
    """y = x W^T + b. x [..., K] -> [..., N] in x's dtype, sums in f32.

    row_order, column_order: rows and columns of the file in the order that transformers has them; None: they are. Rows
    are moved at load, as whole packed rows. Columns cannot be, within packed blocks: the input is put into the file's
    order instead, so that a hook sees transformers'. An order that changes nothing costs nothing. bias: "yes", "no" or
    "optional" (taken if the file has one).
    """

    def __init__(
        self,
        w: TensorSource,
        name: str,
        n: int,
        k: int,
        *,
        bias: str = "no",
        row_order: Tensor | None = None,
        column_order: Tensor | None = None,
    ):
        super().__init__(w, name, n, k)
        self.out_features, self.in_features = n, k
        self.native, self.half_dtype = w.native, w.half_dtype
        has_bias = bias == "yes" or (bias == "optional" and w.has(f"{name}.bias"))
        self.bias = nn.Parameter(w.f32(f"{name}.bias", n), requires_grad=False) if has_bias else None
        if not is_identity(row_order):
            # Whole rows, by one thread: torch's would wake all of them for each small matrix, and wait for the last.
            self.qweight = torch.from_numpy(self.qweight.numpy()[row_order.numpy()])
            if has_bias:
                self.bias.data = self.bias.data[row_order]
        # Entry c: the input that the file's column c multiplies.
        inputs = None if is_identity(column_order) else column_order.argsort()
        self.register_buffer("file_inputs", inputs, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix, f32 [N, K], computed on each access; writing to it changes nothing."""
        return super().weight if self.file_inputs is None else super().weight[:, self.file_inputs.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        if self.file_inputs is not None:
            x = x[..., self.file_inputs]
        with multiplied_in(self.half_dtype):
            return quant_linear(x, self.qweight, self.qtype, self.bias, self.native)


def is_identity(order: Tensor | None) -> bool:
    return order is None or torch.equal(order, torch.arange(len(order)))


def half_split_order(heads: int, dim: int) -> Tensor:
    """The row_order of a Q or K projection whose file holds rotary pairs (0, 1), (2, 3), ... of each head side by side:
    they go to halves (0, 2, ...), (1, 3, ...).
    """
    return torch.arange(heads * dim).reshape(heads, dim // 2, 2).transpose(1, 2).reshape(-1)


class F32Linear(Module):
    """A Linear whose weight is f32 whatever the load mode: for routers and gates, which are small and sensitive."""

    def __init__(self, w: TensorSource, name: str, n: int, k: int, *, bias: str = "no"):
        super().__init__()
        self.weight = nn.Parameter(w.f32(f"{name}.weight", n, k), requires_grad=False)
        self.bias = nn.Parameter(w.f32(f"{name}.bias", n), requires_grad=False) if bias == "yes" else None
        self.out_features, self.in_features = n, k
        self.gguf_name = w.prefix + name

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad and torch.is_grad_enabled():  # which is lost on the way to bytes
            return nn.functional.linear(x.float(), self.weight, self.bias).to(x.dtype)
        return quant_linear(x, self.weight.view(torch.uint8), ggml_types.F32, self.bias, False)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, F32, {self.gguf_name}"


class Embedding(Packed):
    """Rows of a packed table. ids [...] -> f32 [..., C], multiplied by `scale` (gemma: sqrt(C))."""

    def __init__(self, w: TensorSource, name: str, n: int, k: int, *, scale: float = 1.0):
        super().__init__(w, name, n, k)
        self.num_embeddings, self.embedding_dim, self.scale = n, k, scale

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.qweight, self.qtype, self.scale)
