"""Session: one stream of tokens over a model."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.sequence import Sequence as CacheSequence
from dasllama_torch.engine import runner
from dasllama_torch.errors import ContextFull, DasllamaError
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.sampling import SamplingParams
from dasllama_torch.text.detokenizer import StreamingDetokenizer

if TYPE_CHECKING:
    from dasllama_torch.engine.prefix_cache import PrefixCache

DEFAULT_SEED = 0  # of a new session, so that runs repeat


@dataclass
class Stats:
    """Of the last `generate` or `prefill`, or of the `eval` that began a session of a prefix cache. Times in seconds,
    rates in tokens per second.

    n_prompt: tokens of the prompt; reused_tokens: those of them that were not evaluated, as the session or its prefix
    cache held them. first_difference: index of the first token at which the prompt departs from the history that agrees
    with it longest, of those that the session and its prefix cache hold; None if that history does not go on.
    n_generated: tokens yielded. prefill_s: time to evaluate the prompt. ttft_s: time to the first token. decode_s: from
    the first token to the last. stop: why it ended: "eog", "length", "context", or "caller", which also stands there
    while it runs and after an error.
    """

    n_prompt: int = 0
    reused_tokens: int = 0
    first_difference: int | None = None
    n_generated: int = 0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    stop: str = "caller"

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that were evaluated."""
        return self.n_prompt - self.reused_tokens

    @property
    def prefill_tps(self) -> float:
        return self.prefilled_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return (self.n_generated - 1) / self.decode_s if self.decode_s else 0.0


class Session:
    """One stream over a model: its tokens, what it holds in a pool, its random generator.

    tokens: the ids evaluated; n_past: how many. logits: f32 [V] after the last of them, None before any.
    pending: a token that `generate` has yielded; the next evaluation puts it before its own ids.
    n_ctx: the most it may hold; more raises ContextFull. rewind: see `truncate`. stats: of the last prompt.
    prefix_cache: see `create_session`. sequence: its pages and states, which go back to the pool with `close`, at the
    end of a `with` block, or when the session is collected. Not thread-safe.
    """

    def __init__(
        self, model: CausalLM, pool: KVPool, n_ctx: int, rewind: int = 0, prefix_cache: "PrefixCache | None" = None
    ):
        self.model, self.pool, self.n_ctx, self.prefix_cache = model, pool, n_ctx, prefix_cache
        self.origin: int | None = None  # what the prefix cache knows its tokens' forwards by
        self.sequence = CacheSequence(pool, rewind)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.logits: Tensor | None = None
        self.stats = Stats()
        self._generator = torch.Generator().manual_seed(DEFAULT_SEED)
        self._closed = False

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def eval(self, ids: Sequence[int], logits: str | None = "last") -> Tensor | None:
        """Evaluate ids at the end of the session and advance it; none are needed if a token is pending.

        logits: "last" returns f32 [V] of the last position, "all" f32 [len(ids), V], None returns nothing and skips the
        head. Where the session is empty and has a prefix cache, what that holds of the ids is not evaluated again,
        unless all logits are wanted. Raises ContextFull or OutOfPages, leaving the session as it was.
        """
        return eval_batch([self], [ids], logits)[0]

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Make ids the tokens of the session, all of them, and return the logits f32 [V] after the last.

        Evaluated is only what the session does not hold of them yet, nor its prefix cache: of a chat's next turn the
        new messages, and where its history was rendered anew what follows the first difference. A session goes back to
        that like `truncate`, so layers with a window or a recurrent state may have to go back further: to a checkpoint,
        to what a prefix cache keeps, or to the beginning. Never less than the last token is evaluated, except that
        nothing is if the session stands there already. `stats` counts both kinds.

        Raises ContextFull, leaving the session as it was; whatever else it raises leaves it with a prefix of ids.
        """
        self._check_open()
        ids = [int(token) for token in ids]
        if not ids:
            raise ValueError("no ids to evaluate: wanted at least one")
        if len(ids) > self.n_ctx:
            raise ContextFull(f"{len(ids)} tokens exceed the session's context, n_ctx={self.n_ctx}")
        self.stats = stats = Stats(n_prompt=len(ids))
        start = time.perf_counter()
        if ids == self.tokens and self.logits is not None:
            stats.reused_tokens, self.pending = len(ids), []
            return self.logits
        held = self.tokens + self.pending
        shorter = min(len(ids), len(held))
        agreed = next((i for i in range(shorter) if ids[i] != held[i]), shorter)
        differs = agreed < shorter
        reused = self.sequence.reachable(min(agreed, self.n_past, len(ids) - 1))
        if self.prefix_cache:
            match = self.prefix_cache.find(self, ids)
            if match.agreed > agreed or not held:
                agreed, differs = match.agreed, match.differs
            if match.length > reused:
                self.truncate(0)
                self.prefix_cache.take(self, ids, match)
                reused = match.length
        self.truncate(reused)
        stats.reused_tokens, stats.first_difference = reused, agreed if differs else None
        (logits,) = runner.run([self], [ids[reused:]], "last")
        stats.prefill_s = time.perf_counter() - start
        return logits

    def fork(self) -> "Session":
        """A new session that stands where this one does, whatever is done to either afterwards: with its tokens, its
        pending token, its logits and its checkpoints.

        It takes no memory yet. The two share what they hold in the pool; the first to evaluate copies the page that its
        rows begin in, if that is not full, and the recurrent states. The random generator is a copy too: set_seed if
        the two shall not draw alike. Raises CannotRewind where a failed evaluation has left recurrent states between
        two tokens.
        """
        self._check_open()
        fork = Session(self.model, self.pool, self.n_ctx, prefix_cache=self.prefix_cache)
        fork.origin = self.origin
        fork.sequence = self.sequence.fork()
        fork.tokens, fork.pending = self.tokens.copy(), self.pending.copy()
        fork.logits = None if self.logits is None else self.logits.clone()
        fork._generator.set_state(self._generator.get_state())
        return fork

    def checkpoint(self) -> None:
        """Make it possible to `truncate` to here, whatever the layers; costs a copy of the recurrent states and keeps
        the pages that windows see from here. Raises OutOfPages."""
        self._check_open()
        self.sequence.checkpoint()

    def truncate(self, n: int) -> None:
        """Forget all tokens but the first n, and checkpoints after them.

        Layers that see all keys go back anywhere, windowed ones at least `rewind` tokens or to a checkpoint, recurrent
        ones to a checkpoint or to 0. Raises CannotRewind, changing nothing, where that does not reach.
        """
        self._check_open()
        if not 0 <= n <= self.n_past:
            raise ValueError(f"n is {n}, wanted 0 to {self.n_past}, the tokens of the session")
        self.sequence.truncate(n)
        if n < self.n_past:
            self.logits = None
        del self.tokens[n:]
        self.pending = []

    def set_seed(self, seed: int) -> None:
        """Start the session's random numbers anew."""
        self._generator.manual_seed(seed)

    def sample(self, params: SamplingParams | None = None) -> int:
        """Draw a token from the logits after all tokens so far; it is not evaluated."""
        if self.pending:
            self.eval([])
        if self.logits is None:
            raise DasllamaError("the session has no logits to sample from: eval something first")
        return sampling.sample(self.logits, self.tokens, params or SamplingParams(), self._generator)

    def generate(
        self,
        ids: Sequence[int] = (),
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        *,
        whole: bool = False,
    ) -> Iterator[tuple[int | None, str]]:
        """Evaluate ids, or with `whole` make them all that the session holds (see `prefill`), then yield (token id,
        text) until an end-of-generation token, max_tokens or the context's end.

        An end-of-generation token ends the stream and is not part of it. A yielded token is evaluated only with what
        follows, so a caller may stop at any point, and the next call goes on where the stream ended. The text is empty
        while a character is incomplete; one that stays so is closed by a last pair (None, "\ufffd"). Without a
        vocabulary the text is empty. Raises ContextFull if the ids do not fit.
        """
        params = params or SamplingParams()
        if params.seed is not None:
            self.set_seed(params.seed)
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}, wanted 0 or more")
        tokenizer = self.model.tokenizer
        has_text = tokenizer is not None and tokenizer.has_vocab
        stop_ids = tokenizer.eog_ids if has_text else frozenset()
        start = time.perf_counter()
        if whole:
            self.prefill(ids)
        else:
            self.stats = Stats(n_prompt=len(self.pending) + len(ids))
            if len(ids) or self.pending:
                self.eval(ids)
        stats = self.stats
        # The text goes on after what there is: a space that belongs to its first token is not lost.
        text = StreamingDetokenizer(tokenizer, prev_id=self.tokens[-1] if self.tokens else None) if has_text else None
        stats.prefill_s = time.perf_counter() - start
        first = None
        while max_tokens is None or stats.n_generated < max_tokens:
            if self.n_past + len(self.pending) > self.n_ctx:
                stats.stop = "context"
                break
            token = self.sample(params)
            now = time.perf_counter()
            if first is None:
                first, stats.ttft_s = now, now - start
            if token in stop_ids:
                stats.stop = "eog"
                break
            stats.n_generated += 1
            stats.decode_s = now - first
            self.pending = [token]
            yield token, text.feed(token) if text else ""
        else:
            stats.stop = "length"
        tail = text.finish() if text else ""
        if tail:
            yield None, tail

    def close(self) -> None:
        """Give pages and states back. A closed session cannot be used again."""
        if not self._closed:
            self._closed = True
            self.sequence.free()

    def _check_open(self) -> None:
        if self._closed:
            raise DasllamaError("the session is closed")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self):
        self.close()


def eval_batch(
    sessions: Sequence[Session], ids: Sequence[Sequence[int]], logits: str | None = "last"
) -> list[Tensor | None]:
    """Evaluate ids[i] at the end of sessions[i]: prompts and single tokens, any lengths, in one ragged batch.

    The sessions are distinct and share model and pool. Results per session as of `Session.eval`; they are those that
    the session would have had alone.
    """
    for session in sessions:
        session._check_open()
    begin = [bool(s.prefix_cache and s.prefix_cache.is_open and not s.tokens) for s in sessions]
    if logits == "all" or not any(begin) or len(sessions) != len(ids):
        return runner.run(sessions, ids, logits)
    reused = [s.prefix_cache.attach(s, given) if b else 0 for s, given, b in zip(sessions, ids, begin, strict=True)]
    try:
        return runner.run(sessions, [given[n:] for given, n in zip(ids, reused, strict=True)], logits)
    except BaseException:
        for session, n in zip(sessions, reused, strict=True):
            if n and session.n_past == n:  # as it was
                session.truncate(0)
        raise
