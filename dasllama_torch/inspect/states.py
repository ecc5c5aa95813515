"""What recurrent layers remember. n positions, K taps, H value heads, Dk and Dv their dims."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.cache.pool import RecurrentState
from dasllama_torch.engine.session import Session
from dasllama_torch.errors import ContextFull, UnsupportedModel
from dasllama_torch.inspect.prompts import Prompt, Target, ids_of, model_of, session_of, settle


@dataclass(frozen=True)
class RecurrentStates:
    """Of one layer, f32. after: the positions behind whose tokens they stood, n of them. delta [n, H, Dk, Dv]: the
    states of the delta rule. conv [n, K - 1, channels]: the last inputs of the convolution, oldest first."""

    layer: int
    after: tuple[int, ...]
    delta: Tensor
    conv: Tensor


def recurrent_states(
    target: Target, prompt: Prompt = (), after: Iterable[int] | None = None
) -> dict[int, RecurrentStates]:
    """The states of each recurrent layer, by layer, while a prompt is evaluated.

    target: a session, at whose end that happens, or a model, for which a session of its own does it. prompt: none, for
    what a session holds now. after: positions of the prompt's tokens in the session, from 0 if it was empty, each of
    which ends a forward; None: the last. Raises UnsupportedModel for a model without recurrent layers, ValueError for a
    position that is not the prompt's, ContextFull for a prompt that does not fit, also where a session would shift.
    """
    model = model_of(target)
    if not any(layer.delta for layer in model.config.layers):
        raise UnsupportedModel(f"{model.config.arch}: no layer of this model is recurrent")
    settle(target)
    ids = [] if isinstance(target, Session) and not len(prompt) else ids_of(target, prompt)[0].tolist()
    with session_of(target, max(1, len(ids))) as session:
        if session.room_for(len(ids)):
            raise ContextFull(f"{len(ids)} tokens would make the session shift, and positions change")
        start, stop = session.n_past, session.n_past + len(ids)
        marks = [stop - 1] if after is None else sorted(set(after))
        if not marks or marks[0] < (start if ids else stop - 1) or marks[-1] >= stop or stop == 0:
            raise ValueError(f"after is {marks}, wanted positions from {start} to {stop - 1}")
        seen: dict[int, list[RecurrentState]] = {i: [] for i, layer in enumerate(model.config.layers) if layer.delta}
        for mark in marks:
            if mark >= session.n_past:
                session.eval(ids[session.n_past - start : mark + 1 - start])
            for i, states in seen.items():
                states.append(_now(session, i))
        if session.n_past < stop:
            session.eval(ids[session.n_past - start :])
    return {
        i: RecurrentStates(
            i, tuple(marks), torch.stack([s.delta for s in states]), torch.stack([s.conv for s in states])
        )
        for i, states in seen.items()
    }


def _now(session: Session, layer: int) -> RecurrentState:
    state = session.pool[layer]
    return RecurrentState(state.conv[session.sequence.state].clone(), state.delta[session.sequence.state].clone())
