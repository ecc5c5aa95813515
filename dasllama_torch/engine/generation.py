"""Generation: one token after another behind a prompt, the text that they make, and what ends it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dasllama_torch.engine import lookahead, runner
from dasllama_torch.engine.captured import wait_for
from dasllama_torch.engine.embeddings import EMBEDDING, Embeddings
from dasllama_torch.engine.stats import Stats
from dasllama_torch.errors import ConstraintError, DasllamaError
from dasllama_torch.sampling import SamplingParams, token_logprob
from dasllama_torch.text.detokenizer import StreamingDetokenizer
from dasllama_torch.text.stops import StopStrings

if TYPE_CHECKING:
    from dasllama_torch.constraints import Matcher
    from dasllama_torch.engine.session import Session

Given = Sequence[int | Embeddings] | Embeddings
SEEDS = 1 << 62  # that samples without a seed of their own are given one of


def generate(
    session: "Session",
    given: Given,
    params: SamplingParams,
    max_tokens: int | None,
    whole: bool,
    checkpoint: int | None,
) -> Iterator[tuple[int | None, str]]:
    """See `Session.generate`."""
    _check(session, params, max_tokens)
    if params.seed is not None:
        session.set_seed(params.seed)
    start = time.perf_counter()
    _evaluate(session, given, whole, checkpoint)
    stream = Stream(session, params, max_tokens, start, _matcher(session, params))
    while not stream.ended:
        if pair := stream.step():
            yield pair
    if tail := stream.finish():
        yield None, tail


@dataclass(frozen=True, eq=False)
class Sample:
    """One of several continuations of a prompt. tokens, text: as `generate` yields them. stats: of it. session: the
    fork that holds it, to go on with or to close."""

    tokens: list[int]
    text: str
    stats: Stats
    session: "Session"


def generate_n(
    session: "Session", given: Given, params: SamplingParams, n: int, max_tokens: int | None, whole: bool
) -> list[Sample]:
    """See `Session.generate_n`."""
    _check(session, params, max_tokens)
    if n < 1:
        raise ValueError(f"n is {n}, wanted 1 or more")
    start = time.perf_counter()
    _evaluate(session, given, whole)
    matcher = _matcher(session, params)
    if params.seed is None:
        seeds = torch.randint(SEEDS, (n,), generator=session.generator).tolist()
    else:
        seeds = range(params.seed, params.seed + n)
    streams = []
    for seed in seeds:
        fork = session.fork()
        fork.set_seed(seed)
        fork.stats = replace(session.stats, logprobs=[])
        streams.append(Stream(fork, params, max_tokens, start, matcher and matcher.fork()))
    logits = "last" if params.reads_logits else runner.ON_DEVICE
    pairs: list[list[tuple[int, str]]] = [[] for _ in streams]
    while running := [(stream, seen) for stream, seen in zip(streams, pairs, strict=True) if not stream.ended]:
        _evaluate_pending([stream.session for stream, _ in running], logits)
        drawn = _draw_together([stream for stream, _ in running])
        for (stream, seen), token in zip(running, drawn, strict=True):
            if pair := stream.step(token):
                seen.append(pair)
    samples = []
    for stream, seen in zip(streams, pairs, strict=True):
        text = "".join(piece for _, piece in seen) + stream.finish()
        samples.append(Sample([token for token, _ in seen], text, stream.stats, stream.session))
    return samples


class Stream:
    """The tokens of one session from where it stands, drawn one by one, until something ends them.

    Each is drawn from the session's logits and becomes its pending token; whoever drives the stream may draw it and
    evaluate it together with others, or leave both to the next `step`. start: when the call began, of
    time.perf_counter. matcher: of the params' constraint. ended: whether there is no further token; the session's stats
    say why.
    """

    def __init__(
        self,
        session: "Session",
        params: SamplingParams,
        max_tokens: int | None,
        start: float,
        matcher: "Matcher | None",
    ):
        self.session, self.stats, self.ended = session, session.stats, False
        self.params, self._max_tokens, self._matcher = params, max_tokens, matcher
        self._start, self._first = start, None
        self._text = _detokenizer(session)
        self._stops = StopStrings(params.stop)
        self._stop_ids = frozenset(params.stop_ids)
        self._eog_ids = session.model.tokenizer.eog_ids if self._text else frozenset()
        self._look_for_end()

    @property
    def is_last(self) -> bool:
        """Whether the next token is the last that may come."""
        return self.stats.n_generated + 1 == self._max_tokens

    def step(self, token: int | None = None) -> tuple[int, str] | None:
        """The next token and the text that it completes; None if the stream ends without a further token. token: drawn
        already, as `sample` does."""
        if self.session.stats is not self.stats:  # each text has its own
            raise DasllamaError(
                "the session has begun another text meanwhile, and this one would go on behind that: wanted a fork each"
            )
        allowed = None
        if self._matcher and (allowed := self._matcher.allowed()) is None:
            return self._end("constraint")
        if token is None:
            token = self.session.sample(self.params, allowed, ahead=not self.is_last)
        now = time.perf_counter()
        if self._first is None:
            self._first, self.stats.ttft_s = now, now - self._start
        if token in self._eog_ids:
            return self._end("eog", token)
        if token in self._stop_ids:
            return self._end("stop", token)
        if self._matcher:
            self._matcher.accept(token)
        if self.params.logprobs is not None:
            self.stats.logprobs.append(token_logprob(self.session.logits, token, self.params.logprobs))
        self.stats.n_generated += 1
        self.stats.decode_s = now - self._first
        self.session.pending = [token]
        text = self._stops.feed(self._text.feed(token)) if self._text else ""
        self._look_for_end()
        return token, text

    def finish(self) -> str:
        """The text that is held back when the stream has ended: U+FFFD for a character that stayed incomplete, and what
        might have begun a stop string."""
        if self._text is None or self._stops.found:
            return ""
        text = self._stops.feed(self._text.finish())
        if self._stops.found:  # one with U+FFFD in it
            self._end("stop", self._stops.found)
        return text + self._stops.finish()

    def _look_for_end(self) -> None:
        session = self.session
        if self._stops.found:
            self._end("stop", self._stops.found)
        elif self._matcher and self._matcher.complete:
            self._end("constraint")
        elif self.stats.n_generated == self._max_tokens:
            self._end("length")
        elif session.on_full == "error" and session.n_past + len(session.pending) > session.n_ctx:
            self._end("context")

    def _end(self, why: str, by: int | str | None = None) -> None:
        self.ended, self.stats.stop, self.stats.stopped_by = True, why, by
        self.session.ahead = None  # begun with a token that is not to come


def _check(session: "Session", params: SamplingParams, max_tokens: int | None) -> None:
    """Refuse what cannot be done before anything is evaluated."""
    if max_tokens is not None and max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}, wanted 0 or more")
    params.check_ids(session.model.config.n_vocab)
    tokenizer = session.model.tokenizer
    if tokenizer is None or not tokenizer.has_vocab:
        if params.stop:
            raise ValueError("stop has strings, and the model has no vocabulary: wanted stop_ids")
        if params.constraint is not None:
            raise ConstraintError("the model has no vocabulary, which a constraint needs")


def _evaluate(session: "Session", given: Given, whole: bool, checkpoint: int | None = None) -> None:
    """Bring a prompt into the session, whose stats begin anew."""
    start = time.perf_counter()
    if whole:
        session.hold_prompt(given, checkpoint)
    else:
        session.stats = Stats(n_prompt=len(session.pending) + len(given))
        if len(given) or session.pending:
            session.eval(given, runner.ON_DEVICE)
            wait_for(session.pool.device)
    session.stats.prefill_s = time.perf_counter() - start


def _evaluate_pending(sessions: list["Session"], logits: str) -> None:
    """The tokens that were drawn last, in one batch."""
    waiting = [session for session in sessions if session.pending]
    if waiting:
        runner.run(waiting, [[]] * len(waiting), logits)


def _draw_together(streams: list[Stream]) -> list[int | None]:
    """The next token of each, of streams of one call, where a GPU draws them; None: the stream's to draw."""
    sessions, params = [stream.session for stream in streams], streams[0].params
    rows = [session.made_logits for session in sessions]
    if params.reads_logits or not all(logits is not None and lookahead.is_possible(logits) for logits in rows):
        return [None] * len(streams)
    return lookahead.draw(sessions, params, ahead=not streams[0].is_last)


def _detokenizer(session: "Session") -> StreamingDetokenizer | None:
    """For the text behind what the session holds, so that a space which belongs to its first token is not lost. None
    for a model without a vocabulary."""
    tokenizer = session.model.tokenizer
    if tokenizer is None or not tokenizer.has_vocab:
        return None
    prev_id = session.tokens[-1] if session.tokens and session.tokens[-1] != EMBEDDING else None
    return StreamingDetokenizer(tokenizer, prev_id=prev_id)


def _matcher(session: "Session", params: SamplingParams) -> "Matcher | None":
    """Of the params' constraint, for the text behind what the session holds."""
    if params.constraint is None:
        return None
    leading_space = _detokenizer(session).swallows_space
    return params.constraint.matcher(session.model.tokenizer, leading_space=leading_space, stop_ids=params.stop_ids)
