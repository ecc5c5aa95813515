"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): linear attention whose state forgets and corrects itself.

T rows of S sequences, G key heads, H value heads, Dk and Dv their dims. A head's state M [Dk, Dv] goes row by row:

    M <- exp(g) M;   M <- M + k (beta (v - k M));   y = q M,   with k / |k| for k and q / |q| / sqrt(Dk) for q.

Rows of one sequence stand in the order of their positions, anywhere in the batch. Token by token, in chunks, whole,
alone or among others: the same bits.
"""

import torch
from torch import Tensor

from dasllama_torch.ops.causal_conv1d import sequences
from dasllama_torch.ops.registry import define, refuse_gradient, register_backward

EPS = 1e-6  # below the root of the sum of squares, as in transformers


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """f32 [T, H, ...] each, unit q and k repeated for the value heads that they serve."""
    H, group = v.shape[-2], v.shape[-2] // k.shape[-2]
    unit_q, unit_k = (_unit(x.reshape(-1, *x.shape[-2:]).float()).repeat_interleave(group, 1) for x in (q, k))
    gates = (x.reshape(-1, H).float() for x in (g, beta))
    return unit_q * q.shape[-1] ** -0.5, unit_k, v.reshape(-1, *v.shape[-2:]).float(), *gates


def _step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The next state [H, Dk, Dv] and what it takes in, [H, Dv], of one row."""
    faded = state * g.exp()[:, None, None]
    taken = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, faded))
    return faded + torch.einsum("hk,hv->hkv", k, taken), taken


@define(
    fake=lambda q, k, v, g, beta, state, slots: v.new_empty(v.shape),
    mutates=("state",),
    touches=lambda args: args["slots"],
)
def gated_delta_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """y [..., H, Dv] of q, k [..., G, Dk], v [..., H, Dv], g and beta [..., H], in v.dtype; f32 inside.

    Value head h reads key head h // (H / G). state: f32 [slots, H, Dk, Dv]; a sequence goes on from its own and leaves
    it there. slots: int32 [T], of each of the T rows that the leading dims make; -1 marks an inert row, which yields
    zeros. A slot out of range raises and changes nothing.
    """
    if ((slots < -1) | (slots >= state.shape[0])).any():
        raise ValueError(f"dasllama::gated_delta_update: slots must be -1 (inert) or less than {state.shape[0]}")
    q_, k_, v_, g_, beta_ = _heads(q, k, v, g, beta)
    y = torch.zeros_like(v_)
    for slot, rows in sequences(slots).items():
        for t in rows:
            state[slot], _ = _step(state[slot], k_[t], v_[t], g_[t], beta_[t])
            y[t] = torch.einsum("hk,hkv->hv", q_[t], state[slot])
    return y.reshape(v.shape).to(v.dtype)


refuse_gradient(gated_delta_update, "dasllama::gated_delta_rule leaves the state alone and has a gradient")


@define(fake=lambda q, k, v, g, beta, row_seq, state: (v.new_empty(v.shape), state.new_empty(state.shape)))
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_seq: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_update` as a function: state f32 [S, H, Dk, Dv] of each sequence -> y [..., H, Dv], the new states.

    row_seq: int32 [T], sequence of each row, -1 for an inert row. The gradient of y is with respect to q, k, v, g and
    beta; states are constants.
    """
    new = state.clone()
    return gated_delta_update.reference(q, k, v, g, beta, new, row_seq), new


def _backward_fake(grad, q, k, v, g, beta, row_seq, state):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta))


@define(fake=_backward_fake)
def gated_delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_seq: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y of `gated_delta_rule` with respect to q, k, v, g and beta: the recurrence backwards."""
    q_, k_, v_, g_, beta_ = _heads(q, k, v, g, beta)
    dy = grad.reshape(v_.shape).float()
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in (q_, k_, v_, g_, beta_))
    for seq, rows in sequences(row_seq).items():
        states, taken = [state[seq].float()], []
        for t in rows:
            after, took = _step(states[-1], k_[t], v_[t], g_[t], beta_[t])
            states.append(after)
            taken.append(took)
        dm = torch.zeros_like(states[0])
        for i, t in reversed(list(enumerate(rows))):
            faded = states[i] * g_[t].exp()[:, None, None]
            dq[t] = torch.einsum("hkv,hv->hk", states[i + 1], dy[t])
            dm = dm + torch.einsum("hk,hv->hkv", q_[t], dy[t])  # nothing that is read is written again: see `define`
            dtaken = torch.einsum("hk,hkv->hv", k_[t], dm)
            dv[t] = dvalue = beta_[t][:, None] * dtaken
            dbeta[t] = (dtaken * (v_[t] - torch.einsum("hk,hkv->hv", k_[t], faded))).sum(-1)
            dk[t] = torch.einsum("hkv,hv->hk", dm, taken[i]) - torch.einsum("hkv,hv->hk", faded, dvalue)
            dm = dm - torch.einsum("hk,hv->hkv", k_[t], dvalue)
            dg[t] = (dm * faded).sum((1, 2))
            dm = dm * g_[t].exp()[:, None, None]

    def through_unit(x: Tensor, d: Tensor, scale: float) -> Tensor:
        """From d of the repeated, scaled unit vectors [T, H, Dk] to d of x [..., G, Dk]."""
        rows = x.reshape(-1, *x.shape[-2:]).float()
        r = torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPS)
        d = d.unflatten(1, (rows.shape[1], -1)).sum(2) * scale
        return ((d - rows * r * r * (rows * d).sum(-1, keepdim=True)) * r).reshape(x.shape).to(x.dtype)

    scale = q.shape[-1] ** -0.5
    return (
        through_unit(q, dq, scale),
        through_unit(k, dk, 1.0),
        *(d.reshape(x.shape).to(x.dtype) for d, x in ((dv, v), (dg, g), (dbeta, beta))),
    )


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return *gated_delta_rule_backward(grad, *ctx.saved_tensors), None, None


register_backward(gated_delta_rule, _backward, _setup)
