"""The one entry to the model: sessions with new tokens become windows, windows become Steps, Steps become logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.cache.forecast import Forecast
from dasllama_torch.engine import graphs
from dasllama_torch.engine.scheduler import Chunk, plan_windows
from dasllama_torch.errors import CannotRewind, ContextFull
from dasllama_torch.ops import registry
from dasllama_torch.step import PageTable, Step

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

MAX_ROWS = 512  # rows of one forward
LOGITS = ("last", "all", None)


def run(sessions: Sequence["Session"], ids: Sequence[Sequence[int]], logits: str | None) -> list[Tensor | None]:
    """Evaluate ids[i] at the end of sessions[i], for sessions of one model and one pool, in ragged batches.

    logits: "last" gives f32 [V] per session, "all" f32 [len(ids[i]), V], None nothing. A session's result does not
    depend on the others. Memory is asked for before anything is evaluated: ContextFull and OutOfPages leave every
    session as it was. What fails later leaves it with the tokens of the forwards that were done.
    """
    if logits not in LOGITS:
        raise ValueError(f"logits={logits!r}, wanted one of {', '.join(map(repr, LOGITS))}")
    sessions = list(sessions)
    if not sessions or len(sessions) != len(ids):
        raise ValueError(f"wanted one list of ids per session, found {len(sessions)} sessions and {len(ids)} lists")
    asked = [len(tokens) for tokens in ids]
    ids = [s.pending + [int(token) for token in tokens] for s, tokens in zip(sessions, ids, strict=True)]
    _check(sessions, ids)
    marks = {
        i: s.prefix_cache.marks(s, len(tokens))
        for i, (s, tokens) in enumerate(zip(sessions, ids, strict=True))
        if s.prefix_cache
    }
    windows = plan_windows([len(tokens) for tokens in ids], MAX_ROWS, marks)
    _check_memory(sessions, windows)
    kept: list[list[Tensor]] = [[] for _ in sessions]
    with torch.inference_mode():
        for window in windows:
            _run_window(sessions, ids, window, logits, kept, marks)
    results: list[Tensor | None] = []
    for session, n, rows in zip(sessions, asked, kept, strict=True):
        session.logits = rows[-1][-1] if rows else None
        results.append(torch.cat(rows)[-n:] if logits == "all" else session.logits)
    return results


def _check(sessions: list["Session"], ids: list[list[int]]) -> None:
    if len(set(map(id, sessions))) != len(sessions):
        raise ValueError("a session may stand in a batch once only")
    model, pool = sessions[0].model, sessions[0].pool
    if any(s.model is not model or s.pool is not pool for s in sessions):
        raise ValueError("the sessions of a batch must be of one model and one pool")
    n_vocab = model.config.n_vocab
    for session, tokens in zip(sessions, ids, strict=True):
        if not tokens:
            raise ValueError("no ids to evaluate: wanted at least one for each session")
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")
        if session.sequence.torn:
            raise CannotRewind(
                f"an evaluation failed half way and left the recurrent state behind token {session.n_past}: truncate "
                f"the session to a checkpoint or to 0"
            )
        if session.n_past + len(tokens) > session.n_ctx:
            raise ContextFull(
                f"{session.n_past} tokens of the session and {len(tokens)} new ones exceed its context, "
                f"n_ctx={session.n_ctx}"
            )


def _check_memory(sessions: list["Session"], windows: list[list[Chunk]]) -> None:
    """Raise OutOfPages unless the pool can serve all windows, each after the pages that the ones before set free."""
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


def _run_window(
    sessions, ids, window: list[Chunk], logits: str | None, kept: list[list[Tensor]], marks: dict[int, list[int]]
) -> None:
    """One forward: rows of some sessions, whose tokens count as evaluated once it is done."""
    tokens, row_seq, row_pos, logit_rows, wanted_of = [], [], [], [], []
    for seq, chunk in enumerate(window):
        session, n = sessions[chunk.index], chunk.stop - chunk.start
        tokens += ids[chunk.index][chunk.start : chunk.stop]
        row_seq += [seq] * n
        row_pos += range(session.n_past, session.n_past + n)
        wanted = n if logits == "all" else int(logits == "last" and chunk.last)
        logit_rows += range(len(tokens) - wanted, len(tokens))
        wanted_of.append(wanted)
    present = [sessions[chunk.index] for chunk in window]
    try:
        for session, chunk in zip(present, window, strict=True):
            session.sequence.grow(chunk.stop - chunk.start)
        rows = graphs.run(present, tokens) if len(logit_rows) == len(tokens) == len(present) else None
        if rows is None:
            rows = _forward(sessions[0].model, _step(present, tokens, row_seq, row_pos, logit_rows))
        rows = [rows] if len(present) == 1 else rows.split(wanted_of)
    except BaseException:
        for session in present:
            session.sequence.abandon()
        raise
    for chunk, wanted, part in zip(window, wanted_of, rows, strict=True):
        session = sessions[chunk.index]
        session.tokens += ids[chunk.index][chunk.start : chunk.stop]
        session.pending, session.logits = [], None
        if session.prefix_cache:
            session.prefix_cache.note(session, chunk.stop - chunk.start, chunk.stop in marks[chunk.index])
        session.sequence.advance(chunk.stop - chunk.start)
        if wanted:
            kept[chunk.index].append(part)


def _step(
    sessions: list["Session"], tokens: list[int], row_seq: list[int], row_pos: list[int], logit_rows: list[int]
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

    positions = tensor(row_pos, torch.int32)
    return Step(
        positions=positions.to(torch.int64),
        row_seq=tensor(row_seq, torch.int32),
        row_pos=positions,
        row_end=positions + 1,
        n_seqs=len(sequences),
        cache=pool,
        tables=tuple(map(page_table, range(len(pool.groups)))),
        state_slots=tensor([sequences[s].state for s in row_seq], torch.int32) if pool.states else None,
        logit_rows=tensor(logit_rows),
        row_context=tensor([sessions[s].n_ctx for s in row_seq]),
        input_ids=tensor([tokens]),
    )


def _forward(model: "CausalLM", step: Step) -> Tensor:
    """Logits f32 [rows, V] of the rows that are wanted."""
    registry.count_call("step", "eager")
    if not len(step.logit_rows):  # the cache is all that is wanted
        with graphs.sharing(model):
            hidden = model.get_decoder()(model.get_input_embeddings()(step.input_ids), step)
        return hidden.new_empty(0, model.config.n_vocab)
    with graphs.sharing(model):
        return model(step.input_ids, step=step).logits[0].float().cpu()
