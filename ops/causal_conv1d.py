"""Causal depthwise convolution of a few taps with SiLU behind it, over sequences that go on from a state.

T rows of S sequences, C channels, K taps. Rows of one sequence stand in the order of their positions, anywhere in the
batch. Token by token, in chunks, whole, alone or among others: the same bits.
"""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define, refuse_gradient, register_backward


def sequences(ids: Tensor) -> dict[int, list[int]]:
    """Id -> its rows, in order; a row of id -1 is inert."""
    rows: dict[int, list[int]] = {}
    for t, i in enumerate(ids.tolist()):
        if i >= 0:
            rows.setdefault(i, []).append(t)
    return rows


def _window_sums(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Before SiLU: x [n, C] of one sequence behind past [K - 1, C]."""
    n = len(x)
    inputs = torch.cat([past, x])
    return sum(inputs[j : j + n] * weight[:, j] for j in range(weight.shape[1]))


@define(
    fake=lambda x, weight, state, slots: x.new_empty(x.shape), mutates=("state",), touches=lambda args: args["slots"]
)
def causal_conv1d_update(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """y [..., C] = SiLU(sum over j < K of weight[:, j] * (the input K - 1 - j rows earlier)) of x [..., C], in x.dtype.

    weight: f32 [C, K]. state: f32 [slots, K - 1, C], the last inputs of each sequence, oldest first; it goes on from
    there and leaves its own. slots: int32 [T], of each of the T rows that the leading dims of x make; -1 marks an inert
    row, which yields zeros. A slot out of range raises and changes nothing.
    """
    if ((slots < -1) | (slots >= state.shape[0])).any():
        raise ValueError(f"dasllama::causal_conv1d_update: slots must be -1 (inert) or less than {state.shape[0]}")
    rows = x.reshape(-1, x.shape[-1]).float()
    y = torch.zeros_like(rows)
    for slot, at in sequences(slots).items():
        y[at] = torch.nn.functional.silu(_window_sums(rows[at], weight, state[slot]))
        state[slot] = torch.cat([state[slot], rows[at]])[len(at) :]
    return y.reshape(x.shape).to(x.dtype)


refuse_gradient(causal_conv1d_update, "dasllama::causal_conv1d leaves the state alone and has a gradient")


@define(fake=lambda x, weight, row_seq, state: (x.new_empty(x.shape), state.new_empty(state.shape)))
def causal_conv1d(x: Tensor, weight: Tensor, row_seq: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`causal_conv1d_update` as a function: state f32 [S, K - 1, C] of each sequence -> y [..., C] and the new states.

    row_seq: int32 [T], sequence of each row, -1 for an inert row. The gradient of y is with respect to x; states are
    constants.
    """
    new = state.clone()
    return causal_conv1d_update.reference(x, weight, new, row_seq), new


@define(fake=lambda grad, x, weight, row_seq, state: x.new_empty(x.shape))
def causal_conv1d_backward(grad: Tensor, x: Tensor, weight: Tensor, row_seq: Tensor, state: Tensor) -> Tensor:
    """Gradient of y of `causal_conv1d` with respect to x [..., C]."""
    rows, grads = x.reshape(-1, x.shape[-1]).float(), grad.reshape(-1, x.shape[-1]).float()
    K, dx = weight.shape[1], torch.zeros_like(rows)
    for seq, at in sequences(row_seq).items():
        z = _window_sums(rows[at], weight, state[seq])
        s = torch.sigmoid(z)
        dz = grads[at] * (s + z * s * (1 - s))
        dx[at] = _window_sums(dz.flip(0), weight, dz.new_zeros(K - 1, dz.shape[1])).flip(0)
    return dx.reshape(x.shape).to(x.dtype)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return causal_conv1d_backward(grad, *ctx.saved_tensors), None, None, None


register_backward(causal_conv1d, _backward, _setup)
