"""Module and ModuleList: torch's own, but for tensors that keep their dtype, and for an epoch that says when a recorded
step is no longer what the modules would do."""

import functools
from collections.abc import Callable

from torch import nn

_epoch = 0
when_moving: list[Callable[[], object]] = []  # called before tensors of modules move: who holds on to their memory


def epoch() -> int:
    """Grows whenever anything was done to any of the package's modules that could change what a forward does: a hook
    was added, an attribute, parameter, buffer or submodule set, tensors moved or cast, a method of a class replaced.

    What does not show: a tensor's own values (recorded steps read them where they lie) and its `data`, a hook's
    removal, and, until `watch`, what is written into `_parameters`, `_buffers` and `_modules` past the module's
    methods.
    Source of the idea: guards as in torch.compile, reduced to one number.
    """
    return _epoch


def _bump() -> None:
    global _epoch
    _epoch += 1


def _bumping(cls: type, name: str):
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        _bump()
        return original(self, *args, **kwargs)

    return method


class _WatchedType(type):
    """Whatever changes a class bumps the epoch."""

    def __setattr__(cls, name, value):
        _bump()
        super().__setattr__(name, value)

    def __delattr__(cls, name):
        _bump()
        super().__delattr__(name)


class Watched(nn.Module, metaclass=_WatchedType):
    """Whatever changes a module or its class bumps the epoch."""

    def __setattr__(self, name, value):
        _bump()
        super().__setattr__(name, value)

    def __delattr__(self, name):
        _bump()
        super().__delattr__(name)


for _name in (  # these go around __setattr__
    "add_module", "register_buffer", "register_parameter", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook",
):  # fmt: skip
    setattr(Watched, _name, _bumping(nn.Module, _name))


class _WatchedDict(dict):
    """A dict that bumps the epoch whenever something is written to it."""


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_WatchedDict, _name, _bumping(dict, _name))


def watch(module: Watched) -> None:
    """From now on let the epoch tell, too, of what is written into the module's dicts past its methods."""
    for name in ("_parameters", "_buffers", "_modules"):
        if type(module.__dict__[name]) is dict:
            module.__dict__[name] = _WatchedDict(module.__dict__[name])


class Module(Watched):
    """Base of all modules of the package.

    Packed bytes, norm weights and biases keep their dtype under `.half()`, `.bfloat16()` and `.to(dtype)`: what a file
    stores in f32 is meant to stay f32. Moves to another device act as usual.
    """

    def _apply(self, fn, recurse=True):
        _bump()
        for release in when_moving:
            release()

        def keep_dtype(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class ModuleList(Watched, nn.ModuleList):
    """A list of modules, watched like them."""

    def insert(self, index, module):
        _bump()
        super().insert(index, module)
