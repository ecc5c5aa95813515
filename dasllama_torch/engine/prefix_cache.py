"""What a session need not evaluate again, since another, or itself, has done so before."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.prefix import Match, PrefixChain, PrefixTree
from dasllama_torch.engine import graphs
from dasllama_torch.engine.embeddings import Embeddings, Prompt
from dasllama_torch.engine.session import Session, Stats
from dasllama_torch.errors import DasllamaError
from dasllama_torch.modules import base
from dasllama_torch.modules.causal_lm import CausalLM


class PrefixCache:
    """The full pages of what its sessions have evaluated, for sessions whose prompts begin alike.

    Its sessions are those of `create_session(prefix_cache=...)`. A session adds each page as soon as it is full, before
    a window leaves it behind, and an empty one begins a prompt with the longest prefix that is kept (`attach`). Pages
    are shared, not copied; the results are those of a session that evaluates all. The cache holds at most `max_bytes`
    of pages and recurrent states, those that sessions hold too included, and gives back what was used longest ago; so
    it does when the pool has no room left for what sessions need.

    Recurrent layers can only go on from a copy of their states. One is kept every `checkpoint_every` pages, at the last
    page boundary before a prompt's end and at its end if that is one; a copy costs `pool.state_bytes`. So a prompt's
    forward is cut at these boundaries.

    It serves one model as it is. What was evaluated under hooks, dispatch modes or modules from elsewhere is not kept,
    and nothing is reused under them: `why_not` tells. A module that has changed empties the cache. Values that are
    written into a weight's memory do not show: call `clear`. Not thread-safe.
    """

    _closed = True  # until it has been made

    def __init__(self, model: CausalLM, pool: KVPool, max_bytes: int, checkpoint_every: int):
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, wanted 0 or more")
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {checkpoint_every}, wanted 1 page or more")
        if pool.prefix_tree:
            raise ValueError("the pool has a prefix cache already")
        self.model, self.pool = model, pool
        self._tree = pool.prefix_tree = PrefixTree(pool, max_bytes, checkpoint_every)
        self._epoch, self._obstacle = -1, None
        self._modules: list[dict[str, Any]] = []  # of the version
        self._version = 0  # how often they have changed
        ropes = [layer.rope for layer in model.config.layers if layer.rope and layer.rope.long]
        self._contexts = sorted({rope.long.original_context for rope in ropes})
        self._closed = False

    def attach(self, session: Session, prompt: Sequence[int | Embeddings]) -> int:
        """Let an empty session hold the longest kept prefix of a prompt, ids and embeddings between them: in whole
        pages, without the prompt's last token, whose logits are wanted, and with embeddings from beginning to end or
        not at all. Returns its length; the caller evaluates the rest. Sessions do so by themselves in `eval`, of ids,
        in `generate` and in `prefill`."""
        self._check(session)
        if n := session.n_past + len(session.pending):
            raise ValueError(f"wanted an empty session, found one of {n} tokens")
        prompt = Prompt.of(prompt)
        match = self.find(session, prompt)
        self.take(session, prompt, match)
        difference = match.agreed if match.differs else None
        session.stats = Stats(n_prompt=len(prompt.ids), reused_tokens=match.length, first_difference=difference)
        return match.length

    def find(self, session: Session, prompt: Prompt) -> Match:
        """What is kept of a prompt of the session."""
        if self._closed or self._state() is None or len(prompt.ids) > session.n_ctx:
            return Match([], 0, 0, False)
        return self._tree.find(self._root(session), prompt.ids, prompt.spans)

    def take(self, session: Session, prompt: Prompt, match: Match) -> None:
        """`attach` of what was found."""
        if match.length:
            self._tree.attach(match, session.sequence)
            session.hold_attached(prompt, match.length)
            session.origin = self._state()

    def insert(self, session: Session, with_state: bool = True) -> None:
        """Keep the session's full pages, and with_state its recurrent states if its tokens end with a page. Sessions do
        so by themselves when a page is full, so it is for what has been given back since. Nothing is kept of a session
        whose tokens were evaluated under a hook, or before the model was changed."""
        self._check(session)
        if session.origin is not None and session.origin == self._state():
            self._tree.insert(self._root(session), session.tokens, session.spans, session.sequence, with_state)

    def marks(self, session: Session, n: int) -> list[int]:
        """Where an evaluation of n further tokens has to stop so that recurrent states can be kept, in tokens."""
        if self._closed or self._state() is None:
            return []
        return [at - session.n_past for at in self._tree.marks(session.n_past, session.n_past + n)]

    def note(self, session: Session, n: int, with_state: bool) -> None:
        """The last n tokens of a session have been evaluated, and its windows still hold what they saw."""
        state, rows = self._state(), self.pool.page_rows
        if session.n_past == n:
            session.origin = state
        elif session.origin != state:
            session.origin = None  # of two kinds: nothing of it can be reused until it begins anew
        if session.n_past // rows > (session.n_past - n) // rows and not self._closed:
            self.insert(session, with_state)

    def why_not(self) -> str:
        """What forbids to keep or reuse anything at the moment, or ""."""
        if self._closed:
            return "the prefix cache is closed"
        if graphs.is_watched():
            return "a dispatch mode or a hook of all modules"
        self._state()
        return self._obstacle.text if self._obstacle else ""

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and states that it keeps, those that sessions hold too included."""
        return self._tree.used_bytes

    def held_groups(self) -> int:
        """How many stretches of `pool.page_rows` tokens it keeps."""
        return self._tree.n_blocks

    def chains(self) -> list[PrefixChain]:
        """The histories that it keeps, those with the most hits first."""
        return self._tree.chains()

    def clear(self) -> None:
        """Give everything back to the pool; what sessions hold remains theirs."""
        self._tree.clear()

    def close(self) -> None:
        """Clear it for good. Its sessions go on without."""
        if not self._closed:
            self._closed = True
            self._tree.clear()
            self.pool.prefix_tree = None

    def _check(self, session: Session) -> None:
        if self._closed:
            raise DasllamaError("the prefix cache is closed")
        session._check_open()
        if session.prefix_cache is not self:
            raise ValueError("the session is none of this prefix cache: wanted create_session(prefix_cache=...)")

    def _state(self) -> int | None:
        """What tells two kinds of forwards apart; None for one whose results must not be reused."""
        if graphs.is_watched():
            return None
        if base.epoch() != self._epoch or (self._obstacle and not self._obstacle.lasting):
            self._epoch, self._obstacle = base.epoch(), graphs.find_obstacle(self.model)
            if not self._obstacle:  # and perhaps as it was: a hook has come and gone, or another model has changed
                modules = [_attributes(module) for module in self.model.modules()]
                if not _same(modules, self._modules):
                    self._modules, self._version = modules, self._version + 1
                    self._tree.clear()
        return None if self._obstacle else self._version

    def _root(self, session: Session) -> bytes:
        """What decides keys besides tokens: LongRoPE's frequencies go by the session's context."""
        return bytes(session.n_ctx > context for context in self._contexts)

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self):
        self.close()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All that is set in a module; dicts as they are now."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}


def _same(one: Any, other: Any) -> bool:
    """Whether two are one object, equal as plain values, or made of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (bool, int, float, str)) and one == other
