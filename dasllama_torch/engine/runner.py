"""The one entry to the model: sessions with new tokens become windows, windows become Steps, Steps become logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.cache.forecast import Forecast
from dasllama_torch.engine import graphs, lookahead
from dasllama_torch.engine.embeddings import EMBEDDING, Embeddings, Placed, embed, place, token_ids
from dasllama_torch.engine.scheduler import Chunk, plan_windows
from dasllama_torch.errors import CannotRewind
from dasllama_torch.ops import registry
from dasllama_torch.step import PageTable, Step

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

MAX_ROWS = 512  # rows of one forward on the CPU
MAX_DEVICE_ROWS = 2048  # ... on a device, which many rows keep busy
LOGITS = ("last", "all", None)
ON_DEVICE = "on device"  # in the place of one of these: "last", left where they were made
HIDDEN = "hidden"  # likewise: all rows' hidden states


def run(
    sessions: Sequence["Session"], inputs: Sequence[Sequence[int] | Embeddings], logits: str | None
) -> list[Tensor | None]:
    """Evaluate inputs[i], ids or embeddings, at the end of sessions[i], for sessions of one model and one pool, in
    ragged batches.

    logits: "last" gives f32 [V] per session, "all" f32 [len(inputs[i]), V], None nothing. A session's result does not
    depend on the others. Memory is asked for before anything is evaluated: ContextFull and OutOfPages leave every
    session as it was, but for a shift that was due. What fails later leaves it with the tokens of the forwards that
    were done.
    """
    if logits not in (*LOGITS, ON_DEVICE):
        raise ValueError(f"logits={logits!r}, wanted one of {', '.join(map(repr, LOGITS))}")
    sessions = list(sessions)
    if not sessions or len(sessions) != len(inputs):
        raise ValueError(f"wanted one list of ids per session, found {len(sessions)} sessions and {len(inputs)} lists")
    if len(sessions) > 1:
        _check_together(sessions)
    if logits in ("last", ON_DEVICE) and (results := _run_ready(sessions, inputs, logits == ON_DEVICE)):
        return results
    asked = [len(given) for given in inputs]
    ids = [s.pending + _ids(given) for s, given in zip(sessions, inputs, strict=True)]
    media = {i: given for i, given in enumerate(inputs) if isinstance(given, Embeddings)}
    _check(sessions, ids, media)
    shifts = [session.room_for(n) for session, n in zip(sessions, asked, strict=True)]
    for i, (session, given, n) in enumerate(zip(sessions, inputs, shifts, strict=True)):
        if n:
            session.shift(n)
            ids[i] = session.pending + _ids(given)
    whole = {i: (len(ids[i]) - asked[i], len(ids[i])) for i, rows in media.items() if not rows.causal}
    marks = {i: s.prefix_cache.marks(s, len(ids[i])) for i, s in enumerate(sessions) if s.prefix_cache}
    windows = plan_windows([len(tokens) for tokens in ids], _max_rows(sessions[0]), whole, marks)
    # The first of ids[i] whose logits are wanted: of the last in any case, of pending tokens before it never.
    first = [len(tokens) - max(n if logits == "all" else 1, 1) for tokens, n in zip(ids, asked, strict=True)]
    kept = _run_windows(sessions, ids, media, windows, logits, first)
    if logits == "all":
        results = [torch.cat(parts) for parts in kept]
        for session, rows in zip(sessions, results, strict=True):
            session.logits = rows[-1]
        return [rows[len(rows) - n :] for rows, n in zip(results, asked, strict=True)]
    results = [parts[0] if parts else None for parts in kept]
    for session, row in zip(sessions, results, strict=True):
        session.logits = row
    return results


def _run_ready(
    sessions: list["Session"], inputs: Sequence[Sequence[int] | Embeddings], on_device: bool
) -> list[Tensor | None] | None:
    """`run` of one id for each session where no memory has to be taken and a recorded step stands ready: nearly all
    that a stream does. None, and nothing done, of anything else.

    The rest of `run` would come to the same. But weights have swept the caches, and all the Python that it takes would
    cost some hundredths of a small model's step.
    """
    ids: list[int] = []
    for session, given in zip(sessions, inputs, strict=True):
        new = session.pending or given
        if (
            type(new) is not list
            or len(session.pending) + len(given) != 1
            or type(new[0]) is not int
            or not 0 <= new[0] < session.model.config.n_vocab
            or not session.stands_ready
        ):
            return None
        ids += new
    try:
        rows = lookahead.take(sessions, ids) if sessions[0].ahead and on_device else None
        rows = rows or graphs.run(sessions, ids, record=False, on_device=on_device)
    except BaseException:
        for session in sessions:
            session.sequence.abandon()
        raise
    if rows is None:
        return None
    for session, new, row in zip(sessions, ids, rows, strict=True):
        session.tokens.append(new)
        session.pending, session.logits, session.ahead = [], row, None
        session.sequence.advance(1)
    return rows


def hidden(sessions: Sequence["Session"], ids: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Evaluate ids[i] at the end of sessions[i] like `run`, for what the head would take: of each session the normed
    hidden states of its rows, f32 [T, C] for each forward that had some. The sessions get no logits."""
    ids = [token_ids(tokens) for tokens in ids]
    _check(sessions, ids, {})
    windows = plan_windows([len(tokens) for tokens in ids], _max_rows(sessions[0]))
    return _run_windows(sessions, ids, {}, windows, HIDDEN, [0] * len(ids))


def _max_rows(session: "Session") -> int:
    return MAX_ROWS if session.pool.device.type == "cpu" else MAX_DEVICE_ROWS


def _ids(given: Sequence[int] | Embeddings) -> list[int]:
    return [EMBEDDING] * len(given) if isinstance(given, Embeddings) else token_ids(given)


def _check_together(sessions: list["Session"]) -> None:
    if len(set(map(id, sessions))) != len(sessions):
        raise ValueError("a session may stand in a batch once only")
    model, pool = sessions[0].model, sessions[0].pool
    if any(s.model is not model or s.pool is not pool for s in sessions):
        raise ValueError("the sessions of a batch must be of one model and one pool")


def _check(sessions: list["Session"], ids: list[list[int]], media: dict[int, Embeddings]) -> None:
    model = sessions[0].model
    n_vocab = model.config.n_vocab
    for i, (session, tokens) in enumerate(zip(sessions, ids, strict=True)):
        if not tokens:
            raise ValueError("no ids to evaluate: wanted at least one for each session")
        if i in media:
            media[i].check(model.config)
        else:
            for token in tokens:
                if not 0 <= token < n_vocab:
                    raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")
        if session.sequence.torn:
            raise CannotRewind(
                f"an evaluation failed half way and left the recurrent state behind token {session.n_past}: truncate "
                f"the session to a checkpoint or to 0"
            )


def _check_memory(sessions: list["Session"], windows: list[list[Chunk]]) -> None:
    """Raise OutOfPages unless the pool can serve all windows, each after the pages that the ones before set free."""
    if len(windows) == 1 and all(sessions[chunk.index].sequence.has(chunk.stop - chunk.start) for chunk in windows[0]):
        return  # as most single tokens do
    forecast = Forecast(sessions[0].pool)
    at = [s.n_past for s in sessions]
    for window in windows:
        spans = []
        for chunk in window:
            start, at[chunk.index] = at[chunk.index], at[chunk.index] + chunk.stop - chunk.start
            spans.append((sessions[chunk.index].sequence, start, at[chunk.index]))
        for span in spans:
            forecast.grow(*span)
        for span in spans:
            forecast.advance(*span)
    sessions[0].pool.require(forecast.most)


def _run_windows(
    sessions, ids, media: dict[int, Embeddings], windows: list[list[Chunk]], logits: str | None, first: list[int]
) -> list[list[Tensor]]:
    """All forwards of a batch, once the pool is known to have room for them: what is wanted, by session."""
    _check_memory(sessions, windows)
    kept: list[list[Tensor]] = [[] for _ in sessions]
    for window in windows:
        _run_window(sessions, ids, media, window, logits, first, kept)
    return kept


def _run_window(
    sessions,
    ids,
    media: dict[int, Embeddings],
    window: list[Chunk],
    logits: str | None,
    first: list[int],
    kept: list[list[Tensor]],
) -> None:
    """One forward: rows of some sessions, whose tokens count as evaluated once it is done.

    Logits that are wanted are appended to `kept` of their session: f32 [V] of its last row, or [n, V] of those from
    `first` on.
    """
    present = [sessions[chunk.index] for chunk in window]
    spans = [ids[chunk.index][chunk.start : chunk.stop] for chunk in window]
    placed = place(present, spans, media, window, ids) if media else []
    try:
        for session, span in zip(present, spans, strict=True):
            session.ahead = None
            session.sequence.grow(len(span))
        parts = None if placed else _run_recorded(present, spans, window, logits)
        if parts is None:
            parts = _run_modules(present, spans, placed, window, logits, first)
    except BaseException:
        for session in present:
            session.sequence.abandon()
        raise
    for session, span, chunk, part in zip(present, spans, window, parts, strict=True):
        session.tokens += span
        session.pending, session.logits = session.pending[len(span) :], None
        for each in placed:
            if each.session is session:
                session.hold(each.given, each.rows.stop)
        if session.prefix_cache:
            session.prefix_cache.note(session, len(span), chunk.marked)
        session.sequence.advance(len(span))
        if part is not None:
            kept[chunk.index].append(part)


def _run_recorded(present, spans, window: list[Chunk], logits: str | None) -> list[Tensor] | None:
    """The parts of a window of single rows whose logits are all wanted; None, and nothing done, of any other, and where
    the modules themselves must run."""
    if logits in (None, HIDDEN) or any(len(span) > 1 for span in spans) or not all(chunk.last for chunk in window):
        return None
    rows = graphs.run(present, [token for (token,) in spans], on_device=logits == ON_DEVICE)
    return [row[None] for row in rows] if rows and logits == "all" else rows


def _run_modules(
    present, spans, placed: list[Placed], window: list[Chunk], logits: str | None, first: list[int]
) -> list[Tensor | None]:
    tokens, row_seq, row_pos, positions, logit_rows, wanted_of = [], [], [], [], [], []
    for seq, (session, span, chunk) in enumerate(zip(present, spans, window, strict=True)):
        tokens += span
        row_seq += [seq] * len(span)
        at = range(session.n_past, session.n_past + len(span))
        row_pos += at
        positions += at if not session.rope_delta else (p + session.rope_delta for p in at)
        wanted = 0 if logits is None else max(0, chunk.stop - max(chunk.start, first[chunk.index]))
        logit_rows += range(len(tokens) - wanted, len(tokens))
        wanted_of.append(wanted)
    with torch.inference_mode():
        step = _step(present, tokens, row_seq, row_pos, positions, logit_rows)
        parts = _forward(present[0].model, step, placed, logits).split(wanted_of)
    if logits in ("all", HIDDEN):
        return list(parts)
    # Copies, and made here, so that they are ordinary tensors: inference tensors refuse to be changed in place.
    return [part[0].clone() if len(part) else None for part in parts]


def _step(
    sessions: list["Session"],
    tokens: list[int],
    row_seq: list[int],
    row_pos: list[int],
    positions: list[int],
    logit_rows: list[int],
) -> Step:
    pool, sequences = sessions[0].pool, [session.sequence for session in sessions]

    def tensor(values, dtype=torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=pool.device)

    def page_table(group: int) -> PageTable:
        tables = [sequence.tables[group] for sequence in sequences]
        width = max(map(len, tables))
        return PageTable(
            slots=tensor([sequences[s].slot(group, p) for s, p in zip(row_seq, row_pos, strict=True)]),
            block_table=tensor([table + [-1] * (width - len(table)) for table in tables], torch.int32),
        )

    at = tensor(row_pos, torch.int32)
    return Step(
        positions=tensor(positions),
        row_seq=tensor(row_seq, torch.int32),
        row_pos=at,
        row_end=at + 1,
        n_seqs=len(sequences),
        cache=pool,
        tables=tuple(map(page_table, range(len(pool.groups)))),
        state_slots=tensor([sequences[s].state for s in row_seq], torch.int32) if pool.states else None,
        logit_rows=tensor(logit_rows),
        row_context=tensor([sessions[s].n_ctx for s in row_seq]),
        input_ids=tensor([tokens]),
        sessions=tuple(sessions),
    )


def _forward(model: "CausalLM", step: Step, placed: list[Placed], logits: str | None) -> Tensor:
    """Logits f32 [rows, V] of the rows that are wanted, or all rows' hidden states f32 [T, C]."""
    registry.count_call("step", "eager")

    given = replace(step)  # `embed` changes the other

    def rehearse() -> None:
        _evaluate(model, given.inert(), placed, logits)
        graphs.rehearse_step(given.sessions)  # which comes next

    with graphs.sharing(model, rehearse):
        found = _evaluate(model, step, placed, logits)
    return found if logits == ON_DEVICE else found.cpu()


def _evaluate(model: "CausalLM", step: Step, placed: list[Placed], logits: str | None) -> Tensor:
    if logits == HIDDEN:
        return model.get_decoder()(embed(model, step, placed), step)[0].float()
    if not len(step.logit_rows):  # the cache is all that is wanted
        model.get_decoder()(embed(model, step, placed), step)
        return torch.empty(0, model.config.n_vocab)
    given = {"inputs_embeds": embed(model, step, placed)} if placed else {"input_ids": step.input_ids}
    return model(**given, step=step).logits[0].float()
