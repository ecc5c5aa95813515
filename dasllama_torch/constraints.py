"""What a generated text may be, as masks over the vocabulary: a JSON schema, a regular expression, or a grammar.

    params = dl.SamplingParams(temp=0.8, constraint=dl.Constraint.json_schema({"type": "array", "minItems": 2}))
    text = "".join(piece for _, piece in session.generate(ids, params, max_tokens=200))

The masks come from llguidance (https://github.com/guidance-ai/llguidance), an extra of this package. A mask has exactly
the tokens behind whose bytes the text can still become one of the language, so each draw follows the model's own
distribution over what may come. Of llguidance's ways only that is used: it neither heals tokens nor forces the usual
tokens of a text that the grammar leaves no choice about.
"""

import copy
import json
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dasllama_torch.errors import ConstraintError
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

# What a hostile schema or grammar may take: of memory, about 2 kB for each state of the lexer; of time, about 20 ms for
# the first states and 15 ms for a mask. Schemas in use stay far below (llguidance's own limits are of this order).
MAX_CHARACTERS = 1 << 20  # of a grammar
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
# Between the tokens of JSON: enough for any indentation in use, and an end to white space that a model would repeat.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
MAX_REASON = 300  # characters of what llguidance says
EXACT = '%llguidance {"no_forcing": true}\n'  # a mask has all tokens that may come


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language of texts. A value, of no model: `matcher` binds it to a tokenizer.

    grammar: in llguidance's dialect of Lark (its docs/syntax.md). `<name>` in it is the special token of that name, and
    `%json {...}` a JSON schema. before: what comes before a text of the language, such as a model's reasoning, as an
    expression of that dialect, in which two rules stand for spaces that vocabularies of SentencePiece put there and
    texts lose: `first` for that of a reply's first token, `behind` for that of a token behind a special one. Raises
    ConstraintError for a grammar that is broken or too large.
    """

    grammar: str
    before: str = "first"

    def __post_init__(self):
        if len(self.grammar) > MAX_CHARACTERS:
            raise ConstraintError(f"the grammar has {len(self.grammar)} characters, wanted {MAX_CHARACTERS} at most")
        llguidance = _llguidance()
        fault = llguidance.LLMatcher.validate_grammar(self.grammar, limits=_limits(llguidance))
        if fault:
            why = re.search(r"^error: (.*)", fault, re.MULTILINE)  # behind a picture of the place, of an expression
            raise ConstraintError(f"the grammar is refused: {_first_line(fault)}{' ' + why[1] if why else ''}")

    @classmethod
    def json_schema(cls, schema: Any) -> "Constraint":
        """JSON texts that a schema (draft 2020-12) admits: a mapping, its JSON text, or a class or object with
        `model_json_schema`, as pydantic's models.

        Properties come in the schema's order, white space between tokens is up to 64 characters. What cannot be held
        exactly (`not`, `if`, remote references, unknown formats) is refused. A key "x-guidance" in the schema sets
        llguidance's options, such as {"whitespace_flexible": false} for compact JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            schema = json.loads(schema) if isinstance(schema, str | bytes) else schema
            if not isinstance(schema, Mapping):
                raise ConstraintError(f"the JSON schema is {type(schema).__name__}, wanted an object")
            schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}} | dict(schema)
            text = json.dumps(schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConstraintError(f"the JSON schema is no JSON: {error}") from None
        return cls(f"start: %json {text}")

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Texts that a regular expression matches as a whole, in the syntax of Rust's regex crate: that of Python's
        `re` without look-around and back-references."""
        return cls(f"start: /{_llguidance().regex_to_lark(pattern, '')}/")

    @classmethod
    def gbnf(cls, text: str) -> "Constraint":
        """Texts of a GBNF grammar (llama.cpp grammars/README.md), whose rule `root` they follow."""
        _llguidance()
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return cls(gbnf_to_lark(text))
        except ConstraintError:
            raise
        except Exception as error:  # the converter has no class of its own for what it refuses
            raise ConstraintError(f"the GBNF grammar is refused: {_first_line(str(error))}") from None

    @classmethod
    def lark(cls, text: str) -> "Constraint":
        """Texts of a grammar in llguidance's dialect of Lark, whose rule `start` they follow."""
        return cls(text)

    def matcher(self, tokenizer: Tokenizer, *, leading_space: bool = False, stop_ids: Iterable[int] = ()) -> "Matcher":
        """A matcher at the beginning of a text. leading_space: the text's first token loses a space that it begins
        with, as `StreamingDetokenizer.swallows_space` tells. stop_ids: tokens that end a text besides those of the
        vocabulary. Raises ConstraintError for a grammar that names special tokens which the vocabulary lacks, and for
        a tokenizer without a vocabulary."""
        return Matcher(self, tokenizer, leading_space, stop_ids)


class Matcher:
    """Where one text stands in a constraint's language. Raises ConstraintError as soon as a limit is exceeded or the
    vocabulary cannot spell what has to come."""

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: Tokenizer,
        leading_space: bool = False,
        stop_ids: Iterable[int] = (),
    ):
        llguidance = _llguidance()
        self._vocabulary = _vocabulary(tokenizer)
        first, behind = ('" "' if loses else '""' for loses in (leading_space, tokenizer.add_space_prefix))
        start = f"{EXACT}start: {constraint.before} @text\nfirst: {first}\nbehind: {behind}"
        grammars = [{"lark_grammar": start}, {"name": "text", "lark_grammar": constraint.grammar}]
        self._ends = np.array([*self._vocabulary.eog_ids, *stop_ids], np.int64)
        self._words = np.zeros_like(self._vocabulary.end)
        self._matcher = llguidance.LLMatcher(
            self._vocabulary.tokens, json.dumps({"grammars": grammars}), log_level=0, limits=_limits(llguidance)
        )
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the text is one of the language and no token can follow: then `allowed` has nothing to say."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def allowed(self) -> Tensor | None:
        """The tokens that may come, bool [V]: those behind whose bytes the text can still become one of the language,
        and those that end it where it is one. Tokens with a name (`<|im_end|>`) come only where the grammar names them.
        None where the text is one of the language and none but an end can come."""
        vocabulary = self._vocabulary
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        bits = np.unpackbits(self._words[0].view(np.uint8), count=vocabulary.size, bitorder="little").view(np.bool_)
        if self._matcher.is_accepting():
            if np.array_equal(self._words, vocabulary.end):
                return None
            bits[self._ends] = True
        return torch.from_numpy(bits)

    def accept(self, token: int) -> None:
        """The text goes on with a token, which has to be allowed."""
        if not self._matcher.consume_token(token):
            self._check()

    def fork(self) -> "Matcher":
        """A matcher at the same place, whatever becomes of either."""
        fork = copy.copy(self)
        fork._matcher, fork._words = self._matcher.deep_copy(), self._words.copy()
        return fork

    def rollback(self, n: int) -> None:
        """Take back the last n tokens."""
        if not self._matcher.rollback(n):
            raise ValueError(f"n is {n}, wanted the number of tokens to take back, and no more than there are")

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            if reason == "NoExtensionBias":  # how it says that a mask is empty
                reason = "the vocabulary has no token that could come next"
            raise ConstraintError(f"the constraint cannot be followed: {reason}")


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as llguidance takes it. size: V. eog_ids: int64 [n]. end: int32 [1, words], the mask that has nothing
    but the one end of generation that llguidance knows."""

    tokens: Any
    size: int
    eog_ids: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class _Tokens:
    """What llguidance's TokenizerWrapper reads. It is no way to encode a text, which only forced tokens would need."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int | None
    bos_token_id: int | None = None


# By the tokenizer, which a value must not refer to.
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if not tokenizer.has_vocab:
        raise ConstraintError("the model has no vocabulary, which a constraint needs")
    if tokenizer not in _vocabularies:
        llguidance = _llguidance()
        ids = range(len(tokenizer))
        tokens = [tokenizer.piece_bytes(i) for i in ids]
        named = [i for i in ids if _is_named(tokenizer.token_type(i), tokens[i])]
        eog_ids = sorted(tokenizer.eog_ids)
        # It knows one end of generation; `Matcher.allowed` puts the others beside it.
        eos_id = tokenizer.eos_id if tokenizer.eos_id in eog_ids else next(iter(eog_ids), None)
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokens, named, eos_id))
        made = llguidance.LLTokenizer(wrapper)
        end = np.zeros(-(-made.vocab_size // 32) * 32, np.bool_)
        end[made.eos_token] = True
        words = np.packbits(end, bitorder="little").view(np.int32)[None]
        _vocabularies[tokenizer] = _Vocabulary(made, len(tokenizer), np.array(eog_ids, np.int64), words)
    return _vocabularies[tokenizer]


def _is_named(kind: TokenType, token: bytes) -> bool:
    """Whether a token stands for itself, not for its text: control tokens, and markers of the kind of <tool_call>."""
    marker = kind is TokenType.USER_DEFINED and token.startswith(b"<") and token.endswith(b">")
    return marker or kind in (TokenType.CONTROL, TokenType.UNKNOWN)


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ConstraintError('constraints need llguidance: pip install "dasllama-torch[constraints]"') from None
    return llguidance


def _limits(llguidance: ModuleType) -> Any:
    return llguidance.LLParserLimits(**LIMITS, verbose_errors=False)


def _first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "no reason given")
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."
