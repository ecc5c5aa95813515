"""What sessions may reuse of each other: full pages and recurrent states, found by the tokens that led to them. No
torch.

R tokens of a page. A block is R positions of a history from its first token on, so blocks form a tree. Each has a key,
a digest of its own content and of its parent's key; what a digest finds is compared before it is trusted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.sequence import Sequence as CacheSequence

EMBEDDING = -1  # in place of the id of a row of embeddings


class Span(Protocol):
    """Rows [start, stop) of embeddings. digest: of all that decides them; empty if that is unknown."""

    start: int
    stop: int
    digest: bytes


class Content(NamedTuple):
    """What decides the keys and values of a block, given those before it: its ids, and its rows [first, last) of each
    span as (start of the span, last, digest), counted from the block's beginning."""

    ids: tuple[int, ...]
    media: tuple[tuple[int, int, bytes], ...]


class Block:
    """R positions that follow those of `parent`.

    pages: by group of the pool, the one that is kept, -1 if none is. state: slot of the recurrent state behind the
    block, -1 if none is kept. hits: how many sessions have attached it.
    """

    __slots__ = ("children", "content", "hits", "key", "pages", "parent", "state")

    def __init__(self, parent: "Block | None", key: bytes, content: Content, n_groups: int):
        self.parent, self.key, self.content = parent, key, content
        self.pages, self.state, self.hits = [-1] * n_groups, -1, 0
        self.children: set[Block] = set()


@dataclass(frozen=True)
class Match:
    """What is kept of a prompt. blocks: those that an attach takes, length tokens in all.

    agreed: how many of the prompt's first tokens are those of a history; differs: that history goes on with another.
    """

    blocks: list[Block]
    length: int
    agreed: int
    differs: bool


@dataclass(frozen=True)
class PrefixChain:
    """One history that a prefix cache keeps, from its first token to the end of its last full page.

    ids: its tokens, -1 for a row of embeddings. hits: how many sessions have attached a part of it.
    resume_points: the lengths that an attach may take; all multiples of a page where layers neither have a window nor
    are recurrent.
    """

    ids: tuple[int, ...]
    hits: int
    resume_points: tuple[int, ...]


# Parts of a block that go one by one: a page of a windowed group (its index), the state, and the block with the rest.
_STATE, _BLOCK = -1, -2


class PrefixTree:
    """Blocks over the pages of one pool, `max_bytes` of them and of states at most, those included that sessions hold
    too. What was used longest ago goes first, from the leaves of the tree on.

    To go on behind a block takes its state where layers are recurrent, and the windows' pages before it. Both may go
    before the block does, which then still leads to later ones. state_every: blocks between two states, see `marks`.
    """

    def __init__(self, pool: KVPool, max_bytes: int, state_every: int):
        self.pool, self.max_bytes, self.state_every = pool, max_bytes, state_every
        self.used_bytes = 0
        self._roots: dict[bytes, Block] = {}  # before the first token, by what else decides a history
        self._blocks: dict[bytes, Block] = {}
        self._parts: OrderedDict[tuple[Block, int], None] = OrderedDict()  # the one used longest ago comes first
        self._windowed = [g for g, group in enumerate(pool.groups) if group.window]
        self._lasting = [g for g, group in enumerate(pool.groups) if not group.window]

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    def marks(self, start: int, stop: int) -> list[int]:
        """Positions in (start, stop] behind which `insert` wants the recurrent state, if [start, stop) is evaluated.

        Every `state_every` blocks; and of a prompt the last block that leaves a token over, for one that ends alike,
        and its end, for one that goes on.
        """
        rows = self.pool.page_rows
        if not self.pool.states:
            return []
        every = self.state_every * rows
        marks = set(range((start // every + 1) * every, stop + 1, every))
        if stop - start > 1:
            marks |= {at for at in ((stop - 1) // rows * rows, stop // rows * rows) if at > start}
        return sorted(marks)

    def find(self, root: bytes, ids: Sequence[int], spans: Sequence[Span] = ()) -> Match:
        """The longest that an attach may take of a prompt: whole pages, and not its last token, whose logits are
        wanted. It ends in no span. root: what else decides a history."""
        rows, chain, block = self.pool.page_rows, [], self._roots.get(root)
        if block is None:
            return Match([], 0, 0, False)
        for content in _contents(ids, spans, rows):
            child = self._child(block, _digest(block.key, content), content)
            if child is None:
                break
            chain.append(child)
            block = child
        agreed = len(chain) * rows
        rest = content_of(ids, spans, agreed, min(agreed + rows, len(ids)))
        ahead = max((n_common(child.content, rest) for child in block.children), default=0)
        n = min(len(chain), max(0, len(ids) - 1) // rows)
        while n and not (self._resumes(chain, n) and _is_between(spans, n * rows)):
            n -= 1
        return Match(chain[:n], n * rows, agreed + ahead, bool(block.children) and ahead < len(rest.ids))

    def attach(self, match: Match, sequence: CacheSequence) -> None:
        """Let an empty sequence hold the blocks of a match that is not empty."""
        blocks, n = match.blocks, match.length
        tables = [[block.pages[g] for block in blocks] for g in range(len(self.pool.groups))]
        for group, table in zip(self.pool.groups, tables, strict=True):
            unseen = self.pool.first_seen(group, n)
            table[:unseen] = [-1] * unseen
        sequence.adopt(n, tables, blocks[-1].state)
        for block in blocks:
            block.hits += 1
        self._touch(blocks)

    def insert(
        self, root: bytes, ids: Sequence[int], spans: Sequence[Span], sequence: CacheSequence, with_state: bool
    ) -> None:
        """Keep the full pages that a sequence holds of its positions, whose tokens ids are; with_state: and its
        recurrent state, if they end with a page."""
        rows, chain = self.pool.page_rows, []
        if root not in self._roots:
            self._roots[root] = Block(None, _digest(root, Content((), ())), Content((), ()), 0)
        block = self._roots[root]
        for b, content in enumerate(_contents(ids, spans, rows)):
            key = _digest(block.key, content)
            child = self._child(block, key, content)
            if child is None:
                if key in self._blocks:
                    break  # of another content: only one of the two can be found
                child = self._blocks[key] = Block(block, key, content, len(self.pool.groups))
                self._parts[child, _BLOCK] = None
                block.children.add(child)
                for g in self._lasting:
                    self._keep_page(child, g, sequence.tables[g][b])
            for g in self._windowed:
                if child.pages[g] < 0 and sequence.tables[g][b] >= 0:
                    self._keep_page(child, g, sequence.tables[g][b])
                    self._parts[child, g] = None
            chain.append(child)
            block = child
        if with_state and self.pool.states and chain and len(chain) * rows == len(ids) and block.state < 0:
            self.pool.states.keep(sequence.state)
            self.used_bytes += self.pool.state_bytes
            block.state = sequence.state
            self._parts[block, _STATE] = None
        self._touch(chain)
        while self.used_bytes > self.max_bytes:
            self.evict()

    def evict(self) -> bool:
        """Give back what was used longest ago: a state, a window's page, or a block that none follows. False: there is
        nothing left."""
        if not self._parts:
            return False
        (block, part), _ = self._parts.popitem(last=False)
        if part == _BLOCK:
            self._remove(block)
        else:
            self._drop(block, part)
        return True

    def clear(self) -> None:
        """Give everything back."""
        while self.evict():
            pass
        self._roots.clear()

    def chains(self) -> list[PrefixChain]:
        """The histories that are kept, those with the most hits first."""
        found = []
        for leaf in self._blocks.values():
            if not leaf.children:
                chain = self._path(leaf)
                ids = tuple(token for block in chain for token in block.content.ids)
                points = (n for n in range(1, len(chain) + 1) if self._resumes(chain, n))
                found.append(PrefixChain(ids, chain[0].hits, tuple(n * self.pool.page_rows for n in points)))
        return sorted(found, key=lambda chain: -chain.hits)

    def _child(self, parent: Block, key: bytes, content: Content) -> Block | None:
        """The block of this key, if its history is the one that is looked for: digests may collide."""
        block = self._blocks.get(key)
        return block if block and block.parent is parent and block.content == content else None

    def _resumes(self, chain: list[Block], n: int) -> bool:
        """Whether a sequence can go on behind the first n blocks."""
        if self.pool.states and chain[n - 1].state < 0:
            return False
        at = n * self.pool.page_rows
        return all(
            block.pages[g] >= 0
            for g in self._windowed
            for block in chain[self.pool.first_seen(self.pool.groups[g], at) : n]
        )

    def _path(self, block: Block) -> list[Block]:
        path = []
        while block.parent:
            path.append(block)
            block = block.parent
        return path[::-1]

    def _touch(self, chain: list[Block]) -> None:
        """The blocks have been used, those before a block after it, so that it goes before them; and what it takes to
        go on behind the last that allows it."""
        for block in reversed(chain):
            self._parts.move_to_end((block, _BLOCK))
        n = next((n for n in range(len(chain), 0, -1) if self._resumes(chain, n)), 0)
        for g in self._windowed:
            for block in chain[self.pool.first_seen(self.pool.groups[g], n * self.pool.page_rows) : n]:
                self._parts.move_to_end((block, g))
        if n and self.pool.states:
            self._parts.move_to_end((chain[n - 1], _STATE))

    def _keep_page(self, block: Block, group: int, page: int) -> None:
        self.pool.groups[group].pages.keep(page)
        self.used_bytes += self.pool.groups[group].page_bytes
        block.pages[group] = page

    def _remove(self, block: Block) -> None:
        assert not block.children, "a block goes before its parent"
        for part in (_STATE, *self._windowed):
            if (block, part) in self._parts:
                del self._parts[block, part]
                self._drop(block, part)
        for g in self._lasting:
            self._drop(block, g)
        block.parent.children.remove(block)
        del self._blocks[block.key]

    def _drop(self, block: Block, part: int) -> None:
        if part == _STATE:
            self.pool.states.drop(block.state)
            self.used_bytes -= self.pool.state_bytes
            block.state = -1
        else:
            self.pool.groups[part].pages.drop(block.pages[part])
            self.used_bytes -= self.pool.groups[part].page_bytes
            block.pages[part] = -1


def _digest(parent: bytes, content: Content) -> bytes:
    """Key of a block."""
    digest = blake2b(parent, digest_size=16)
    digest.update(array("q", content.ids))
    digest.update(repr(content.media).encode())
    return digest.digest()


def _contents(ids: Sequence[int], spans: Sequence[Span], rows: int) -> Iterator[Content]:
    """Contents of the full blocks of a history, up to the first one whose rows are not all known."""
    for start in range(0, len(ids) - rows + 1, rows):
        content = content_of(ids, spans, start, start + rows)
        known = (range(first, last) for first, last, digest in content.media if digest)
        if sum(len(rows) + min(0, rows.start) for rows in known) < content.ids.count(EMBEDDING):
            return
        yield content


def content_of(ids: Sequence[int], spans: Sequence[Span], start: int, stop: int) -> Content:
    media = ((s.start - start, min(s.stop, stop) - start, s.digest) for s in spans if s.start < stop and s.stop > start)
    return Content(tuple(ids[start:stop]), tuple(media))


def n_common(held: Content, wanted: Content) -> int:
    """How many of the first rows are the same."""
    pairs = enumerate(zip(held.ids, wanted.ids, strict=False))
    n = next((at for at, (one, other) in pairs if one != other), min(len(held.ids), len(wanted.ids)))
    return min([n, *(max(0, first) for first, _, _ in set(held.media) ^ set(wanted.media))])


def _is_between(spans: Sequence[Span], position: int) -> bool:
    """Whether no span lies on both sides of a position."""
    return not any(span.start < position < span.stop for span in spans)
