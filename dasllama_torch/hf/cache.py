"""Forwards in the manner of transformers that go on from a cache, which here is sessions: one for each row of a batch.

B rows of the batch, T positions, n of them not padding, C embedding, V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dasllama_torch.engine.embeddings import Embeddings
from dasllama_torch.engine.session import Session, eval_batch
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.outputs import CausalLMOutput, keep_rows, selected, watched


class SessionCache:
    """What `use_cache=True` gives: sessions of their own, which hold the tokens that are no padding.

    sessions: one for each row. length: positions so far, padding included, as in transformers.
    """

    def __init__(self, sessions: Sequence[Session]):
        self.sessions = list(sessions)
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the cache stands for, padding included."""
        return self.length

    def __repr__(self) -> str:
        return f"SessionCache({len(self.sessions)} sessions, {self.length} positions)"


Cache = SessionCache | Session | Sequence[Session]


def forward(
    model: CausalLM,
    cache: Cache,
    given: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int | Tensor,
    hidden_states: bool | int | list[int],
) -> CausalLMOutput:
    """given: ids [B, T], or rows of embeddings f32 [B, T, C]. Others as of `CausalLM.forward`, and so are errors."""
    sessions = _sessions(cache)
    B, T = given.shape[:2]
    if len(sessions) != B:
        raise ValueError(f"the cache has {len(sessions)} sessions, wanted one for each of the {B} rows of the batch")
    if any(session.model is not model for session in sessions):
        raise ValueError("the cache is another model's")
    real = _real(attention_mask, B, T, cache)
    _check_positions(position_ids, real, sessions)
    # A session that gets nothing stays where it is: in generation, a row that has ended.
    rows = [row for row in range(B) if real[row].any()]
    inputs = [given[row, real[row]] for row in rows]
    inputs = [Embeddings(each) if given.dim() == 3 else each.tolist() for each in inputs]
    present = [sessions[row] for row in rows]
    if hidden_states is False:
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1 and bool(real[rows, -1].all())
        logits = eval_batch(present, inputs, "last" if last_only else "all") if rows else []
        states = None
    else:
        last_only = False
        logits, states = _watched(model, present, inputs)
        places = range(len(model.config.layers) + 1)
        states = tuple(_padded([row[i] for row in states], rows, real, model.config.n_embd) for i in places)
        states = selected(states, hidden_states)
    if isinstance(cache, SessionCache):
        cache.length += T
    if last_only:
        real, logits = real[:, -1:], [row[None] for row in logits]
    padded = _padded(logits, rows, real, model.config.n_vocab).to(given.device)
    kept = padded if last_only else keep_rows(padded, logits_to_keep)
    return CausalLMOutput(logits=kept, cache=cache, hidden_states=states)


def _sessions(cache: Cache) -> list[Session]:
    if isinstance(cache, SessionCache):
        return cache.sessions
    sessions = [cache] if isinstance(cache, Session) else cache
    if not isinstance(sessions, Sequence) or not all(isinstance(each, Session) for each in sessions):
        raise ValueError(f"cache is a {type(cache).__name__}, wanted a session, a list of them, or a forward's cache")
    return list(sessions)


def _real(attention_mask: Tensor | None, B: int, T: int, cache: Cache) -> Tensor:
    """bool [B, T]: which of the new positions are tokens. What was before is in the sessions already."""
    if attention_mask is None:
        return torch.ones(B, T, dtype=torch.bool)
    lengths = {T, cache.length + T} if isinstance(cache, SessionCache) else {T}
    if attention_mask.dim() != 2 or len(attention_mask) != B or attention_mask.shape[1] not in lengths:
        wanted = " or ".join(f"[{B}, {n}]" for n in sorted(lengths))
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}, wanted {wanted}")
    return attention_mask[:, -T:].bool().cpu()


def _check_positions(position_ids: Tensor | None, real: Tensor, sessions: list[Session]) -> None:
    """A session's tokens follow each other; positions of other kinds come with embeddings (`eval_embd_span_mrope`)."""
    if position_ids is None:
        return
    given = position_ids.cpu().expand(*position_ids.shape[:-2], *real.shape)
    for row, session in enumerate(sessions):
        first = session.n_past + session.rope_delta
        wanted = torch.arange(first, first + int(real[row].sum()))
        if (found := given[..., row, real[row]]).ne(wanted).any():
            raise ValueError(
                f"position_ids of row {row} begin {found.reshape(-1)[:4].tolist()}, and its session goes on at "
                f"{first}: with a cache, positions count the tokens that are no padding"
            )


def _watched(model, sessions, inputs) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Of each session: logits [n, V], and the hidden states [n, C] of all places. One session at a time, so that the
    rows of each forward are known; the results are those of a batch."""
    logits, states = [], []
    places = len(model.config.layers) + 1
    for session, given in zip(sessions, inputs, strict=True):
        with watched(model.get_decoder(), True, False) as (seen, _):
            logits += eval_batch([session], [given], "all")
        # Long inputs go through in several forwards.
        states.append([torch.cat(seen[i::places], 1)[0].clone() for i in range(places)])
    return logits, states


def _padded(parts: list[Tensor], rows: list[int], real: Tensor, width: int) -> Tensor:
    """parts [n, width] of these rows where they belong in [B, T, width], and zeros elsewhere."""
    out = torch.zeros(*real.shape, width)
    for row, part in zip(rows, parts, strict=True):
        out[row, real[row]] = part
    return out
