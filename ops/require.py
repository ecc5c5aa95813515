"""Refusing what an op cannot take."""

from collections.abc import Callable

import torch


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """RuntimeError of the message unless the condition holds. `torch._check` imports sympy where it is first called,
    which takes most of a second; here only where something symbolic is traced."""
    if condition is True:
        return
    if condition is False:
        raise RuntimeError(message())
    torch._check(condition, message)
