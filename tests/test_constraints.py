"""Constraints against independent judges: jsonschema, Python's re, and a search through every string of a language."""

import datetime
import gc
import itertools
import json
import random
import re
import uuid
import weakref

import jsonschema
import pytest
import torch
from talkers import tiny_llama
from vocabularies import bpe, spm

import dasllama_torch as dl
from dasllama_torch import constraints
from dasllama_torch.chat.choice import behind_reasoning
from dasllama_torch.chat.thinking import Tagged
from dasllama_torch.constraints import Constraint
from dasllama_torch.text.detokenizer import StreamingDetokenizer
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "number"}},
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "at": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
        "required": ["at"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        "maxItems": 3,
    },
    "enum": {"enum": ["red", "green", 3, None, True, [1, {"a": 2}]]},
    "const": {"const": {"ok": True, "why": 'a "reason"\n'}},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    "oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}, "s": {"type": "string"}}, "required": ["kind"]},
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "additionalProperties": True,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "date": {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    "uuid": {"type": "string", "format": "uuid"},
    "range": {"type": "integer", "minimum": -3, "exclusiveMaximum": 128},
    "float range": {"type": "number", "minimum": 0.5, "maximum": 1.75},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "recursion": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "tree": {
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "required": ["t"],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^s_[a-z]{1,3}$": {"type": "string", "maxLength": 2}},
        "additionalProperties": False,
    },
    "unicode": {
        "type": "object",
        "properties": {"größe": {"enum": ["klein", "groß 🦙"]}, "字": {"type": "string", "maxLength": 3}},
        "required": ["größe", "字"],
        "additionalProperties": False,
    },
    "anything": {"type": ["object", "array", "string"]},
}
CHECKER = jsonschema.FormatChecker(formats=())
CHECKER.checks("date", ValueError)(lambda text: bool(datetime.date.fromisoformat(text)))
CHECKER.checks("uuid", ValueError)(lambda text: bool(uuid.UUID(text)))


def validate(text, schema):
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))


@pytest.fixture(scope="module")
def tokenizer():
    """About 700 tokens, every byte among them; two ends of generation, a control token and one that is text."""
    specials = {"<|endoftext|>": TokenType.CONTROL, "<|im_end|>": TokenType.CONTROL}
    specials |= {"<|call|>x": TokenType.CONTROL, "<tool_call>": TokenType.USER_DEFINED}
    return Tokenizer.from_metadata(bpe("smollm", specials))


def walk(constraint, tokenizer, seed, limit=300):
    """A text of draws among what is allowed, all alike but that closing quotes and ends come more often; None if it has
    not ended within `limit` tokens."""
    dice = random.Random(seed)
    matcher = constraint.matcher(tokenizer)
    ids = []
    while not matcher.complete and len(ids) < limit:
        allowed = matcher.allowed()
        if allowed is None:
            break
        choice = allowed.nonzero().flatten().tolist()
        ends = [token for token in choice if token in tokenizer.eog_ids]
        if ends and dice.random() < 0.3:
            break
        choice = [token for token in choice if token not in ends] or ends
        closing = [token for token in choice if tokenizer.piece_bytes(token)[-1:] in b'"}]']
        token = dice.choice(closing if closing and dice.random() < 0.3 else choice)
        matcher.accept(token)
        ids.append(token)
    return tokenizer.decode(ids) if len(ids) < limit else None


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_of_a_schema_are_valid(tokenizer, name):
    constraint = Constraint.json_schema(SCHEMAS[name])
    texts = [text for seed in range(12) if (text := walk(constraint, tokenizer, seed)) is not None]
    assert len(texts) >= 6
    for text in texts:
        validate(text, SCHEMAS[name])


@pytest.mark.parametrize("schema", [json.dumps(SCHEMAS["array"]), json.dumps(SCHEMAS["array"]).encode()])
def test_a_schema_may_be_text(schema):
    assert Constraint.json_schema(schema) == Constraint.json_schema(SCHEMAS["array"])


def test_a_schema_may_be_a_models():
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(int, ...), y=(int, ...))
    assert Constraint.json_schema(point) == Constraint.json_schema(point.model_json_schema())


def test_compact_json(tokenizer):
    schema = {"x-guidance": {"whitespace_flexible": False}} | SCHEMAS["nested"]
    for seed in range(5):
        text = walk(Constraint.json_schema(schema), tokenizer, seed)
        assert text is None or " " not in text


REGEXES = [
    r"[a-c]{2,4}(\d+|x?)z",
    r"(?:19|20)\d\d-(0[1-9]|1[0-2])",
    r"yes|no|maybe \(\w+\)",
    r"[^/\n]{1,9}/[^\"]{1,3}",
    r"é+[À-ÿ]?🦙{1,2}",
    r"a.c\s",
    r"(?i)key=[a-f]{1,3}",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_texts_of_a_regular_expression(tokenizer, pattern):
    texts = [walk(Constraint.regex(pattern), tokenizer, seed, 60) for seed in range(20)]
    texts = [text for text in texts if text is not None]
    assert len(texts) >= 5
    for text in texts:
        assert re.fullmatch(pattern, text), text


GBNF = r"""
# arithmetic, as in llama.cpp's own examples
root  ::= expr "\n"
expr  ::= term ([-+*/] term){0,2}
term  ::= num | "(" expr ")"
num   ::= [0-9]{1,3} ("." [0-9])?
"""


def test_texts_of_a_gbnf_grammar(tokenizer):
    for seed in range(20):
        text = walk(Constraint.gbnf(GBNF), tokenizer, seed)
        if text is not None:
            assert text.endswith("\n")
            assert re.fullmatch(r"[-+*/().0-9]+\n", text)
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text).replace("/0", "/1")), int | float)


def strings(pattern, alphabet, longest):
    """Every string over an alphabet that a pattern matches, up to a length."""
    letters = (map("".join, itertools.product(alphabet, repeat=n)) for n in range(longest + 1))
    return {text.encode() for text in itertools.chain.from_iterable(letters) if re.fullmatch(pattern, text)}


LANGUAGES = {
    "regex": (Constraint.regex, r"(ab|ba|a{3}){1,3}c?", lambda p: strings(p, "abc", 10)),
    "characters": (Constraint.regex, r"[éè字]{1,2}e?", lambda p: strings(p, "éè字e", 3)),
    "with the empty text": (Constraint.regex, r"(the|then|thence)?", lambda p: {b"", b"the", b"then", b"thence"}),
    "grammar": (
        Constraint.gbnf,
        'root ::= "(" root ")" | "x"',
        lambda p: {b"(" * n + b"x" + b")" * n for n in range(30)},
    ),
    "schema": (
        Constraint.json_schema,
        {"x-guidance": {"whitespace_flexible": False}, "enum": [1, 12, "a", "ab", "the storm", [True, None]]},
        lambda p: {json.dumps(value, separators=(",", ":")).encode() for value in p["enum"]},
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_has_every_token_that_may_come_and_no_other(tokenizer, name):
    make, given, all_of = LANGUAGES[name]
    constraint, language = make(given), all_of(given)
    pieces = [tokenizer.piece_bytes(i) for i in range(len(tokenizer))]
    named = {
        tokenizer.encode(name, False, True)[0] for name in ("<|endoftext|>", "<|im_end|>", "<|call|>x", "<tool_call>")
    }
    dice = random.Random(0)
    for _ in range(8):
        matcher, prefix = constraint.matcher(tokenizer), b""
        while len(prefix) < 12:
            beginnings = {word[:n] for word in language if word.startswith(prefix) for n in range(len(word) + 1)}
            wanted = {i for i, piece in enumerate(pieces) if i not in named and prefix + piece in beginnings}
            if prefix in language:
                wanted |= tokenizer.eog_ids
            found = matcher.allowed()
            if found is None:
                assert wanted == tokenizer.eog_ids
                break
            assert found.dtype == torch.bool
            assert set(found.nonzero().flatten().tolist()) == wanted
            if matcher.complete:
                assert wanted == tokenizer.eog_ids
                break
            token = dice.choice(sorted(wanted - tokenizer.eog_ids))
            matcher.accept(token)
            prefix += pieces[token]
        assert any(word.startswith(prefix) for word in language)


def test_a_matcher_forks_and_goes_back(tokenizer):
    matcher = Constraint.regex("(ab|cd){1,4}").matcher(tokenizer)
    a, b, c, d = (tokenizer.encode(letter, add_special=False)[0] for letter in "abcd")
    start = matcher.allowed().clone()
    matcher.accept(a)
    fork = matcher.fork()
    matcher.accept(b)
    assert matcher.allowed()[c]
    assert not fork.allowed()[c]
    fork.accept(b)
    fork.accept(c)
    matcher.rollback(2)
    assert torch.equal(matcher.allowed(), start)
    matcher.accept(c)
    matcher.accept(d)
    assert fork.allowed()[d]
    assert not fork.allowed()[a]


def test_a_token_that_may_not_come_is_refused(tokenizer):
    matcher = Constraint.regex("ab").matcher(tokenizer)
    (c,) = tokenizer.encode("c", add_special=False)
    with pytest.raises(dl.ConstraintError, match="token"):
        matcher.accept(c)


def test_special_tokens_stand_in_grammars_by_name(tokenizer):
    schema = json.dumps({"x-guidance": {"whitespace_flexible": False}, "enum": ["a", "b"]})
    constraint = Constraint.lark(f'start: <tool_call> "\\n" call "!"\ncall: %json {schema}')
    matcher = constraint.matcher(tokenizer)
    (tool_call,) = tokenizer.encode("<tool_call>", add_special=False)
    assert matcher.allowed().nonzero().flatten().tolist() == [tool_call]
    matcher.accept(tool_call)
    for piece in ("\n", '"', "a", '"'):
        (token,) = tokenizer.encode(piece, add_special=False)
        assert matcher.allowed()[token]
        matcher.accept(token)
    assert not matcher.complete
    matcher.accept(tokenizer.encode("!", add_special=False)[0])
    assert matcher.complete
    # Free text takes no token with a name, whoever writes it.
    matcher = Constraint.regex(r"(?s:.*)").matcher(tokenizer)
    free = set(matcher.allowed().nonzero().flatten().tolist())
    assert tool_call not in free
    assert tokenizer.eog_ids <= free
    with pytest.raises(dl.ConstraintError, match="no_such"):
        Constraint.lark('start: <no_such> "x"').matcher(tokenizer)


def test_a_vocabulary_that_lacks_a_byte(tokenizer):
    words = bpe("smollm", {"<|im_end|>": TokenType.CONTROL})
    words["tokenizer.ggml.tokens"] = [
        f"#{i}" if "}" in text else text for i, text in enumerate(words["tokenizer.ggml.tokens"])
    ]
    lacking = Tokenizer.from_metadata(words)
    matcher = Constraint.regex(r"a\}|b\}").matcher(lacking)
    matcher.accept(lacking.encode("a", add_special=False)[0])
    with pytest.raises(dl.ConstraintError, match="vocabulary"):
        matcher.allowed()


def test_a_space_that_the_text_loses_is_put_before_it():
    """SentencePiece: the first word's token begins with a space, which is no part of the text."""
    tok = Tokenizer.from_metadata(
        spm({"▁": -1.0, "▁yes": -2.0, "yes": -3.0, "▁no": -2.0, "▁▁": -4.0, "a": -5.0, "▁yesyes": -6.0, "no": -7.0})
    )
    assert StreamingDetokenizer(tok).swallows_space
    assert not StreamingDetokenizer(tok, prev_id=tok.encode("yes")[-1]).swallows_space
    for pattern in ("yes(yes)?", " yes| no", "(yes| no){1,2}"):
        for seed in range(10):
            dice, ids = random.Random(seed), []
            matcher = Constraint.regex(pattern).matcher(tok, leading_space=True)
            while not matcher.complete and len(ids) < 30:
                choice = matcher.allowed().nonzero().flatten().tolist()
                if dice.random() < 0.3 and tok.eog_ids & set(choice):
                    break
                ids.append(dice.choice([token for token in choice if token not in tok.eog_ids]))
                matcher.accept(ids[-1])
            assert re.fullmatch(pattern, tok.decode(ids)), ids


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("leading_space", [False, True])
def test_reasoning_before_a_text_that_loses_its_space(inside, leading_space):
    """The first token behind the prompt and the one behind a tag begin with the space, and one behind a line break does
    not. inside: the prompt opens the reasoning. leading_space: it ends with a special token."""
    marks = "<think>", "</think>"
    pieces = {"▁": -1.0, "▁yes": -2.0, "yes": -3.0, "▁no": -2.0, "no": -7.0}
    words = spm(pieces, dict.fromkeys(marks, TokenType.CONTROL))
    tok = Tokenizer.from_metadata(words)
    reasoning = Tagged(open=marks[0], close=marks[1], tokens=marks)
    constraint = behind_reasoning(
        Constraint.regex("(yes|no){1,2}"), reasoning, tok.special_ids(), inside=inside, calls=False
    )
    opening, closing, spaced, plain, line = map(words["tokenizer.ggml.tokens"].index, (*marks, "▁yes", "yes", "<0x0A>"))

    def behind(*ids):
        matcher = constraint.matcher(tok, leading_space=leading_space)
        for token in ids:
            matcher.accept(token)
        return matcher.allowed()[[spaced, plain, closing]].tolist()

    thought = [] if inside else [opening]
    assert behind() == ([True, True, True] if inside else [leading_space, not leading_space, False])
    assert behind(*thought, plain) == [True, True, True]
    assert behind(*thought, plain, closing) == [True, False, False]
    assert behind(*thought, plain, closing, line, line) == [False, True, False]
    for seed in range(20):
        dice, ids = random.Random(seed), []
        matcher = constraint.matcher(tok, leading_space=leading_space)
        while not matcher.complete and (allowed := matcher.allowed()) is not None:
            choice = allowed.nonzero().flatten().tolist()
            if ids and tok.eog_ids & set(choice):
                break
            ids.append(closing if allowed[closing] and len(ids) > 5 else dice.choice(choice))
            matcher.accept(ids[-1])
        stream = StreamingDetokenizer(tok, skip_special=False, prev_id=tok.bos_id if leading_space else plain)
        reply = reasoning.split("".join(map(stream.feed, ids)) + stream.finish(), inside)
        assert re.fullmatch("(yes|no){1,2}", reply.content), ids


def test_a_stop_id_comes_where_the_text_may_end(tokenizer):
    a, b, stop = (tokenizer.encode(letter, add_special=False)[0] for letter in "abx")
    matcher = Constraint.regex("(ab)+").matcher(tokenizer, stop_ids=[stop])
    for token, is_complete in ((a, False), (b, False), (a, True), (b, False)):
        assert matcher.allowed()[stop] == is_complete
        matcher.accept(token)
    assert matcher.allowed()[stop]


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (Constraint.json_schema, {"type": "strin"}, "strin"),
        (Constraint.json_schema, {"not": {"type": "string"}}, "not"),
        (Constraint.json_schema, {"$ref": "https://example.org/s.json"}, "example.org"),
        (Constraint.json_schema, {"type": "string", "format": "no-such"}, "no-such"),
        (Constraint.json_schema, {"minimum": float("nan")}, "no JSON"),
        (Constraint.json_schema, {"enum": [object()]}, "no JSON"),
        (Constraint.json_schema, '{"type": ', "no JSON"),
        (Constraint.json_schema, True, "bool, wanted an object"),
        (Constraint.json_schema, {"type": "integer", "minimum": 3, "maximum": 2}, "refused"),
        (Constraint.regex, "a(b", "refused.*unclosed group"),
        (Constraint.regex, r"(?=a)b", "refused.*look-around"),
        (Constraint.regex, r"(a)\1", "refused"),
        (Constraint.gbnf, 'root ::= "a', "refused"),
        (Constraint.gbnf, "root ::= nothing", "nothing"),
        (Constraint.gbnf, 'other ::= "a"', "root"),
        (Constraint.lark, "start: no_such_rule", "no_such_rule"),
        (Constraint.lark, "", "refused"),
    ],
)
def test_what_is_broken_is_refused_in_one_line(make, given, text):
    with pytest.raises(dl.ConstraintError, match=text) as caught:
        make(given)
    assert "\n" not in str(caught.value)


def nested(n):
    schema = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "size": (Constraint.lark, 'start: "' + "a" * (1 << 20) + '"'),
    "counts": (Constraint.regex, "((a{1000}){1000}){1000}"),
    "wildcards": (Constraint.regex, "(.*a){500}"),
    "conjunctions": (
        Constraint.json_schema,
        {"allOf": [{"type": "string", "pattern": f".*{c}.{{40}}"} for c in "abcdef"]},
    ),
    "depth": (Constraint.json_schema, nested(2000)),
    "depth of text": (Constraint.json_schema, '{"not": ' * 100_000),
    "parentheses": (Constraint.regex, "(" * 100_000 + ")" * 100_000),
    "groups": (Constraint.lark, "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "gbnf groups": (Constraint.gbnf, "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "items": (Constraint.json_schema, {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "length": (Constraint.json_schema, {"type": "string", "minLength": 10**9, "pattern": "(ab|ba)*"}),
    "references": (
        Constraint.json_schema,
        {"$ref": "#/$defs/a0"}
        | {
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
            | {"a40": {"type": "string"}}
        },
    ),
    "a loop": (Constraint.json_schema, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_or_served(tokenizer, name):
    make, given = HOSTILE[name]
    error = ""
    try:
        matcher = make(given).matcher(tokenizer)
        for _ in range(20):
            allowed = matcher.allowed()
            if matcher.complete or allowed is None:
                break
            matcher.accept(int(allowed.nonzero()[0]))
    except dl.ConstraintError as refusal:
        error = str(refusal)
    assert "\n" not in error
    assert len(error) < 500


def test_a_tokenizer_is_read_once_and_not_kept(tokenizer):
    own = Tokenizer.from_metadata(bpe("smollm", {"<|im_end|>": TokenType.CONTROL}))
    first = constraints._vocabulary(own)
    assert constraints._vocabulary(own) is first
    gone = weakref.ref(own)
    del own, first
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module")
def talker():
    return tiny_llama(bpe("smollm", {"<|im_end|>": TokenType.CONTROL}))


def generated(session, ids, params, max_tokens):
    return "".join(text for _, text in session.generate(ids, params, max_tokens, whole=True))


def test_a_generation_ends_where_the_language_does(talker):
    session = dl.create_session(talker)
    prompt = talker.encode("Which?")
    params = dl.SamplingParams(temp=1.0, seed=1, constraint=Constraint.regex("yes|no"), logprobs=1)
    text = generated(session, prompt, params, 20)
    assert text in ("yes", "no")
    assert (session.stats.stop, session.stats.stopped_by) == ("constraint", None)
    assert session.stats.n_generated == len(session.stats.logprobs)
    assert len(session.tokens) + len(session.pending) == len(prompt) + session.stats.n_generated
    # The end of generation comes only where the text may end.
    params = dl.SamplingParams(
        temp=1.0, seed=1, constraint=Constraint.regex("(ab)+"), logit_bias={len(talker.tokenizer) - 1: 9.0}
    )
    text = generated(session, prompt, params, 20)
    assert re.fullmatch("(ab)+", text)
    assert session.stats.stop == "eog"
    params = dl.SamplingParams(constraint=Constraint.regex("[a-f]{40}"))
    text = generated(session, prompt, params, 3)
    assert (session.stats.stop, len(text) < 40) == ("length", True)
    params = dl.SamplingParams(constraint=Constraint.regex("[ab]"))
    assert generated(session, prompt, params, 1) in ("a", "b")
    assert session.stats.stop == "constraint"  # whole, though max_tokens would have cut it here too
    params = dl.SamplingParams(constraint=Constraint.regex(""))
    assert generated(session, prompt, params, 3) == ""


def test_draws_are_from_what_is_allowed_whatever_the_cuts(talker):
    session = dl.create_session(talker)
    prompt = talker.encode("The storm")
    for params in (dict(top_k=1), dict(top_p=0.01), dict(min_p=1.0), dict(), dict(repetition_penalty=3.0)):
        own = dl.SamplingParams(temp=2.0, seed=5, constraint=Constraint.json_schema(SCHEMAS["array"]), **params)
        text = generated(session, prompt, own, 150)
        if session.stats.stop == "constraint":
            validate(text, SCHEMAS["array"])


def test_nothing_left_to_sample(talker):
    session = dl.create_session(talker)
    letters = {
        token: -float("inf") for token in range(len(talker.tokenizer)) if b"b" in talker.tokenizer.piece_bytes(token)
    }
    params = dl.SamplingParams(constraint=Constraint.regex("ab"), logit_bias=letters)
    with pytest.raises(dl.ConstraintError, match="no token is left"):
        generated(session, [1], params, 5)
    with pytest.raises(ValueError, match="generate"):
        session.sample(dl.SamplingParams(constraint=Constraint.regex("ab")))


def test_n_samples_have_a_constraint_each(talker):
    session = dl.create_session(talker)
    prompt, constraint = talker.encode("Say"), Constraint.json_schema(SCHEMAS["enum"])
    samples = session.generate_n(prompt, dl.SamplingParams(temp=1.5, seed=3, constraint=constraint), 5, 60)
    for i, sample in enumerate(samples):
        own = dl.SamplingParams(temp=1.5, seed=3 + i, constraint=constraint)
        assert generated(dl.create_session(talker), prompt, own, 60) == sample.text
        if sample.stats.stop == "constraint":
            validate(sample.text, SCHEMAS["enum"])


def test_stop_strings_beside_a_constraint(talker):
    session = dl.create_session(talker)
    params = dl.SamplingParams(temp=1.0, seed=2, constraint=Constraint.regex("(ab){20}"), stop="bab")
    assert generated(session, [1], params, 60) == "a"
    assert session.stats.stop == "stop"


@pytest.mark.parametrize("name", ["object", "oneOf", "unicode", "recursion"])
def test_a_real_model_writes_what_a_schema_admits(demo_model, real, name):
    session = dl.create_session(real)
    prompt = real.encode("<|im_start|>user\nAnswer in JSON.<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    ended = 0
    for seed in range(2):
        params = dl.SamplingParams(temp=1.0, seed=seed, constraint=Constraint.json_schema(SCHEMAS[name]))
        text = generated(session, prompt, params, 60)
        if session.stats.stop in ("constraint", "eog"):
            validate(text, SCHEMAS[name])
            ended += 1
    assert ended


@pytest.fixture(scope="module")
def real(demo_model):
    return dl.load_model(demo_model)


def test_without_the_extra_an_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(dl.ConstraintError, match=r'pip install "dasllama-torch\[constraints\]"'):
        Constraint.regex("a")


def test_a_model_without_a_vocabulary(load):
    session = dl.create_session(load("llama"))
    with pytest.raises(dl.ConstraintError, match="no vocabulary"):
        next(session.generate([1, 2], dl.SamplingParams(constraint=Constraint.regex("a"))))
    assert session.n_past == 0
