"""Forced tool calls: whatever a grammar lets a model write is read back as calls with valid arguments, and what
templates write of valid calls is allowed."""

import itertools
import random

import jsonschema
import pytest
from tool_cases import CASES, Case
from vocabularies import bpe, spm

from dasllama_torch.chat.choice import constraint_of_choice, without_calls
from dasllama_torch.chat.tools import FORMATS, choice_grammar, parse_calls, tool_format
from dasllama_torch.chat.tools.typed import argument_types
from dasllama_torch.constraints import Constraint
from dasllama_torch.errors import ConstraintError
from dasllama_torch.sampling import SamplingParams
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3-coder": ["<tool_call>", "</tool_call>"],
    "harmony": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "llama-json": ["<|python_tag|>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
}
# What a walk tries to write, so that texts, lists and calls come to an end.
ENDS = ['"', "}", "]", "}}", "\n</parameter>", "</arg_value>", '<|"|>', "</tool_call>", "</function>\n"]


def tool(name: str, properties: dict, required: list[str] = (), **more) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*required], **more}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


COLOUR = {"colour": {"type": "string", "enum": ["red", "light blue"]}}
CHILDREN = {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}
TREE = {"tree": {"type": "object", "properties": CHILDREN, "additionalProperties": False}}
TEXT = {"type": "string"}
TOOLS = [
    tool(
        "get_weather",
        {
            "city": TEXT,
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "°F", 'with "quotes" and \\', None]},
            "exact": {"type": "boolean"},
        },
        ["city", "unit"],
    ),
    tool(
        "search.web/größe-2",
        {
            "query": {"type": "string", "minLength": 2, "maxLength": 12},
            "sites": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
            "limit": {"type": ["integer", "null"]},
            "note": {"anyOf": [TEXT, {"type": "null"}]},
            "names": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
            "key with space-ö": {"type": "number", "minimum": -1.5, "maximum": 1e6},
        },
        ["query", "limit", "names"],
        additionalProperties=False,
    ),
    tool("f", {}),
    {"name": "bare"},  # without OpenAI's wrapper, and without parameters
    tool(
        "paint",
        {
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "label": TEXT, "y": {"type": "integer"}},
                "required": ["y"],
                "additionalProperties": False,
            },
            "colour": {"$ref": "#/$defs/colour"},
            "plate": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
            "flag": {"anyOf": [{"const": True}, {"type": "string", "maxLength": 6}]},
            "shape": {"allOf": [{"$ref": "#/$defs/tree"}], "description": "contains itself"},
        },
        ["at", "colour", "plate"],
        **{"$defs": {**COLOUR, **TREE}},
    ),
]
SCHEMAS = {function["name"]: function.get("parameters", {}) for function in (t.get("function", t) for t in TOOLS)}
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


@pytest.fixture(scope="module")
def tokenizer():
    """Of a format: about 700 tokens, every byte among them, and its markers; none of these where marked is False."""
    known = {}

    def made(form, marked=True):
        if (form, marked) not in known:
            markers = dict.fromkeys(MARKERS[form.name] if marked else [], TokenType.USER_DEFINED)
            words = bpe("qwen2", {"<|im_end|>": TokenType.CONTROL, **markers})
            known[form, marked] = Tokenizer.from_metadata(words)
        return known[form, marked]

    return made


def constraint(form, tokenizer, choice="required", tools=TOOLS):
    return Constraint.lark(choice_grammar(form, tools, choice, tokenizer.special_ids()))


def walk(constraint, tokenizer, seed: int, limit: int = 500) -> str | None:
    """A text of draws among what is allowed, in which now and then something is tried that may end a part of it; None
    if it has not ended within `limit` tokens."""
    dice = random.Random(seed)
    matcher = constraint.matcher(tokenizer)
    ids: list[int] = []
    tried: list[int] = []
    while len(ids) < limit and not matcher.complete:
        allowed = matcher.allowed()
        if allowed is None:
            break
        ends = allowed[[*tokenizer.eog_ids]].any()
        allowed[[*tokenizer.eog_ids]] = False
        if ends and (dice.random() < 0.5 or not allowed.any()):
            break
        if not tried and dice.random() < (0.3 if len(ids) < limit // 2 else 0.9):
            tried = tokenizer.encode(dice.choice(ENDS), add_special=False, parse_special=True)
        if tried and not allowed[tried[0]]:
            tried = []
            continue
        choice = allowed.nonzero().flatten()
        token = tried.pop(0) if tried else choice[dice.randrange(len(choice))].item()
        matcher.accept(token)
        ids.append(token)
    return tokenizer.decode(ids, skip_special=False) if len(ids) < limit else None


def allows(constraint, tokenizer, text: str) -> bool:
    """Whether the text, in its usual tokens, may be written and may end there."""
    matcher = constraint.matcher(tokenizer)
    for token in tokenizer.encode(text, add_special=False, parse_special=True):
        allowed = matcher.allowed()
        if allowed is None or not allowed[token]:
            return False
        matcher.accept(token)
    allowed = matcher.allowed()
    return allowed is None or bool(allowed[[*tokenizer.eog_ids]].any())


def check(text: str, form, tools=TOOLS) -> list[str]:
    """The names of the calls that a text is: nothing but calls, with valid arguments."""
    reply = parse_calls(text, form, tools)
    assert reply.content.strip() == ""
    assert reply.calls
    for call in reply.calls:
        assert call.arguments is not None, call.raw
        jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(call.arguments)
    return [call.name for call in reply.calls]


@each_format
@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
def test_whatever_is_allowed_is_a_valid_call(form, marked, tokenizer):
    tok = tokenizer(form, marked)
    grammar = constraint(form, tok)
    texts = [text for seed in range(40) if (text := walk(grammar, tok, seed))]
    assert len(texts) > 25
    called = [check(text, form) for text in texts]
    assert {name for names in called for name in names} == set(SCHEMAS)
    assert any(len(names) > 1 for names in called) == (form.name not in ("harmony", "llama-json"))
    assert any("ö" in text for text in texts)


@each_format
def test_a_name_forces_one_call_of_that_tool(form, tokenizer):
    tok = tokenizer(form)
    for name in SCHEMAS:
        grammar = constraint(form, tok, name)
        texts = [text for seed in range(4) if (text := walk(grammar, tok, seed))]
        assert texts
        assert all(check(text, form) == [name] for text in texts)


CALLS = [
    {"name": "get_weather", "arguments": {"city": 'Ås <b> & "x"\n\n</div>', "days": 3, "unit": "°F", "exact": True}},
    {"name": "search.web/größe-2", "arguments": {"query": "a b", "limit": None, "note": "n", "names": ["x", "y"]}},
    {"name": "f", "arguments": {}},
    {"name": "paint", "arguments": {"at": {"x": -1, "y": 20}, "colour": "light blue", "plate": "AB-12"}},
]


@pytest.mark.parametrize("case", [case for case in CASES if case.form != "harmony"], ids=lambda case: case.template)
def test_what_templates_write_is_allowed(oracle, case: Case, tokenizer):
    """But for Harmony: its template has another order of the header than the models."""
    form = tool_format(case.form)
    tok = tokenizer(form)
    if case.form == "mistral" and "[ARGS]" not in case.reply(oracle, "", CALLS[:1]):
        tok = tokenizer(form, False)
    turns = [[call] for call in CALLS] + ([CALLS] if case.several else [])
    for turn in turns:
        text = case.reply(oracle, "", turn)
        assert allows(constraint(form, tok), tok, text), text
        assert [call.arguments for call in parse_calls(text, form, TOOLS).calls] == [call["arguments"] for call in turn]


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            "qwen3-coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n"
            "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
            [
                "</parameter>",
                "a</parameter>b",
                "\n</parameter>",
                "a\n<parameter=days>\n",
                "</function>",
                "</tool_call>",
            ],
        ),
        (
            "glm",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>unit</arg_key>\n"
            "<arg_value>C</arg_value>\n</tool_call>",
            ["</arg_value>", "a</arg_value>b", "</arg_value>\n<arg_key>city</arg_key><arg_value>"],
        ),
        ("gemma4", '<|tool_call>call:get_weather{{city:<|"|>{}<|"|>,unit:null}}<tool_call|>', ['<|"|>', 'a<|"|>b']),
        (
            "hermes",
            '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{}", "unit": "C"}}}}\n</tool_call>',
            ['"', "\n", "\\ud83d", "\\"],
        ),
    ],
)
@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
def test_a_string_cannot_end_early(form, good, bad, marked, tokenizer):
    form = tool_format(form)
    tok = tokenizer(form, marked)
    grammar = constraint(form, tok)
    for value in ("Rome", "", "a < b > c </i> <|x|> [1] {é🦙}", "null", "5"):
        text = good.format(value)
        assert allows(grammar, tok, text)
        assert check(text, form) == ["get_weather"]
        assert parse_calls(text, form, TOOLS).calls[0].arguments["city"] == value
    for value in bad:
        assert not allows(grammar, tok, good.format(value)), value


@each_format
def test_nothing_but_calls_is_allowed(form, tokenizer):
    tok = tokenizer(form)
    call = walk(constraint(form, tok, "f"), tok, 0)
    for text in ("", "Hello", f"Hello {call}", f"{call} Hello", call.replace("f", "g"), call[:-1]):
        assert not allows(constraint(form, tok), tok, text), text
    assert not allows(constraint(form, tok, "bare"), tok, call)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string", "pattern": "b+"}, ["abbc", "b"], ["ac", ""]),
        ({"type": "string", "pattern": "^a/b|c$|d"}, [], None),
        ({"type": "string", "pattern": "^(a/|\\/b|[|^$])$"}, ["a/", "/b", "|", "^"], ["a", "a/b", "c"]),
        ({"type": "string", "pattern": "x|y"}, ["axb", "y"], ["ab"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["é🦙", "abc"], ["a", "abcd"]),
        ({"type": ["string", "integer"], "minimum": 5}, ["7", "five"], ["3", "-1"]),
        ({"type": ["string", "boolean"]}, ["true", "False", "truest", "False start"], [" false"]),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, TEXT]}, ["[1, 2]", "1, 2"], ['["a"]', " [x"]),
        ({"enum": ["5", 5, "</arg_value>", "x"]}, ["5", "x"], ["y", "</arg_value>"]),
        ({}, ["5", "text", '{"a": 1}'], []),
        (True, ["5", "text"], []),
        ({"type": "string", "format": "date"}, ["any"], []),
        ({"oneOf": [{"type": "integer"}, {"const": "all"}]}, ["5", "all"], ["some"]),
        ({"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}, [], None),
        ({"type": "string", "not": {"const": "a"}}, [], None),
        ({"$ref": "#/$defs/none"}, [], None),
        ({"type": "text"}, [], None),
        ({"type": "string", "minLength": 3, "maxLength": 2}, [], None),
        ({"enum": ["</arg_value>"]}, [], None),
    ],
)
def test_bare_text_is_held_to_its_schema(schema, allowed, refused, tokenizer):
    form = tool_format("glm")
    tok = tokenizer(form)
    tools = [tool("g", {"x": schema}, ["x"])]
    if refused is None:
        with pytest.raises(ConstraintError, match="tool 'g', argument 'x': "):
            choice_grammar(form, tools, "required", tok.special_ids())
        return
    grammar = constraint(form, tok, tools=tools)
    text = "<tool_call>g\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for value in allowed:
        assert allows(grammar, tok, text.replace("{}", value)), value
        (call,) = parse_calls(text.replace("{}", value), form, tools).calls
        jsonschema.Draft202012Validator(schema).validate(call.arguments["x"])
    for value in refused:
        assert not allows(grammar, tok, text.replace("{}", value)), value


@pytest.mark.parametrize(
    ("form", "declared", "found"),
    [
        ("hermes", {"name": "two words"}, "tool 'two words': no call can have that name"),
        ("hermes", {"name": 5}, "tool 5: "),
        ("hermes", {"name": "g", "parameters": {"type": "array"}}, "tool 'g': wanted the JSON schema of an object"),
        ("hermes", {"name": "g", "parameters": [1]}, "tool 'g': wanted the JSON schema of an object"),
        ("hermes", {"name": "g", "parameters": {"properties": []}}, "tool 'g': wanted an object as properties"),
        ("hermes", {"name": "g", "parameters": {"required": [1]}}, "a list of names as required"),
        ("hermes", {"name": "g", "parameters": {"properties": {"x": {"default": object()}}}}, "no JSON"),
        ("glm", {"name": "g", "parameters": {"properties": {"x</arg_key>": {}}}}, "cannot have '</arg_key>' in it"),
        ("qwen3-coder", {"name": "g", "parameters": {"properties": {"x>": {}}}}, "cannot have '>' in it"),
        ("qwen3-coder", {"name": "g", "parameters": {"minProperties": 1}}, "'minProperties' of all arguments together"),
        ("gemma4", {"name": "g", "parameters": {"properties": {"a:b": {}}}}, "'a:b' cannot be a key"),
        (
            "gemma4",
            {"name": "g", "parameters": {"properties": {"x": {"type": "array", "uniqueItems": True}}}},
            "argument 'x': JSON schema: 'uniqueItems' of an array is not implemented",
        ),
    ],
)
def test_a_tool_that_cannot_be_forced_is_refused_by_name(form, declared, found):
    with pytest.raises(ConstraintError) as e:
        choice_grammar(tool_format(form), [declared], "required")
    assert found in str(e.value)


def test_a_schema_that_is_none_is_refused(tokenizer):
    form = tool_format("hermes")
    for schema in ({"type": "text"}, {"type": "string", "minLength": -1}, {"$ref": "#/nowhere"}):
        with pytest.raises(ConstraintError):
            constraint(form, tokenizer(form), tools=[tool("g", {"x": schema})])


def test_a_choice_that_is_none_is_refused():
    form = tool_format("hermes")
    with pytest.raises(ValueError, match="tool_choice is 'nosuch', wanted 'required' or one of get_weather, "):
        choice_grammar(form, TOOLS, "nosuch")
    with pytest.raises(ValueError, match="wanted 'required' or one of none"):
        choice_grammar(form, [], "required")


@each_format
@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
def test_no_call_can_begin_where_none_is_wanted(form, marked, tokenizer):
    """But for Llama's that has no tag before it: that is JSON like any other."""
    tok = tokenizer(form, marked)
    wanted = SamplingParams(logit_bias=dict.fromkeys(tok.special_ids().values(), 9.0))
    params = without_calls(wanted, form, tok.special_ids())
    banned = {token for token, bias in params.logit_bias if bias == -float("inf")}
    assert banned == {tok.special_ids()[opening] for opening in form.openings if opening in tok.special_ids()}
    assert {token for token, bias in params.logit_bias if bias == 9.0} == {*tok.special_ids().values()} - banned

    def written(text: str, **how) -> str:
        """As far as it can be."""
        matcher, ids = params.constraint and params.constraint.matcher(tok), []
        for token in tok.encode(text, add_special=False, **how):
            if token in banned or (matcher and not matcher.allowed()[token]):
                break
            ids.append(token)
            if matcher:
                matcher.accept(token)
        return tok.decode(ids, skip_special=False)

    call = walk(constraint(form, tok, "f"), tok, 0)
    calls, befores = [call], ["", "Once < upon [a to= {time} "]
    if form.name == "llama-json":
        calls, befores = [form.openings[0] + call], [""]  # a whole reply is one
    if form.name == "qwen3-coder":
        calls.append(call.replace("<tool_call>\n", ""))  # as models write it now and then
    for before, call in itertools.product(befores, calls):
        assert parse_calls(before + call, form, TOOLS).calls
        found = written(before + call, parse_special=True)
        assert len(before) <= len(found.rstrip("\n"))
        assert not parse_calls(found, form, TOOLS).calls


def test_a_call_begins_with_the_space_of_its_vocabulary_or_with_none():
    """SentencePiece puts one before text, and none before a token like Mistral's."""
    form, tools = tool_format("mistral"), [tool("f", {})]
    for markers in ({}, {"[TOOL_CALLS]": TokenType.CONTROL}):
        pieces = {"▁": -1.0, "[TOOL_CALLS]": -2.0, "▁[TOOL_CALLS]": -3.0, "▁[": -4.0}
        words = spm({text: score for text, score in pieces.items() if text not in markers}, markers)
        tok, token = Tokenizer.from_metadata(words), words["tokenizer.ggml.tokens"].index
        calls = constraint_of_choice("f", form, tools, tok.special_ids())
        allowed = calls.matcher(tok, leading_space=True).allowed()
        assert allowed[[token("▁"), token("[TOOL_CALLS]")]].all()
        assert allowed[[token("▁["), token("▁[TOOL_CALLS]")]].tolist() == [not markers] * 2
        matcher = calls.matcher(tok)
        assert not matcher.allowed()[token("▁")]
        matcher.accept(token("[TOOL_CALLS]"))
        assert matcher.allowed()[token("▁[")]


def test_mistral_has_the_spelling_of_its_vocabulary(tokenizer):
    form = tool_format("mistral")
    assert "[ARGS]{" in walk(constraint(form, tokenizer(form), "f"), tokenizer(form), 0)
    old = Tokenizer.from_metadata(bpe("tekken", {"[TOOL_CALLS]": TokenType.CONTROL, "</s>": TokenType.CONTROL}))
    grammar = constraint(form, old, "f")
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert all(allows(grammar, old, spelled) for spelled in (text, text.replace("[{", " [{")))
    assert not allows(grammar, old, text.replace("[{", "{"))


def test_reasoning_may_come_before(tokenizer):
    """What a grammar allows begins behind it, with the line breaks that follow a tag."""
    for name in ("hermes", "qwen3-coder", "glm"):
        form = tool_format(name)
        tok = tokenizer(form)
        call = walk(constraint(form, tok, "f"), tok, 1).lstrip("\n")
        assert all(allows(constraint(form, tok), tok, before + call) for before in ("", "\n", "\n\n"))
    form = tool_format("harmony")
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    assert allows(constraint(form, tokenizer(form)), tokenizer(form), call)


def test_types_behind_references_are_known():
    assert argument_types(TOOLS, "paint", "colour") == {"string"}
    assert argument_types(TOOLS, "paint", "shape") == {"object"}
    assert argument_types(TOOLS, "paint", "flag") == {"boolean", "string"}
    loop = [tool("g", {"x": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}})]
    assert argument_types(loop, "g", "x") == frozenset()


@pytest.mark.parametrize(("name", "form"), [("qwen35", "qwen3-coder"), ("qwen35", "hermes"), ("gemma-4", "gemma4")])
def test_real_vocabularies(vocabulary, name, form):
    """Their markers are tokens, and so are many pieces of what markers are made of."""
    form, tok = tool_format(form), vocabulary(name)
    grammar = constraint(form, tok)
    texts = [text for seed in range(3) if (text := walk(grammar, tok, seed))]
    assert texts
    for text in texts:
        check(text, form)
