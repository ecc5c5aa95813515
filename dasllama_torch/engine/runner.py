"""The one entry to the model: sessions with new tokens become windows, windows become Steps, Steps become logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.engine.scheduler import Chunk, plan_windows
from dasllama_torch.errors import ContextFull
from dasllama_torch.step import Step

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session

MAX_ROWS = 512  # rows of one forward
LOGITS = ("last", "all", None)


def run(sessions: Sequence["Session"], ids: Sequence[Sequence[int]], logits: str | None) -> list[Tensor | None]:
    """Evaluate ids[i] at the end of sessions[i], for sessions of one model and one pool, in ragged batches.

    logits: "last" gives f32 [V] per session, "all" f32 [len(ids[i]), V], None nothing. A session's result does not
    depend on the others. Pages are taken before anything is evaluated: ContextFull and OutOfPages leave every session
    as it was.
    """
    if logits not in LOGITS:
        raise ValueError(f"logits={logits!r}, wanted one of {', '.join(map(repr, LOGITS))}")
    sessions = list(sessions)
    if not sessions or len(sessions) != len(ids):
        raise ValueError(f"wanted one list of ids per session, found {len(sessions)} sessions and {len(ids)} lists")
    asked = [len(tokens) for tokens in ids]
    ids = [s.pending + [int(token) for token in tokens] for s, tokens in zip(sessions, ids, strict=True)]
    _check(sessions, ids)
    _take_pages(sessions, ids)
    kept: list[list[Tensor]] = [[] for _ in sessions]
    with torch.inference_mode():
        for window in plan_windows([len(tokens) for tokens in ids], MAX_ROWS):
            _run_window(sessions, ids, window, logits, kept)
    results: list[Tensor | None] = []
    for session, tokens, n, rows in zip(sessions, ids, asked, kept, strict=True):
        session.tokens.extend(tokens)
        session.pending = []
        session.logits = rows[-1][-1] if rows else None
        results.append(torch.cat(rows)[len(tokens) - n :] if logits == "all" else session.logits)
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
        if session.n_past + len(tokens) > session.n_ctx:
            raise ContextFull(
                f"{session.n_past} tokens of the session and {len(tokens)} new ones exceed its context, "
                f"n_ctx={session.n_ctx}"
            )


def _take_pages(sessions: list["Session"], ids: list[list[int]]) -> None:
    rows = sessions[0].pool.page_rows
    wanted = [-(-(s.n_past + len(tokens)) // rows) - len(s.pages) for s, tokens in zip(sessions, ids, strict=True)]
    pages = sessions[0].pool.pages.take(sum(wanted))  # all or nothing
    for session, n in zip(sessions, wanted, strict=True):
        session.pages.extend(pages[:n])
        del pages[:n]


def _run_window(sessions, ids, window: list[Chunk], logits: str | None, kept: list[list[Tensor]]) -> None:
    model, pool = sessions[0].model, sessions[0].pool
    tokens, row_seq, row_pos, row_context, slots, logit_rows, owners = [], [], [], [], [], [], []
    for seq, chunk in enumerate(window):
        session = sessions[chunk.index]
        first = len(tokens)
        tokens += ids[chunk.index][chunk.start : chunk.stop]
        n = chunk.stop - chunk.start
        row_seq += [seq] * n
        positions = range(session.n_past + chunk.start, session.n_past + chunk.stop)
        row_pos += positions
        row_context += [session.n_ctx] * n
        slots += [session.pages[p // pool.page_rows] * pool.page_rows + p % pool.page_rows for p in positions]
        wanted = n if logits == "all" else int(logits == "last" and chunk.last)
        logit_rows += range(first + n - wanted, first + n)
        owners.append((chunk.index, wanted))
    tables = [sessions[chunk.index].pages for chunk in window]
    width = max(map(len, tables))
    device = pool.device
    input_ids = torch.tensor([tokens], dtype=torch.int64, device=device)
    positions = torch.tensor(row_pos, dtype=torch.int32, device=device)
    step = Step(
        positions=positions.to(torch.int64),
        row_seq=torch.tensor(row_seq, dtype=torch.int32, device=device),
        row_pos=positions,
        row_end=positions + 1,
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        cache=pool,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        row_context=torch.tensor(row_context, dtype=torch.int64, device=device),
        input_ids=input_ids,
    )
    if not logit_rows:  # the cache is all that is wanted
        model.get_decoder()(model.get_input_embeddings()(input_ids), step)
        return
    out = model(input_ids, step=step).logits[0].float().cpu()  # [rows, V]
    for (index, wanted), rows in zip(owners, out.split([wanted for _, wanted in owners]), strict=True):
        if wanted:
            kept[index].append(rows)
