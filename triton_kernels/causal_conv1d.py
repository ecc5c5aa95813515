"""Causal depthwise convolution of K taps with SiLU behind it, over sequences that go on from a state; f32 inside.

A program owns a row's BLOCK channels and looks for its inputs backwards through the batch, and then in the state, which
all rows read before `state_kernel`, whose programs own a sequence's last row, puts the new one there. A slot out of
range gives NaN, and nothing is written for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.causal_conv1d import causal_conv1d as op
from dasllama_torch.ops.causal_conv1d import causal_conv1d_update as op_update
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.require import require
from dasllama_torch.triton_kernels.functions import logistic
from dasllama_torch.triton_kernels.launch import check, on_device, rows_of
from dasllama_torch.triton_kernels.sequences import check_slots, is_last

BLOCK = 256


@triton.jit
def causal_conv1d_kernel(y, x, x_stride, weight, state, slots, S, C, K, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < C
    slot = tl.load(slots + t)
    sums = tl.zeros([BLOCK], tl.float32)
    if (slot >= 0) & (slot < S):
        v = tl.load(x + t.to(tl.int64) * x_stride + c, mask=live, other=0.0).to(tl.float32)
        sums += v * tl.load(weight + c * K + (K - 1), mask=live, other=0.0)
        back, i = 1, t - 1  # rows back in the sequence, rows of the batch
        while (back < K) & (i >= 0):
            if tl.load(slots + i) == slot:
                v = tl.load(x + i.to(tl.int64) * x_stride + c, mask=live, other=0.0).to(tl.float32)
                sums += v * tl.load(weight + c * K + (K - 1 - back), mask=live, other=0.0)
                back += 1
            i -= 1
        # The input `j` rows back stands at K - 1 - j of a state that the batch has added back - 1 rows to.
        past = state + slot.to(tl.int64) * (K - 1) * C
        for j in range(back, K):
            v = tl.load(past + (K - 1 - (j - back + 1)) * C + c, mask=live, other=0.0)
            sums += v * tl.load(weight + c * K + (K - 1 - j), mask=live, other=0.0)
    out = tl.where(slot >= S, float("nan"), sums * logistic(sums))
    tl.store(y + t.to(tl.int64) * C + c, out.to(y.dtype.element_ty), mask=live)


@triton.jit
def state_kernel(state, x, x_stride, slots, T, S, C, K, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    slot = tl.load(slots + t)
    if (slot >= 0) & (slot < S):
        if is_last(slots, t, T, slot):
            c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            live = c < C
            own = state + slot.to(tl.int64) * (K - 1) * C
            rows = 0  # of the sequence in the batch, as far as they count
            i = t
            while (rows < K - 1) & (i >= 0):
                rows += (tl.load(slots + i) == slot).to(tl.int32)
                i -= 1
            for j in range(K - 1 - rows):  # what stays moves up: nothing is read that was written before
                v = tl.load(own + (j + rows) * C + c, mask=live, other=0.0)
                tl.store(own + j * C + c, v, mask=live)
            at, i = K - 2, t
            while (at >= K - 1 - rows) & (i >= 0):
                if tl.load(slots + i) == slot:
                    v = tl.load(x + i.to(tl.int64) * x_stride + c, mask=live, other=0.0).to(tl.float32)
                    tl.store(own + at * C + c, v, mask=live)
                    at -= 1
                i -= 1


def _convolve(name: str, x: Tensor, weight: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    C, K = weight.shape
    rows = rows_of(x)
    T = len(rows)
    check(name, "x", x, x)
    check(name, "weight", weight, x, (torch.float32,), (x.shape[-1], K))
    check(name, "state", state, x, (torch.float32,), (len(state), K - 1, C))
    check_slots(name, "slots", slots, T, x)
    require(state.is_contiguous(), lambda: f"dasllama::{name}: state must be contiguous")
    count_call(name, "triton")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        weight, slots, grid = weight.contiguous(), slots.contiguous(), (T, triton.cdiv(C, BLOCK))
        with on_device(x):
            causal_conv1d_kernel[grid](
                y, rows, rows.stride(0), weight, state, slots, len(state), C, K, BLOCK, num_warps=2
            )
            if K > 1:
                state_kernel[grid](state, rows, rows.stride(0), slots, T, len(state), C, K, BLOCK, num_warps=2)
    return y


@implement(op_update, "CUDA")
def causal_conv1d_update(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    return _convolve("causal_conv1d_update", x, weight, state, slots)


@implement(op, "CUDA")
def causal_conv1d(x: Tensor, weight: Tensor, row_seq: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    new = state.clone(memory_format=torch.contiguous_format)
    return _convolve("causal_conv1d", x, weight, new, row_seq), new
