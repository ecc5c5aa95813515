"""Session: one stream of tokens over a model."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.prefix import content_of, n_common
from dasllama_torch.cache.sequence import Sequence as CacheSequence
from dasllama_torch.engine import generation, graphs, lookahead, runner, session_file
from dasllama_torch.engine.captured import wait_for
from dasllama_torch.engine.embeddings import EMBEDDING, Embeddings, Prompt, Span
from dasllama_torch.engine.generation import Sample
from dasllama_torch.engine.lookahead import Ahead, Arrival
from dasllama_torch.engine.stats import Stats
from dasllama_torch.errors import CannotRewind, ContextFull, DasllamaError
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.sampling import SamplingParams

if TYPE_CHECKING:
    from dasllama_torch.engine.prefix_cache import PrefixCache

DEFAULT_SEED = 0  # of a new session, so that runs repeat


class Session:
    """One stream over a model: its tokens, what it holds in a pool, its random generator.

    tokens: the ids evaluated, -1 for a row of embeddings; n_past: how many. spans: which rows are embeddings.
    rope_delta: rotary position of the next token less n_past, not 0 behind embeddings with positions of their own
    (transformers: `rope_deltas`). logits: f32 [V] after the last of them, on the CPU; None before any.
    pending: what the next evaluation puts before its own ids: a token that `generate` has yielded, and what a `shift`
    has left to be evaluated anew.
    n_ctx: the most it may hold; on_full: what more does, "error" raises ContextFull, "shift" shifts, past the first
    `keep` tokens. rewind: see `truncate`. stats: of the last prompt. prefix_cache: see `create_session`. sequence: its
    pages and states, which go back to the pool with `close`, at the end of a `with` block, or when the session is
    collected. steps: of its model, for `graphs`. Not thread-safe.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        n_ctx: int,
        rewind: int = 0,
        prefix_cache: "PrefixCache | None" = None,
        on_full: str = "error",
        keep: int = 0,
    ):
        self.model, self.pool, self.n_ctx, self.prefix_cache = model, pool, n_ctx, prefix_cache
        self.on_full, self.keep = on_full, keep
        self.origin: int | None = None  # what the prefix cache knows its tokens' forwards by
        self.sequence = CacheSequence(pool, rewind)
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.rope_delta = 0
        self.pending: list[int] = []
        self.made_logits: Tensor | None = None  # `logits` where they were made, until somebody asks for them
        self.ahead: Ahead | None = None  # a step that `generate` has begun
        self.arrival: Arrival | None = None  # how a GPU's tokens come, once some have
        self.stats = Stats()
        self.generator = torch.Generator().manual_seed(DEFAULT_SEED)
        self.steps = graphs.steps_of(model)
        self._closed = False

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    @property
    def history(self) -> list[int]:
        """The ids evaluated, without the rows of embeddings: what penalties look at."""
        return [token for token in self.tokens if token != EMBEDDING] if self.spans else self.tokens

    @property
    def stands_ready(self) -> bool:
        """Whether a next token needs nothing but a step: no room, no copy of a page, no note in a prefix cache."""
        held = self.sequence
        return len(self.tokens) < self.n_ctx and not self.prefix_cache and not held.torn and held.has(1)

    @property
    def logits(self) -> Tensor | None:
        if self.made_logits is not None:
            self.made_logits = self.made_logits.cpu()
        return self.made_logits

    @logits.setter
    def logits(self, logits: Tensor | None) -> None:
        self.made_logits = logits

    def eval(self, ids: Sequence[int] | Embeddings, logits: str | None = "last") -> Tensor | None:
        """Evaluate ids, or embeddings, at the end of the session and advance it; none are needed if a token is pending.

        logits: "last" returns f32 [V] of the last position, "all" f32 [len(ids), V], None returns nothing and skips the
        head. Where the session is empty and has a prefix cache, what that holds of the ids is not evaluated again,
        unless all logits are wanted. Raises ContextFull or OutOfPages, leaving the session as it was; a session that
        shifts (`create_session`'s on_full) may have done so before OutOfPages.
        """
        return eval_batch([self], [ids], logits)[0]

    def prefill(self, prompt: Sequence[int | Embeddings], *, checkpoint: int | None = None) -> Tensor:
        """Make a prompt all that the session holds, and return the logits f32 [V] after it: ids, and embeddings between
        them.

        Evaluated is only what the session does not hold of it yet, nor its prefix cache: of a chat's next turn the new
        messages, and where its history was rendered anew what follows the first difference. A session goes back to that
        like `truncate`, so layers with a window or a recurrent state may have to go back further: to a checkpoint, to
        what a prefix cache keeps, or to the beginning. The last token is always evaluated, unless the session stands
        behind it already. `stats` counts both kinds.

        checkpoint: where in the prompt to make one, in place of all that there are: before what the next prompt may not
        hold. It is left out where the session stands behind that already.

        Raises ContextFull, leaving the session as it was, for a prompt beyond n_ctx, also where the session shifts: a
        shift forgets what was said, and what to leave out of a prompt is the caller's choice. Whatever else it raises
        leaves it with a prefix of the prompt.
        """
        self.hold_prompt(prompt, checkpoint)
        return self.logits

    def hold_prompt(self, prompt: Sequence[int | Embeddings], checkpoint: int | None = None) -> None:
        """`prefill`, for whoever takes the logits where they were made."""
        self._check_open()
        prompt = Prompt.of(prompt)
        n = len(prompt.ids)
        if not n:
            raise ValueError("no ids to evaluate: wanted at least one")
        if n > self.n_ctx:
            raise ContextFull(f"{n} tokens exceed the session's context, n_ctx={self.n_ctx}")
        self.stats = stats = Stats(n_prompt=n)
        start = time.perf_counter()
        if prompt.ids == self.tokens and prompt.spans == self.spans and self.made_logits is not None:
            stats.reused_tokens, self.pending = n, []
            return
        stats.reused_tokens, stats.first_difference = self._go_back(prompt)
        if checkpoint is not None and stats.reused_tokens <= checkpoint < n:
            for part in prompt.rest(self.n_past, checkpoint):
                runner.run([self], [part], None)
            self.sequence.checkpoint(alone=True)
        *parts, last = prompt.rest(self.n_past)
        for part in parts:
            runner.run([self], [part], None)
        runner.run([self], [last], runner.ON_DEVICE)
        wait_for(self.pool.device)
        stats.prefill_s = time.perf_counter() - start

    def _attach(self, ids: Sequence[int] | Embeddings) -> int:
        """How many of ids an empty session takes from its prefix cache."""
        cache = self.prefix_cache
        if self.tokens or self.pending or cache is None or not cache.is_open or isinstance(ids, Embeddings):
            return 0
        return cache.attach(self, ids)

    def _go_back(self, prompt: Prompt) -> tuple[int, int | None]:
        """Hold as much of a prompt as can be had without an evaluation, and nothing else: how much, and `Stats`'
        first_difference."""
        held = self.tokens + self.pending
        wanted = content_of(prompt.ids, prompt.spans, 0, len(prompt.ids))
        same = n_common(content_of(held, self.spans, 0, len(held)), wanted)
        difference = same if same < min(len(held), len(prompt.ids)) else None
        reused = self._reachable(min(same, self.n_past, len(prompt.ids) - 1), prompt.spans)
        if self.prefix_cache:
            match = self.prefix_cache.find(self, prompt)
            if match.agreed > same or not held:
                difference = match.agreed if match.differs else None
            if match.length > reused:
                self.truncate(0)
                self.prefix_cache.take(self, prompt, match)
                reused = match.length
        self.truncate(reused)
        return reused, difference

    def _reachable(self, n: int, spans: Sequence[Span]) -> int:
        """The last position up to n that the session can go back to, and that lies within none of the spans."""
        at = self.sequence.reachable(n)
        while span := next((span for span in spans if span.start < at < span.stop), None):
            at = self.sequence.reachable(span.start)
        return at

    def eval_embd(self, rows: Tensor, logits: str | None = "last") -> Tensor | None:
        """`eval` of rows of embeddings f32 [n, C] in place of ids, each of which sees those before it; see
        `Embeddings`."""
        return self.eval(Embeddings(rows), logits)

    def eval_embd_span(self, rows: Tensor, logits: str | None = "last") -> Tensor | None:
        """`eval_embd` of rows that see each other, too: a picture of gemma3 or gemma4. They go through the model in one
        forward, however many. Raises UnsupportedModel where rows cannot see those after them."""
        return self.eval(Embeddings(rows, causal=False), logits)

    def eval_embd_span_mrope(
        self, rows: Tensor, positions: Tensor, causal: bool = True, logits: str | None = "last"
    ) -> Tensor | None:
        """`eval_embd` of rows with positions int64 [n, 3]: time, height and width, counted from the session's next
        rotary position (n_past + rope_delta). Text goes on behind the largest of them.

        causal: as pictures of the Qwen models are, in transformers and llama.cpp; False as in `eval_embd_span`. Raises
        UnsupportedModel for a model without M-RoPE.
        """
        return self.eval(Embeddings(rows, causal, positions), logits)

    def hold(self, given: Embeddings, n: int) -> None:
        """The last tokens of the session are the first n rows of the embeddings; fewer may have been noted before."""
        span = given.span(self.n_past - n).until(self.n_past)
        self.set_spans([*(other for other in self.spans if other.start < span.start), span])

    def hold_attached(self, prompt: Prompt, n: int) -> None:
        """The session's sequence has come to hold the first n rows of a prompt."""
        self.tokens = prompt.ids[:n]
        self.set_spans([span for span in prompt.spans if span.start < n])

    def set_spans(self, spans: list[Span]) -> None:
        """The session's rows of embeddings are these, in order."""
        self.spans = spans
        self.rope_delta = sum(span.advance - (span.stop - span.start) for span in spans)

    def fork(self) -> "Session":
        """A new session that stands where this one does, whatever is done to either afterwards: with its tokens, its
        pending token, its logits and its checkpoints.

        It takes no memory yet. The two share what they hold in the pool; the first to evaluate copies the page that its
        rows begin in, if that is not full, and the recurrent states. The random generator is a copy too: set_seed if
        the two shall not draw alike. Raises CannotRewind where a failed evaluation has left recurrent states between
        two tokens.
        """
        self._check_open()
        fork = Session(
            self.model,
            self.pool,
            self.n_ctx,
            prefix_cache=self.prefix_cache,
            on_full=self.on_full,
            keep=self.keep,
        )
        fork.origin = self.origin
        fork.sequence = self.sequence.fork()
        fork.tokens, fork.pending = self.tokens.copy(), self.pending.copy()
        fork.set_spans(self.spans.copy())
        fork.logits = None if self.made_logits is None else self.made_logits.clone()
        fork.generator.set_state(self.generator.get_state())
        return fork

    def save(self, path: str | os.PathLike) -> None:
        """Write the session to a file, from which `load_session` goes on exactly: what it holds in the pool as it is
        kept there, windows, recurrent states and checkpoints included, tokens, embeddings' places, logits, pending
        tokens and the random generator; not the model, the prefix cache, nor `stats`.

        The file (safetensors) appears whole or not at all, in place of one of that name. Raises OSError or
        SessionFileError where it cannot be written, CannotRewind where a failed evaluation has left recurrent states
        between two tokens.
        """
        self._check_open()
        session_file.save(self, path)

    @property
    def rewinds(self) -> bool:
        """Whether `truncate` reaches every position, however long ago: no layer has a window or a recurrent state."""
        return not self.pool.states and not any(group.window for group in self.pool.groups)

    def checkpoint(self) -> None:
        """Make it possible to `truncate` to here, whatever the layers; costs a copy of the recurrent states and keeps
        the pages that windows see from here. Raises OutOfPages."""
        self._check_open()
        self.sequence.checkpoint()

    def truncate(self, n: int) -> None:
        """Forget all tokens but the first n, and checkpoints after them.

        Layers that see all keys go back anywhere, windowed ones at least `rewind` tokens or to a checkpoint, recurrent
        ones to a checkpoint or to 0. Raises CannotRewind, changing nothing, where that does not reach, and for an n
        within a non-causal span, whose rows have seen those that would go.
        """
        self._check_open()
        if not 0 <= n <= self.n_past:
            raise ValueError(f"n is {n}, wanted 0 to {self.n_past}, the tokens of the session")
        for span in self.spans:
            if span.start < n < span.stop and not span.causal:
                raise CannotRewind(
                    f"position {n} lies in a span of embeddings that have seen each other: wanted {span.start} or "
                    f"{span.stop}"
                )
        self.sequence.truncate(n)
        self.set_spans([span.until(n) for span in self.spans if span.start < n])
        if n < self.n_past:
            self.logits = None
        self.ahead = None
        del self.tokens[n:]
        self.pending = []

    def shift(self, n: int | None = None) -> None:
        """Forget the n tokens that follow the first `keep`; None: half of those, and at least one.

        The session is then what one would be that had never seen them: the tokens behind are evaluated anew, at their
        new positions, by the next evaluation, whose logits are exactly those of a fresh session. That costs as much as
        a prompt of that length, and of the first `keep` too where a window or a recurrent state cannot go back to
        them (see `truncate`); `stats` counts it. Keys are not turned to new positions in place: that would be wrong
        behind a window, in a quantized cache and in recurrent states. Raises CannotRewind, changing nothing, where rows
        of embeddings would have to be evaluated anew.
        """
        self._check_open()
        held = self.tokens + self.pending
        n = max(1, (len(held) - self.keep) // 2) if n is None else n
        if not 0 < n <= len(held) - self.keep:
            raise ValueError(f"n is {n}, wanted 1 to {len(held) - self.keep}, the tokens behind the first {self.keep}")
        start, pending = self._shifted(held, n)
        self.stats.shifts += 1
        kept = max(0, min(self.keep, self.n_past) - start)
        self.stats.reevaluated_tokens += kept + max(0, self.n_past - self.keep - n)
        self.truncate(start)
        self.pending = pending

    def room_for(self, n: int) -> int:
        """How many tokens to `shift` away before n further ones; 0: none. Raises ContextFull where that is not wanted
        or would not do, CannotRewind as `shift`."""
        held = len(self.tokens) + len(self.pending)
        excess = held + n - self.n_ctx
        if excess <= 0:
            return 0
        if self.on_full == "error" or excess > held - self.keep:
            kept = "" if self.on_full == "error" else f", of which the first {self.keep} stay"
            raise ContextFull(
                f"{held} tokens of the session and {n} new ones exceed its context, n_ctx={self.n_ctx}{kept}"
            )
        away = max(excess, (held - self.keep) // 2)
        self._shifted(self.tokens + self.pending, away)
        return away

    def _shifted(self, held: list[int], n: int) -> tuple[int, list[int]]:
        """Where a shift goes back to, and what it leaves to be evaluated."""
        start = self._reachable(min(self.keep, self.n_past), [span for span in self.spans if not span.causal])
        pending = held[start : self.keep] + held[self.keep + n :]
        if EMBEDDING in pending:
            raise CannotRewind(
                f"a shift by {n} tokens would evaluate rows of embeddings anew, and the session has not kept them"
            )
        return start, pending

    def set_seed(self, seed: int) -> None:
        """Start the session's random numbers anew."""
        self.generator.manual_seed(seed)

    def sample(self, params: SamplingParams | None = None, allowed: Tensor | None = None, ahead: bool = False) -> int:
        """Draw a token from the logits after all tokens so far; it is not evaluated. On a GPU they stay there, and the
        id alone comes back, unless a mask or logprobs need them here.

        allowed: bool [V], the tokens that may come, such as `Matcher.allowed` of a constraint, which `sample` alone
        cannot follow: params with one are refused without it. ahead: the token will most likely be evaluated next, by
        itself, so a GPU may begin with that at once; the results are the same.
        """
        params = params or SamplingParams()
        on_device = allowed is None and not params.reads_logits
        if params.constraint is not None and allowed is None:
            raise ValueError("a constraint is followed by generate; wanted params without one, or what is allowed")
        if self.pending:
            self.eval([], runner.ON_DEVICE if on_device else "last")
        if self.made_logits is None:
            raise DasllamaError("the session has no logits to sample from: eval something first")
        logits = self.made_logits if on_device else self.logits
        if ahead and lookahead.is_possible(logits):
            return lookahead.draw([self], params, ahead=True)[0]
        return sampling.sample(logits, self.history, params, self.generator, allowed)

    def generate(
        self,
        ids: Sequence[int | Embeddings] | Embeddings = (),
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        *,
        whole: bool = False,
        checkpoint: int | None = None,
    ) -> Iterator[tuple[int | None, str]]:
        """Evaluate ids, or embeddings, then yield (token id, text) until something ends the text: an end-of-generation
        token, what the params say, max_tokens, or the context's end, over which a session that shifts goes on.
        `stats.stop` says what it was. whole: ids are all that the session shall hold, and
        checkpoint is a place in them, see `prefill`.

        An end-of-generation token and the params' stop_ids end the stream and are not part of it. A stop string ends it
        when its last character has come, also in the middle of a token: the text ends before it, while the tokens that
        spell it are yielded and held, as the model has seen them; a next turn goes on behind them, or by `prefill` from
        where its own text differs. With a constraint only tokens come behind which the text can still become one of the
        language, and where it is one those that end it; the stream ends by itself where nothing can follow. max_tokens
        and the context's end may cut it short: `stats.stop` is "length" or "context" then. A constraint is about the
        text of one call, from its beginning.

        A yielded token is evaluated only with what follows, so a caller may stop at any point, and the next call goes
        on where the stream ended. The text is empty while a character is incomplete, and while it may be the beginning
        of a stop string; what is left of it at the end comes as a last pair (None, text), where a character that stayed
        incomplete is "\ufffd". Without a vocabulary the text is empty. Where params.logprobs is a number,
        `stats.logprobs` grows with each token.

        Raises ContextFull if the ids do not fit, ConstraintError if the vocabulary cannot spell what has to come,
        ValueError for ids of the params that it lacks, and DasllamaError for a text that goes on after the session has
        begun another.
        """
        return generation.generate(self, ids, params or SamplingParams(), max_tokens, whole, checkpoint)

    def generate_n(
        self,
        ids: Sequence[int | Embeddings] | Embeddings = (),
        params: SamplingParams | None = None,
        n: int = 1,
        max_tokens: int | None = None,
        *,
        whole: bool = False,
    ) -> list[Sample]:
        """n texts behind the same ids, which are evaluated once: n forks go on from there, in one batch per step, until
        each has ended as in `generate`. The session itself stays behind the ids.

        Sample i draws as a fork alone would whose seed is params.seed + i; without a seed each gets one from the
        session's generator. The forks stay open and hold their part of the pool: close those that are not needed.
        """
        return generation.generate_n(self, ids, params or SamplingParams(), n, max_tokens, whole)

    def generate_embd(
        self,
        rows: Tensor,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        *,
        causal: bool = True,
        positions: Tensor | None = None,
    ) -> Iterator[tuple[int | None, str]]:
        """`generate` behind rows of embeddings f32 [n, C]; causal and positions as of `Embeddings`."""
        return self.generate(Embeddings(rows, causal, positions), params, max_tokens)

    def close(self) -> None:
        """Give pages and states back. A closed session cannot be used again."""
        if not self._closed:
            self._closed = True
            self.sequence.free()

    def _check_open(self) -> None:
        if self._closed:
            raise DasllamaError("the session is closed")

    def __reduce__(self):
        raise TypeError("a session cannot be pickled: wanted fork(session) for a copy, session.save(path) for a file")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.n_past} of {self.n_ctx} tokens"
        return f"<Session of {type(self.model).__name__}: {state}, kv_dtype {self.pool.kv_dtype!r}>"

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self):
        self.close()


def eval_batch(
    sessions: Sequence[Session], ids: Sequence[Sequence[int] | Embeddings], logits: str | None = "last"
) -> list[Tensor | None]:
    """Evaluate ids[i], or embeddings, at the end of sessions[i]: prompts and single tokens, any lengths, in one ragged
    batch.

    The sessions are distinct and share model and pool. Results per session as of `Session.eval`; they are those that
    the session would have had alone.
    """
    may_attach = False
    for session in sessions:
        session._check_open()
        may_attach = may_attach or (session.prefix_cache and not session.tokens)
    if logits == "all" or len(sessions) != len(ids) or not may_attach:
        return runner.run(sessions, ids, logits)
    reused = [session._attach(given) for session, given in zip(sessions, ids, strict=True)]
    try:
        return runner.run(sessions, [given[n:] if n else given for given, n in zip(ids, reused, strict=True)], logits)
    except BaseException:
        for session, n in zip(sessions, reused, strict=True):
            if n and session.n_past == n:  # as it was
                session.truncate(0)
        raise
