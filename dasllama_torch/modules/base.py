"""Module: nn.Module whose own tensors keep their dtype."""

from torch import nn


class Module(nn.Module):
    """Base of the modules that hold weights.

    Packed bytes, norm weights and biases keep their dtype under `.half()`, `.bfloat16()` and `.to(dtype)`: what a file
    stores in f32 is meant to stay f32. Moves to another device act as usual.
    """

    def _apply(self, fn, recurse=True):
        def keep_dtype(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)
