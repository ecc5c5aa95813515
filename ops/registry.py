"""How an op comes to be: schema and reference from one Python function, a fake, and the kernels of the backends.

`define` turns a reference into `torch.ops.dasllama.<name>`. The reference serves every device that has no kernel of its
own, and each time it does so it is counted: `report()` says which kernel served each op, `strict()` forbids references.
CPU kernels live in the shared library `_C` (LibTorch stable ABI) and register themselves on the CPU key when it loads.
The package of another backend is imported when an op first meets a tensor of its device, and calls `implement`.
"""

import contextlib
import ctypes
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from dasllama_torch.errors import KernelError

_LIBRARY = torch.library.Library("dasllama", "DEF")
_REFERENCES: dict[torch._ops.OpOverload, Callable] = {}
_python_calls: Counter[tuple[str, str]] = Counter()
_strict = False
_backends = {"cuda": "dasllama_torch.triton_kernels"}  # by device type; those not imported yet
_fusions: dict[str, Callable[[], contextlib.AbstractContextManager]] = {}
_preparations: dict[str, Callable[[Callable[[], object]], contextlib.AbstractContextManager]] = {}


class Cost(NamedTuple):
    """What one call of an op has to do at least. nbytes: of memory read and written. operations: of its products, a
    multiplication and an addition each. work: sizes and type, for people. integer: whether its products are of bytes.
    """

    nbytes: int
    operations: int
    work: str
    integer: bool = False


def define(
    *,
    fake: Callable,
    mutates: tuple[str, ...] = (),
    touches: Callable | None = None,
    cost: Callable[..., Cost] | None = None,
):
    """Decorator: the function's signature becomes the schema, its body the reference, and the result is the op.

    fake: same arguments, returns empty outputs of the right shape, dtype and device (for meta tensors and tracing).
    mutates: names of the arguments that the op writes. touches: arguments by name -> indices of dim 0 outside of which
    it leaves them alone; a cache may be address space for more than the machine's memory. cost: same arguments -> Cost;
    by default every argument is read, every result written, and what is touched both (`cost_of`).
    The returned `OpOverload` has `.reference`, which other references call so that a reference never meets a kernel.
    Of a gradient, an op named "..._backward", autograd records the reference, and so second derivatives are had.
    """

    def wrap(reference: Callable):
        name = reference.__name__
        _LIBRARY.define(
            name + torch.library.infer_schema(reference, mutates_args=mutates), tags=(torch.Tag.pt2_compliant_tag,)
        )

        def counted(*args, **kwargs):
            if _import_backend(next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")):
                return op(*args, **kwargs)
            return fall_back(op, args, kwargs, "no kernel serves this")

        def recorded(*args, **kwargs):
            if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
                return fall_back(op, args, kwargs, "no kernel has a second derivative")
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        _LIBRARY.impl(name, counted, "CompositeExplicitAutograd")
        if name.endswith("_backward"):
            _LIBRARY.impl(name, recorded, "Autograd")
        torch.library.register_fake(f"dasllama::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.dasllama, name).default
        op.reference = reference
        op.touches, op.cost = touches, cost
        op.__doc__ = reference.__doc__
        _REFERENCES[op] = reference
        return op

    return wrap


def _import_backend(device_type: str) -> bool:
    """Import a device's backend if there is one that was not asked for yet."""
    if device_type not in _backends:
        return False
    name = _backends[device_type]
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise KernelError(f"tensors on {device_type} need {name}, which cannot be imported: {error}") from error
    _backends.pop(device_type, None)
    return True


def implement(op, key: str):
    """Decorator: the function, of the op's signature, serves `op` for tensors of a dispatch key, such as "CUDA".

    It counts its calls itself, by the name of what served them (`count_call`).
    """

    def wrap(kernel: Callable):
        _LIBRARY.impl(op._schema.name.removeprefix("dasllama::"), kernel, key)
        return kernel

    return wrap


def provide_fusion(device_type: str, mode: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Called by a backend: `fusing` gives mode() for its devices."""
    _fusions[device_type] = mode


def fusing(device: torch.device) -> contextlib.AbstractContextManager:
    """Context for a forward on a device whose ops nobody watches, and whose tensors nobody changes in between: its
    backend may launch several of them as one. Rows are single ones: none sees what another one writes."""
    _import_backend(device.type)
    return _fusions.get(device.type, contextlib.nullcontext)()


def provide_preparation(
    device_type: str, context: Callable[[Callable[[], object]], contextlib.AbstractContextManager]
) -> None:
    """Called by a backend: `preparing` gives context(rehearse) for its devices."""
    _preparations[device_type] = context


def preparing(device: torch.device, rehearse: Callable[[], object]) -> contextlib.AbstractContextManager:
    """Context for a forward on a device. A backend that compiles kernels where they are first launched may call
    `rehearse` in the middle of it, once, to see which ones it will want, and make them all at the same time. `rehearse`
    launches what the forward does, and more if that will be wanted soon, but changes nothing that stays."""
    _import_backend(device.type)
    context = _preparations.get(device.type)
    return context(rehearse) if context else contextlib.nullcontext()


def fall_back(op, args: tuple, kwargs: dict, why: str):
    """The reference's result, counted as such, for what no kernel serves; strict mode raises."""
    name = op._schema.name.removeprefix("dasllama::")
    if _strict:
        raise KernelError(f"op dasllama::{name}: {why}, and strict mode forbids the reference")
    _python_calls[name, "reference"] += 1
    return op.reference(*args, **kwargs)


def register_backward(op, backward: Callable, setup_context: Callable) -> None:
    """Give `op` a gradient formula, as `torch.library.register_autograd` does. What that would lose without a word
    raises `KernelError`: tangents of forward-mode differentiation, and the gradient of an argument for which the
    formula gives None though it is wanted."""

    def complete(ctx, *grads):
        found = backward(ctx, *grads)
        for argument, wanted, gradient in zip(op._schema.arguments, ctx.needs_input_grad, found, strict=True):
            if wanted and gradient is None:
                raise KernelError(f"op {op._schema.name}: {argument.name} requires grad, but has no gradient here")
        return found

    differentiated = make_autograd_impl(op, Info(complete, setup_context))

    def checked(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0:
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                    raise KernelError(
                        f"op {op._schema.name}: {argument.name} has a tangent, but no op of this package has a "
                        "derivative in forward mode; torch.autograd.functional.jvp takes two in reverse mode"
                    )
        return differentiated(keyset, *args, **kwargs)

    _LIBRARY.impl(op._schema.name.removeprefix("dasllama::"), checked, "Autograd", with_keyset=True)


def refuse_gradient(op, instead: str) -> None:
    """Make `op` raise `KernelError` for an input that requires grad while grad mode is on; `instead` says what has one.

    For ops over caches, which have no gradient. Costs nothing under `inference_mode`, which skips autograd's keys.
    """

    def checked(*args, **kwargs):
        if torch.is_grad_enabled():
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise KernelError(
                        f"op {op._schema.name}: {argument.name} requires grad, but this op has no gradient; {instead}"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    _LIBRARY.impl(op._schema.name.removeprefix("dasllama::"), checked, "Autograd")


def cost_of(op, args: tuple, kwargs: dict, result) -> Cost:
    """What a call of an op of this package had to do; args, kwargs: as it was called; result: what it returned."""
    bound = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    if op.cost is not None:
        return op.cost(**bound)
    nbytes = sum(tensor.nbytes for tensor, _ in _tensors(result, result))
    tensors = {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
    for argument in op._schema.arguments:
        if argument.name in tensors:
            value = tensors[argument.name]
            nbytes += 2 * _touched(op, value, bound).nbytes if argument.is_write else value.nbytes
    return Cost(nbytes, 0, " x ".join(map(str, next(iter(tensors.values())).shape)) if tensors else "")


# ---- the CPU library ------------------------------------------------------------------------------------------------


def _load_library() -> ctypes.CDLL:
    found = sorted(Path(__file__).parent.glob("_C*.so")) + sorted(Path(__file__).parent.glob("_C*.pyd"))
    if not found:
        raise KernelError(
            f"the CPU kernels are not built: no _C*.so in {Path(__file__).parent}; "
            "run `pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(str(found[0]))
    library = ctypes.CDLL(str(found[0]))
    library.dasllama_report.restype = ctypes.c_size_t
    library.dasllama_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.dasllama_isas.restype = ctypes.c_char_p
    library.dasllama_set_isa.argtypes = [ctypes.c_char_p]
    library.dasllama_set_isa.restype = ctypes.c_int
    library.dasllama_kernels.restype = ctypes.c_void_p
    return library


native_library = _load_library()


isa_epoch = 0


def isas() -> list[str]:
    """Instruction sets whose kernels this machine can run, slowest first: scalar, and avx2, avx512vnni or neon."""
    return native_library.dasllama_isas().decode().split()


def set_isa(name: str | None) -> None:
    """Serve CPU ops with the kernels of one instruction set of `isas`; None picks the best. For tests."""
    global isa_epoch
    isa_epoch += 1  # recorded programs hold what one instruction set made
    if native_library.dasllama_set_isa((name or "").encode()) != 0:
        raise KernelError(f"instruction set {name!r} is not available here; available: {', '.join(isas())}")


# ---- who served what ------------------------------------------------------------------------------------------------


def report() -> dict[str, dict[str, int]]:
    """Calls since the last `reset_report`, by op and kernel: `{"quant_linear": {"cpu/avx2": 210}, ...}`.

    A kernel is named `<backend>/<variant>`; `reference` is the plain PyTorch formula.
    """
    size = native_library.dasllama_report(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    native_library.dasllama_report(buffer, size + 1)
    calls: dict[str, dict[str, int]] = {}
    for line in buffer.value.decode().splitlines():
        op, kernel, count = line.split("\t")
        calls.setdefault(op, {})[kernel] = int(count)
    for (op, kernel), count in _python_calls.items():
        calls.setdefault(op, {})[kernel] = count
    return calls


def count_call(op: str, kernel: str) -> None:
    """Count what Python serves for `report`."""
    _python_calls[op, kernel] += 1


def count_calls(calls: Counter[tuple[str, str]]) -> None:
    """Count calls, by op and kernel, that a graph of a GPU's work does again."""
    _python_calls.update(calls)


@contextlib.contextmanager
def counting():
    """Context: what Python serves within it goes into the counter that this yields, and into no report."""
    global _python_calls
    before, _python_calls = _python_calls, Counter()
    try:
        yield _python_calls
    finally:
        _python_calls = before


def reset_report() -> None:
    """Set all counts of `report` to zero."""
    native_library.dasllama_reset_report()
    _python_calls.clear()


@contextlib.contextmanager
def strict():
    """Within this context an op that only its reference could serve raises `KernelError` instead."""
    global _strict
    before, _strict = _strict, True
    try:
        yield
    finally:
        _strict = before


# ---- running against the oracle -------------------------------------------------------------------------------------


class use_reference(TorchDispatchMode):
    """Context: every dasllama op runs its reference, whatever kernels exist. For tests and for doubt."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reference = _REFERENCES.get(func)
        return (reference or func)(*args, **(kwargs or {}))


class compare_to_reference(TorchDispatchMode):
    """Context: every dasllama op runs both its kernel and its reference on the same inputs.

    rtol, atol: a larger difference raises `KernelError` naming the op; None collects only.
    `worst`: after use, `{op name: largest |kernel - reference|}` over all outputs and mutated arguments.
    """

    def __init__(self, rtol: float | None = 1e-4, atol: float = 1e-5):
        super().__init__()
        self.rtol, self.atol = rtol, atol
        self.worst: dict[str, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reference = _REFERENCES.get(func)
        if reference is None:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        mutated = [argument.name for argument in func._schema.arguments if argument.is_write]
        bound = dict(zip(names, args, strict=False)) | kwargs
        before = {name: _touched(func, bound[name], bound).clone() for name in mutated}
        result = func(**bound)
        after = {name: _touched(func, bound[name], bound).clone() for name in mutated}
        _restore(func, bound, before)
        wanted = reference(**bound)
        pairs = [*_tensors(result, wanted), *((after[name], _touched(func, bound[name], bound)) for name in mutated)]
        for got, want in pairs:
            self._check(func._schema.name.removeprefix("dasllama::"), got, want)
        _restore(func, bound, after)
        return result

    def _check(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        got, want = got.double(), want.double()
        # NaN where both are NaN is agreement (guard rows of a cache); NaN on one side only is not.
        difference = torch.where(got.isnan() & want.isnan(), 0.0, (got - want).abs()).nan_to_num(nan=float("inf"))
        worst = difference.max().item() if difference.numel() else 0.0
        self.worst[name] = max(self.worst.get(name, 0.0), worst)
        if self.rtol is not None and (difference > self.atol + self.rtol * want.abs().nan_to_num()).any():
            raise KernelError(f"op dasllama::{name} differs from its reference by {worst:.3g}")


def _rows(func, tensor: torch.Tensor, bound: dict) -> torch.Tensor:
    rows = func.touches(bound).unique()
    return rows[(rows >= 0) & (rows < tensor.shape[0])]  # others are for the op to refuse


def _touched(func, tensor: torch.Tensor, bound: dict) -> torch.Tensor:
    """What the op may change of a tensor that it mutates."""
    return tensor if func.touches is None else tensor[_rows(func, tensor, bound)]


def _restore(func, bound: dict, states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        if func.touches is None:
            bound[name].copy_(state)
        else:
            bound[name][_rows(func, bound[name], bound)] = state


def _tensors(result, wanted):
    if isinstance(result, torch.Tensor):
        return [(result, wanted)]
    return [] if result is None else list(zip(result, wanted, strict=True))
