"""The gated delta rule, row by row, f32 throughout; the formula is that of `ops.gated_delta_rule`. For more than STEPS
rows there is the form in chunks (`delta_chunks.py`).

A program owns BV columns of a head's state M [Dk, Dv] of one sequence, which do without the others, and keeps them in
registers while it goes through the sequence's rows, from its first in the batch on; programs of other rows have
nothing to do. T rows, G key heads, H value heads. A slot out of range gives NaN, and nothing is written for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import gated_delta_rule as formulas
from dasllama_torch.ops.gated_delta_rule import gated_delta_rule as op
from dasllama_torch.ops.gated_delta_rule import gated_delta_update as op_update
from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.require import require
from dasllama_torch.triton_kernels.delta_chunks import WIDEST, delta_chunks
from dasllama_torch.triton_kernels.functions import exp
from dasllama_torch.triton_kernels.launch import check, heads_of, on_device, rows_of
from dasllama_torch.triton_kernels.sequences import check_slots, is_first

EPS = tl.constexpr(formulas.EPS)
# Rows, up to which they are gone through one by one. Of one sequence, chunks are faster from 40 on, but a captured step
# has up to this many sequences of a row each.
STEPS = 64


@triton.jit
def _unit(x, i, D):
    v = tl.load(x + i, mask=i < D, other=0.0).to(tl.float32)
    return v / tl.sqrt_rn(tl.sum(v * v, 0) + EPS)


@triton.jit
def gated_delta_kernel(
    y, q, q_row, q_head, k, k_row, k_head, v, v_row, v_head, g, g_row, beta, beta_row, state, slots,
    T, S, G, H, Dk, Dv, scale, DKP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    first, h = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, DKP), tl.program_id(2) * BV + tl.arange(0, BV)
    slot = tl.load(slots + first)
    if (slot < 0) | (slot >= S):
        none = tl.where(slot < 0, 0.0, float("nan")) + tl.zeros([BV], tl.float32)
        tl.store(y + (first.to(tl.int64) * H + h) * Dv + j, none.to(y.dtype.element_ty), mask=j < Dv)
    elif is_first(slots, first, slot):
        own = state + ((slot.to(tl.int64) * H + h) * Dk + i[:, None]) * Dv + j[None, :]
        inside = (i < Dk)[:, None] & (j < Dv)[None, :]
        M = tl.load(own, mask=inside, other=0.0)
        group = h // (H // G)
        for row in range(first, T):
            if tl.load(slots + row) == slot:
                t = tl.zeros([], tl.int64) + row
                key = _unit(k + t * k_row + group * k_head, i, Dk)
                query = _unit(q + t * q_row + group * q_head, i, Dk) * scale
                value = tl.load(v + t * v_row + h * v_head + j, mask=j < Dv, other=0.0).to(tl.float32)
                M *= exp(tl.load(g + t * g_row + h).to(tl.float32))
                taken = tl.load(beta + t * beta_row + h).to(tl.float32) * (value - tl.sum(key[:, None] * M, 0))
                M += key[:, None] * taken[None, :]
                out = tl.sum(query[:, None] * M, 0)
                tl.store(y + (t * H + h) * Dv + j, out.to(y.dtype.element_ty), mask=j < Dv)
        tl.store(own, M, mask=inside)


def _apply(name: str, q, k, v, g, beta, state: Tensor, slots: Tensor) -> Tensor:
    H, Dv = v.shape[-2:]
    G, Dk = k.shape[-2:]
    for what, t, shape in (
        ("q", q, k.shape),
        ("k", k, (*v.shape[:-2], G, Dk)),
        ("v", v, v.shape),
        ("g", g, v.shape[:-1]),
        ("beta", beta, v.shape[:-1]),
    ):
        check(name, what, t, v, shape=shape)
    check(name, "state", state, v, (torch.float32,), (len(state), H, Dk, Dv))
    require(
        H % G == 0 and state.is_contiguous(),
        lambda: f"dasllama::{name}: wanted a contiguous state and as many or several times as many value heads as {G}",
    )
    heads = [heads_of(t) for t in (q, k, v)]
    gates = [rows_of(t) for t in (g, beta)]
    T = len(heads[2])
    check_slots(name, "slots", slots, T, v)
    in_chunks = T > STEPS and Dk <= WIDEST
    count_call(name, "triton/chunks" if in_chunks else "triton/steps")
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if in_chunks and y.numel():
        delta_chunks(y, *heads, *gates, state, slots)
    elif y.numel():
        dkp = triton.next_power_of_2(Dk)
        bv = min(16, triton.next_power_of_2(Dv))
        strided = [part for t in heads for part in (t, *t.stride()[:2])]
        strided += [part for t in gates for part in (t, t.stride(0))]
        with on_device(v):
            gated_delta_kernel[(T, H, triton.cdiv(Dv, bv))](
                y, *strided, state, slots.contiguous(), T, len(state), G, H, Dk, Dv, Dk**-0.5, dkp, bv,
                num_warps=max(1, dkp * bv // 1024),
            )  # fmt: skip
    return y


@implement(op_update, "CUDA")
def gated_delta_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    return _apply("gated_delta_update", q, k, v, g, beta, state, slots)


@implement(op, "CUDA")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_seq: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    new = state.clone(memory_format=torch.contiguous_format)
    return _apply("gated_delta_rule", q, k, v, g, beta, new, row_seq), new
