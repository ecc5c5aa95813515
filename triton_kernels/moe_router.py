"""The choice of experts for a token, and their weights, f32 inside; formulas are those of `ops.moe_router`.

A program owns a row of E logits and takes the best k times. Scores compare as integers: NaN above all numbers, of
equal ones the lower id first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import moe_router as formulas
from dasllama_torch.ops.moe_router import _check as check_router
from dasllama_torch.ops.moe_router import moe_router as op
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.triton_kernels.functions import exp, logistic
from dasllama_torch.triton_kernels.launch import on_device, rows_of
from dasllama_torch.triton_kernels.ordering import LAST, rank
from dasllama_torch.triton_kernels.rehearsal import is_rehearsal

SIGMOID, TINY = tl.constexpr(formulas.SIGMOID), tl.constexpr(formulas._TINY)


@triton.jit
def moe_router_kernel(
    weights, ids, logits, stride, bias, E, k, scale,
    GATE: tl.constexpr, RENORMALIZE: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """weights, ids: [T, k]; EP, KP: E and k rounded up to powers of two."""
    t = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, EP), tl.arange(0, KP)
    live = i < E
    v = tl.load(logits + t * stride + i, mask=live, other=0.0).to(tl.float32)
    score = logistic(v) if GATE == SIGMOID else v
    choice = score if bias is None else score + tl.load(bias + i, mask=live, other=0.0)
    order = tl.where(live, rank(choice, i), LAST)
    chosen, expert = tl.zeros([KP], tl.float32), tl.zeros([KP], tl.int64)
    for n in range(k):
        best = 0x7FFFFFFF - (tl.max(order, 0) & 0x7FFFFFFF)
        chosen = tl.where(j == n, tl.sum(tl.where(i == best, score, 0.0), 0), chosen)
        expert = tl.where(j == n, best, expert)
        order = tl.where(i == best, LAST, order)
    if GATE != SIGMOID:
        top = tl.sum(tl.where(j == 0, chosen, 0.0), 0)  # NaN if any is
        chosen = tl.where(j < k, exp(chosen - top), 0.0)
        chosen /= tl.sum(chosen if RENORMALIZE else tl.where(live, exp(v - top), 0.0), 0)
    elif RENORMALIZE:
        chosen /= tl.sum(chosen, 0) + TINY
    tl.store(weights + t * k + j, chosen * scale, mask=j < k)
    tl.store(ids + t * k + j, expert, mask=j < k)


@implement(op, "CUDA")
def moe_router(
    logits: Tensor, bias: Tensor | None, top_k: int, gate: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    check_router(logits, bias, top_k, gate)
    count_call("moe_router", "triton")
    shape, E = (*logits.shape[:-1], top_k), logits.shape[-1]
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if is_rehearsal():
        ids.zero_()  # who chose the experts may look up what belongs to them
    if ids.numel():
        rows = rows_of(logits)
        bias = bias if bias is None else bias.contiguous()
        ep, kp = triton.next_power_of_2(max(E, 2)), triton.next_power_of_2(max(top_k, 2))
        with on_device(logits):
            moe_router_kernel[(len(rows),)](
                weights, ids, rows, rows.stride(0), bias, E, top_k, scale, gate, renormalize, ep, kp,
                num_warps=max(1, min(4, ep // 128)),
            )  # fmt: skip
    return weights, ids
