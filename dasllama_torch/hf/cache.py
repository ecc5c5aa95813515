"""Forwards in the manner of transformers that go on from a cache, which here is sessions: one for each row of a batch.

B rows of the batch, T positions, n of them not padding, S positions of the cache with these, C embedding,
H query heads, V vocab.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dasllama_torch.engine.embeddings import Embeddings
from dasllama_torch.engine.session import Session, eval_batch
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.outputs import CausalLMOutput, Seen, attentions_of, keep_rows, selected, watched

ROOM = 4096  # tokens that the sessions of a cache which is handed out may hold at least, or the model's own context


class SessionCache:
    """What `use_cache=True` gives: sessions of their own, which hold the tokens that are no padding.

    sessions: one for each row. real: bool [B, S], which of the positions so far are tokens; the others are padding, or
    behind the end of a row that has ended.
    """

    def __init__(self, sessions: Sequence[Session], real: Tensor | None = None):
        self.sessions = list(sessions)
        self.real = torch.zeros(len(self.sessions), 0, dtype=torch.bool) if real is None else real

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """S: positions that the cache stands for, padding included."""
        return self.real.shape[1]

    def reorder_cache(self, beam_idx: Tensor | Sequence[int]) -> None:
        """Row i becomes what row beam_idx[i] was. A session that several rows go on from is forked, and one that none
        does is closed."""
        chosen = torch.as_tensor(beam_idx).tolist()
        sessions: list[Session] = []
        taken: set[int] = set()
        for row in chosen:
            sessions.append(self.sessions[row].fork() if row in taken else self.sessions[row])
            taken.add(row)
        for row, session in enumerate(self.sessions):
            if row not in taken:
                session.close()
        self.sessions, self.real = sessions, self.real[chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row as often as this, one behind the other."""
        self.reorder_cache(torch.arange(len(self.sessions)).repeat_interleave(repeats))

    def close(self) -> None:
        """Give back what the sessions hold; otherwise that is done when the cache is collected."""
        for session in self.sessions:
            session.close()

    def __repr__(self) -> str:
        return f"SessionCache({len(self.sessions)} sessions, {self.get_seq_length()} positions)"


Cache = SessionCache | Session | Sequence[Session]


@dataclass(frozen=True)
class Evaluated:
    """logits: of each row [n, V], or [1, V] of its last token; [0, V] for one that got nothing. hidden_states and
    attentions as of `forward`, None where they were not asked for."""

    logits: list[Tensor]
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


def forward(
    model: CausalLM,
    cache: Cache,
    given: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int | Tensor,
    hidden_states: bool | int | list[int],
    attentions: bool,
) -> CausalLMOutput:
    """given: ids [B, T], or rows of embeddings f32 [B, T, C]. Others as of `CausalLM.forward`, and so are errors.

    Attentions are f32 [B, H, T, S] as from transformers' eager attention and its `DynamicCache`: over all positions so
    far, padding included, where a layer of window W has no more than the last W - 1 of those before this forward, and
    those that rows with padding in between see further back.
    Sessions in place of a cache count as rows that are padded on the left. ValueError where a session does not hold
    what the cache has seen, or would shift some of it away.
    """
    held = _held(cache)
    B, T = given.shape[:2]
    if len(held.sessions) != B:
        raise ValueError(
            f"the cache has {len(held.sessions)} sessions, wanted one for each of the {B} rows of the batch"
        )
    if any(session.model is not model for session in held.sessions):
        raise ValueError("the cache is another model's")
    real = _real(attention_mask, B, T, cache)
    _check_positions(position_ids, real, held.sessions)
    looks = hidden_states is not False, attentions
    if attentions:
        _check_columns(held, real)
    last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1 and bool(real[real.any(1), -1].all())
    if any(looks) and any(session.prefix_cache for session in held.sessions):
        last_only = False  # with all logits nothing is taken from a prefix cache, and every row can be looked at
    found = evaluate(model, held, given, real, "last" if last_only else "all", *looks)
    logits = _padded(found.logits, real[:, -1:] if last_only else real, model.config.n_vocab, given.device)
    return CausalLMOutput(
        logits=logits if last_only else keep_rows(logits, logits_to_keep),
        cache=cache,
        hidden_states=None if hidden_states is False else selected(found.hidden_states, hidden_states),
        attentions=found.attentions,
    )


def evaluate(
    model: CausalLM,
    cache: SessionCache,
    given: Tensor,
    real: Tensor,
    logits: str,
    hidden_states: bool = False,
    attentions: bool = False,
) -> Evaluated:
    """Evaluate what is real, bool [B, T], of ids [B, T] or embeddings f32 [B, T, C] at the end of a cache, which then
    stands for T positions more. logits: "all"; "last", of each row's last token; `runner.ON_DEVICE`, these where they
    were made."""
    # A session that gets nothing stays where it is: in generation, a row that has ended.
    rows = real.any(1).nonzero().flatten().tolist()
    inputs = [given[row, real[row]] for row in rows]
    inputs = [Embeddings(each) if given.dim() == 3 else each.tolist() for each in inputs]
    found = [torch.empty(0, model.config.n_vocab)] * len(real)
    decoder, seen = model.get_decoder(), []
    with contextlib.ExitStack() as stack:
        if hidden_states or attentions:
            seen = stack.enter_context(watched(decoder, hidden_states, attentions))
        if rows:
            sessions = [cache.sessions[row] for row in rows]
            for row, each in zip(rows, eval_batch(sessions, inputs, logits), strict=True):
                found[row] = each if logits == "all" else each[None]
    cache.real = torch.cat([cache.real, real], 1)
    states = patterns = None
    if hidden_states:
        places, width = range(len(model.config.layers) + 1), model.config.n_embd
        states = tuple(_padded(_states(cache, seen, i, real), real, width, given.device) for i in places)
    if attentions:
        layers = enumerate(attentions_of(decoder))
        patterns = tuple(_patterns(model, cache, seen, i, layer, real).to(given.device) for i, layer in layers)
    return Evaluated(found, states, patterns)


def _held(cache: Cache) -> SessionCache:
    if isinstance(cache, SessionCache):
        return cache
    sessions = [cache] if isinstance(cache, Session) else cache
    if not isinstance(sessions, Sequence) or not all(isinstance(each, Session) for each in sessions):
        raise ValueError(f"cache is a {type(cache).__name__}, wanted a session, a list of them, or a forward's cache")
    lengths = [_n_tokens(session) for session in sessions]
    return SessionCache(sessions, torch.arange(max(lengths, default=0), 0, -1) <= torch.tensor(lengths)[:, None])


def _n_tokens(session: Session) -> int:
    """How many a session holds or is about to evaluate."""
    return session.n_past + len(session.pending)


def _real(attention_mask: Tensor | None, B: int, T: int, cache: Cache) -> Tensor:
    """bool [B, T]: which of the new positions are tokens. What was before is in the sessions already."""
    if attention_mask is None:
        return torch.ones(B, T, dtype=torch.bool)
    lengths = {T, cache.get_seq_length() + T} if isinstance(cache, SessionCache) else {T}
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


def _check_columns(cache: SessionCache, real: Tensor) -> None:
    """Each key of a session needs its position in the cache."""
    for row, session in enumerate(cache.sessions):
        found, wanted = _n_tokens(session), int(cache.real[row].sum())
        if found != wanted:
            raise ValueError(
                f"output_attentions: the session of row {row} holds {found} tokens, and the cache has seen {wanted}"
            )
        if session.room_for(int(real[row].sum())):
            raise ValueError(f"output_attentions: the session of row {row} would shift tokens away to make room")


def _forwards_of(session: Session, seen: list[Seen]) -> Iterator[tuple[Seen, Tensor]]:
    """The forwards that a session had rows in, and which rows: bool."""
    for each in seen:
        if session in each.step.sessions:
            yield each, each.step.row_seq == each.step.sessions.index(session)


def _states(cache: SessionCache, seen: list[Seen], place: int, real: Tensor) -> list[Tensor | None]:
    """Of each row its hidden states [n, C] in this place, None if it got nothing."""
    found: list[Tensor | None] = []
    for session, n in zip(cache.sessions, real.sum(1).tolist(), strict=True):
        parts = [each.states[place][0, rows] for each, rows in _forwards_of(session, seen)]
        found.append(torch.cat(parts)[-n:] if n else None)  # a pending token's stand before
    return found


def _patterns(
    model: CausalLM, cache: SessionCache, seen: list[Seen], place: int, layer: PagedAttention, real: Tensor
) -> Tensor:
    """The attentions [B, H, T, S] of a layer, the `place`-th that has attention."""
    (B, T), S = real.shape, cache.get_seq_length()
    H = model.config.layers[layer.layer].n_heads
    out = torch.zeros(B, H, T, S)
    for row, session in enumerate(cache.sessions):
        n, columns = int(real[row].sum()), cache.real[row].nonzero().flatten()
        if not n:
            continue
        parts = [each.probabilities[place][0][:, rows].cpu() for each, rows in _forwards_of(session, seen)]
        # As many keys as the session has: of an earlier forward it had fewer, of a batch another may have more.
        parts = [torch.nn.functional.pad(part, (0, len(columns) - part.shape[-1])) for part in parts]
        placed = torch.zeros(H, n, S)
        placed[:, :, columns] = torch.cat(parts, 1)[:, -n:]
        out[row][:, real[row]] = placed
    gone = max(0, S - T - (layer.window - 1)) if layer.window else 0
    while gone and out[..., :gone].any():  # a window shows tokens, and padding between them has made it wider
        gone -= 1
    return out[..., gone:]


def _padded(parts: list[Tensor | None], real: Tensor, width: int, device: torch.device) -> Tensor:
    """The parts [n, width] of all rows where they belong in [B, T, width], and zeros elsewhere."""
    out = torch.zeros(*real.shape, width, device=device)
    for row, part in enumerate(parts):
        if part is not None and len(part):
            out[row, real[row]] = part.to(device)
    return out
