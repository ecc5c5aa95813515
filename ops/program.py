"""Programs: a forward recorded once, op by op, and run again by torch's threads as one team, without Python, dispatcher
or memory management between the ops (csrc/program.h).

    with recording() as program:
        y = forward(x)           # runs as always
    x.copy_(...)
    program.run()                # writes what the same ops make of the new x into y

What a program reads and writes is the memory that the tensors had while it was recorded. Everything that happened must
have been an op of ours, or a view: what else is seen makes the program void, and `refused` names it. What Python reads
of values (`tolist`, `numpy`) is not seen.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dasllama_torch.errors import KernelError
from dasllama_torch.ops import elementwise
from dasllama_torch.ops.registry import define, native_library

# Views of contiguous tensors that copy others.
_MAY_COPY = {
    torch.ops.aten.contiguous.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.reshape.default,
}

_LIKE = {torch.ops.aten.expand_as.default, torch.ops.aten.view_as.default, torch.ops.aten.reshape_as.default}

_library = native_library
_library.dasllama_record.restype = ctypes.c_void_p
_library.dasllama_record_end.restype = ctypes.c_char_p
_library.dasllama_record_end.argtypes = [ctypes.c_void_p]
_library.dasllama_program_size.restype = ctypes.c_int64
_library.dasllama_program_size.argtypes = [ctypes.c_void_p]
_library.dasllama_program_in_place.argtypes = [ctypes.c_void_p]
_library.dasllama_program_free.argtypes = [ctypes.c_void_p]
_library.dasllama_program_run.restype = ctypes.c_char_p
_library.dasllama_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)]
_library.dasllama_program_op.restype = ctypes.c_char_p
_library.dasllama_program_op.argtypes = [ctypes.c_void_p, ctypes.c_int64]


class Program:
    """What `recording` gives. refused: why it must not be run, or ""."""

    def __init__(self):
        self._handle = _library.dasllama_record()
        if not self._handle:
            raise KernelError("a program is being recorded already")
        self.refused = ""
        weakref.finalize(self, _library.dasllama_program_free, self._handle)

    def __len__(self) -> int:
        """Ops recorded."""
        return _library.dasllama_program_size(self._handle)

    @property
    def last(self) -> str:
        """The op recorded last, or ""."""
        n = len(self)
        return _library.dasllama_program_op(self._handle, n - 1).decode() if n else ""

    @property
    def in_place(self) -> bool:
        """Whether the tensors that are held lie where they lay, contiguous."""
        return bool(_library.dasllama_program_in_place(self._handle))

    def run(self, then: "Program | None" = None, seconds: ctypes.Array | None = None) -> None:
        """Do again what was recorded, and behind it what `then` has recorded, on torch's threads. seconds: doubles that
        take the time of each op of both.

        Raises KernelError for what an op refuses: an id or page out of range.
        """
        handle, refused = (None, "") if then is None else (then._handle, then.refused)
        if self.refused or refused:
            raise KernelError(f"the program is void: {self.refused or refused}")
        error = _library.dasllama_program_run(self._handle, handle, seconds)
        if error is not None:
            raise KernelError(error.decode())

    def profile(self) -> list[tuple[str, float]]:
        """`run`, and for each op in turn its name and the seconds that it took."""
        seconds = (ctypes.c_double * len(self))()
        self.run(seconds=seconds)
        names = [_library.dasllama_program_op(self._handle, i).decode() for i in range(len(self))]
        return list(zip(names, seconds, strict=True))


@define(fake=lambda tensor: None)
def hold(tensor: Tensor) -> None:
    """Makes `Program.in_place` of the program that is being recorded tell of the tensor, contiguous."""


@contextlib.contextmanager
def recording(held: Iterable[Tensor] = ()):
    """Context: everything runs as always, and the program that it yields can run it again.

    held: contiguous tensors that somebody may give other memory to; `Program.in_place` looks at them.
    """
    program = Program()
    try:
        for tensor in held:
            hold(tensor)
        with _Watch(program):
            yield program
    finally:
        refused = _library.dasllama_record_end(program._handle).decode()
        program.refused = program.refused or refused


class OpMode(TorchDispatchMode):
    """Sees every op of a forward as `call(func, args, kwargs)`, which returns its result; sums, products and copies of
    torch become ours."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch when the class is made: True would import torch._dynamo, for seconds, at the first use."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        func, args = ours(func, args, kwargs)
        return self.call(func, args, kwargs)


class _Watch(OpMode):
    """Makes the program void where something happens that it does not record."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program

    def call(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if func.namespace == "dasllama":
            if self.program.last != func._schema.name.removeprefix("dasllama::"):
                self.program.refused = f"{func} cannot be recorded, or was served by its reference"
        elif func._schema.is_mutable or not _is_view(func, result, args):
            self.program.refused = f"{func} is no op of this package and no view"
        return result


def ours(func, args, kwargs):
    """The op and arguments to run in the place of torch's."""
    aten = torch.ops.aten
    if func in (aten.add.Tensor, aten.mul.Tensor) and not kwargs:
        a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(float(x)) for x in args)
        if _are_plain(a, b):
            return (elementwise.add if func is aten.add.Tensor else elementwise.mul), (a, b)
    if func is aten.cat.default and len(args) == 2 and len(args[0]) == 2 and not kwargs:
        (a, b), dim = args
        if _are_plain(a, b) and dim in (-1, a.dim() - 1):
            return elementwise.join, (a, b)
    if func is aten.index.Tensor and _are_plain(args[0]):
        *leading, last = args[1]
        is_last = last is not None and len(args[1]) == args[0].dim() and all(index is None for index in leading)
        if is_last and last.dtype == torch.int64 and (last >= 0).all():
            return elementwise.columns, (args[0], last)
    if func in _MAY_COPY and _are_plain(args[0]) and not args[0].is_contiguous():
        return func, (elementwise.copy(args[0]), *args[1:])
    return func, args


def _are_plain(*tensors: torch.Tensor) -> bool:
    """Whether the elementwise ops take them."""
    return all(t.dtype == torch.float32 and t.dim() <= elementwise.MAX_DIMS for t in tensors)


def _is_view(func, result, args) -> bool:
    if sum(isinstance(arg, torch.Tensor) for arg in args) != 1 and func not in _LIKE:
        return False  # where the view begins may depend on another tensor's values
    results = result if isinstance(result, tuple | list) else (result,)
    memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    return all(isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in memory for r in results)
