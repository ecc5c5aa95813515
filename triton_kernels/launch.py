"""What every launch of a kernel needs."""

import contextlib
import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.lattices import FLOATS
from dasllama_torch.ops.require import require
from dasllama_torch.triton_kernels import blocks

INTERPRETED = triton.knobs.runtime.interpret
# Inline PTX: on NVIDIA's own compiler only. Elsewhere kernels take the plain form beside it.
PTX = torch.version.cuda is not None and not INTERPRETED


@functools.cache
def _overlaps(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def early(t: Tensor) -> dict[str, bool]:
    """Arguments of a launch that may begin while the one before it ends (programmatic dependent launch, from compute
    capability 9.0 on): its kernel calls `await_inputs`."""
    return {"EARLY": True, "launch_pdl": True} if _overlaps(t.device) else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Waits for the results of the launch before, and lets the next one take its place on the card.

    In this order: a launch that came while the one before this one still ran would find most room where that has ended
    first, and have its programs unevenly spread, for as long as they last."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at, size, mask):
    """Asks for `size` bytes from the scalar `at` on, both whole sixteens, to come into the L2 cache; mask [T]: which of
    a program's threads ask. For kernels that are launched early, NVIDIA's alone."""
    at, size = tl.broadcast(at, mask)[0], tl.broadcast(size, mask)[0]
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r,r", [at, size, mask.to(tl.int32)], dtype=tl.uint32, is_pure=False, pack=1,
    )  # fmt: skip


def on_device(t: Tensor):
    """Context: kernels are launched on the device of t."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def aligned(qweight: Tensor, qtype: int) -> Tensor:
    """qweight contiguous, and where words of its type can be read: views at odd offsets are copied."""
    to = math.gcd(blocks.layout(qtype).bytes, 16)
    qweight = qweight.contiguous()
    return qweight if qweight.data_ptr() % to == 0 else qweight.clone()


def rows_for(m: int) -> int:
    """m rounded up to a power of two: kernels for few rows are compiled for 1, 2, 4, 8 and 16."""
    return triton.next_power_of_2(max(m, 1))


def rows_of(x: Tensor) -> Tensor:
    """x [..., C] -> [T, C] whose rows are contiguous, copied only where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def heads_of(x: Tensor) -> Tensor:
    """x [..., H, D] -> [T, H, D] whose heads are contiguous, copied only where it must be."""
    heads = x.reshape(-1, *x.shape[-2:])
    return heads if heads.stride(2) == 1 or heads.shape[2] == 1 else heads.contiguous()


def check(
    op: str,
    what: str,
    t: Tensor,
    like: Tensor,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raise unless t is on the device of `like`, of one of the dtypes and, where one is given, of the shape."""
    require(
        t.device == like.device and t.dtype in dtypes and (shape is None or tuple(t.shape) == tuple(shape)),
        lambda: (
            f"dasllama::{op}: {what} must be {' or '.join(map(str, dtypes))}"
            f"{'' if shape is None else f' {list(shape)}'} on {like.device}, "
            f"found {t.dtype} {list(t.shape)} on {t.device}"
        ),
    )
