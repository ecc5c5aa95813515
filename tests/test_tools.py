"""Tool calls: what templates render is read back as the same calls, however the reply is cut into pieces; and whatever
a model writes, nothing is lost and nothing raises."""

import codecs
import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_cases import CASES, Case, render, source

from dasllama_torch.chat.thinking import Harmony
from dasllama_torch.chat.tools import (
    FORMATS,
    CallDelta,
    CallStream,
    ToolCall,
    ToolReply,
    add_tool_results,
    detect_format,
    inline_tools,
    parse_calls,
    render_assistant_calls,
    tool_format,
    writes_tools,
)
from dasllama_torch.chat.tools.calls import decoded, read_object
from dasllama_torch.chat.tools.typed import to_json
from dasllama_torch.errors import UnsupportedModel

PROPERTIES = {
    "city": {"type": "string", "description": "A place"},
    "days": {"type": "integer"},
    "limit": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "note": {"type": ["string", "null"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": PARAMETERS}}
    for name in ("get_weather", "search.web", "f-2")
]

# Markers do not come in values: their tokens would not, and text that spells them cannot be told from them.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<[|"), max_size=12)
lines = st.lists(texts, max_size=3).map("\n".join)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
words = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | numbers | lines,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
OF_TYPE = {
    "city": lines,
    "days": st.integers(-(10**20), 10**20),
    "limit": numbers,
    "exact": st.booleans(),
    "tags": st.lists(lines, max_size=3),
    "options": st.dictionaries(words, values, max_size=3),
    "note": st.none() | lines.filter(lambda text: text.strip() not in ("null", "None")),
}
arguments = st.fixed_dictionaries({}, optional=OF_TYPE)
names = st.sampled_from([tool["function"]["name"] for tool in TOOLS])
calls = st.lists(st.fixed_dictionaries({"name": names, "arguments": arguments}), min_size=1, max_size=3)
WITHIN_SECONDS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.template)
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


def streamed(pieces: list[str], form, tools=TOOLS) -> tuple[ToolReply, list]:
    """The reply, and its events without the borders of pieces."""
    stream = CallStream(form.read, tools)
    events: list = []
    for event in [event for piece in pieces for event in stream.feed(piece)] + stream.finish():
        last = events[-1] if events else None
        if isinstance(event, str) and isinstance(last, str):
            events[-1] += event
        elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and event.index == last.index:
            assert event.name is None
            events[-1] = CallDelta(last.index, last.name, last.arguments + event.arguments, last.id)
        else:
            events.append(event)
    return ToolReply("".join(event for event in events if isinstance(event, str)), stream.calls), events


def check(text: str, form, cuts: list[int] = ()) -> ToolReply:
    """The reply, after a look at what must hold for every text."""
    reply = parse_calls(text, form, TOOLS)
    by_byte = codecs.getincrementaldecoder("utf-8")()
    spans = pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])
    whole, events = streamed([text], form)
    assert whole == reply
    for pieces in (
        list(text),
        [by_byte.decode(bytes([b])) for b in text.encode()],
        [text[start:end] for start, end in spans],
    ):
        assert streamed(pieces, form) == (reply, events)

    deltas = [event for event in events if isinstance(event, CallDelta)]
    assert [delta.name for delta in deltas] == [call.name for call in reply.calls]
    assert [delta.index for delta in deltas] == list(range(len(deltas)))
    for delta, call in zip(deltas, reply.calls, strict=True):
        assert read_object(delta.arguments) == call.arguments
        assert delta.id in (None, call.id)
        if call.arguments is not None:
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
            json.loads(delta.arguments)  # strict
    # Only white space is lost, and between calls only what separates them.
    written = Counter("".join(text.split()))
    kept = Counter("".join((reply.content + "".join(call.raw for call in reply.calls)).split()))
    assert written == kept
    return reply


@each_case
@WITHIN_SECONDS
@given(data=st.data())
def test_what_templates_render_is_read_back(oracle, case: Case, data):
    wanted = data.draw(calls if case.several else calls.map(lambda calls: calls[:1]))
    content = data.draw(texts.map(str.strip)) if case.content else ""
    text = case.reply(oracle, content, wanted)
    reply = check(text, tool_format(case.form), data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    assert [{"name": call.name, "arguments": call.arguments} for call in reply.calls] == wanted
    assert reply.content.strip() == content


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3-coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=f-2>",
        "</function>",
        "<parameter=city>\n",
        "</parameter>",
    ]
    + ["<parameter=days>\n", "<function=", "\n</parameter>"],
    "harmony": ["<|start|>", "assistant", "<|channel|>", "commentary", " to=functions.f-2", "<|message|>", "<|call|>"]
    + ["<|end|>", "<|constrain|>json", "to=", "analysis"],
    "gemma4": ["<|tool_call>", "call:f-2{", "<tool_call|>", '<|"|>', "city:", "days:5"],
    "mistral": ["[TOOL_CALLS]", "[", "]", "f-2", "[ARGS]", "[CALL_ID]", "abc"],
    "llama-json": ["<|python_tag|>", ";"],
    "glm": [
        "<tool_call>",
        "f-2",
        "<arg_key>",
        "city",
        "days",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</tool_call>",
    ],
}
JSON_BITS = [
    '{"name": "f-2"',
    ', "arguments": ',
    "{",
    "}",
    '"',
    '{"a": 1}',
    '"{\\"a\\": 1}"',
    "\\",
    "\\ud83d",
    "\\ude00",
]
JSON_BITS += [
    '{"name": "f-2", "parameters": {"city": "Z\\u00fc\nrich"}}',
    "[",
    "]",
    ":",
    ",",
    "1e999",
    "NaN",
    "é😀",
    " \n",
    "x",
]


@each_format
@settings(WITHIN_SECONDS, max_examples=150)
@given(data=st.data())
def test_nothing_is_lost_and_nothing_raises(form, data):
    pieces = data.draw(st.lists(st.sampled_from(MARKS[form.name] + JSON_BITS), max_size=14))
    check("".join(pieces), form)


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\u00fc\\"}"}</tool_call>',
            [("f", {"a": "ü"})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a"}</tool_call>', [("f", None)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("f", None)]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            [("f", {"a": "</tool_call>"})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}', [("f", {"a": "two\nlines"})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d\\ude00 \\ud83d!"}}',
            [("f", {"a": "😀 \ufffd!"})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', [("f", None)]),
        ("hermes", '<tool_call>{"name": "f", "argum', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", None)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', [("f", {"a": 1})]),
        # A string that is not closed does not take the next call with it.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            [("f", None), ("g", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
        ),
        (
            "qwen3-coder",
            "<function=f-2>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
            [("f-2", {"city": "Rome"})],
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=f-2>\n<parameter=city>\na</function>\n\n<parameter=days>\n3\n</function>\n</tool_call>",
            [("f-2", {"city": "a</function>\n", "days": 3})],
        ),
        ("qwen3-coder", "<tool_call><function=f-2></function></tool_call>", [("f-2", {})]),
        ("qwen3-coder", "<tool_call><function=f-2><parameter=city>Ro", [("f-2", None)]),
        (
            "qwen3-coder",
            "<tool_call><function=other><parameter=x>[1, true]</parameter></function></tool_call>",
            [("other", {"x": [1, True]})],
        ),
        (
            "glm",
            "<tool_call>f-2\n<arg_key>exact</arg_key>\n<arg_value>False</arg_value>\n</tool_call>",
            [("f-2", {"exact": False})],
        ),
        ("glm", "<tool_call>f-2</tool_call>", [("f-2", {})]),
        # A marker in a string of a list is text; not where the string is never closed.
        (
            "glm",
            '<tool_call>f-2<arg_key>tags</arg_key><arg_value>["a</arg_value>", "\\"</arg_value>"]</arg_value>'
            "</tool_call>",
            [("f-2", {"tags": ["a</arg_value>", '"</arg_value>']})],
        ),
        (
            "glm",
            '<tool_call>f-2<arg_key>tags</arg_key><arg_value>["a</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>'
            "</tool_call>",
            [("f-2", {"tags": '["a', "days": 3})],
        ),
        ("glm", "<tool_call>f-2<arg_key>city</arg_key></tool_call>", [("f-2", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]', [("f", {"a": [1]})]),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
            [("f", {"a": "[TOOL_CALLS]"}), ("g", {})],
        ),
        (
            "llama-json",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("llama-json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        ("llama-json", '{"name": "Bob", "age": 30}', []),
        ("llama-json", 'Call {"name": "f", "parameters": {}}', []),
        ("llama-json", '<|python_tag|>brave_search.call(query="x")', []),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>{<|"|>,b:{c:[1.5,None,false]}}<tool_call|>',
            [("f", {"a": "{", "b": {"c": [1.5, None, False]}})],
        ),
        ("gemma4", "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:word", [("f", {}), ("g", None)]),
        ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>", [("f", None)]),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [("f", {"a": 1})]),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', [("f", {"a": 1})]),
        (
            "harmony",
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            [("f", {})],
        ),
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", [("python", None)]),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>"{\\"a\\": 1}"<|call|>', [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "parameters": {"b": 2}}</tool_call>',
            [("f", {"a": 1})],
        ),
        ("hermes", '<tool_call>{"name": "f": "g", "arguments": {}}</tool_call>', []),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|><|call|>", [("f", {})]),
        # Strings that are not closed again.
        (
            "harmony",
            '<|channel|>commentary to=functions.f<|message|>{"a": "x}<|call|>'
            '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b": 1}<|call|>',
            [("f", None), ("g", {"b": 1})],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x}[TOOL_CALLS]g[ARGS]{"b": 1}', [("f", None), ("g", {"b": 1})]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x}}][TOOL_CALLS]g[ARGS]{"b": 1}',
            [("f", None), ("g", {"b": 1})],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>x}<tool_call|><|tool_call>call:g{b:1}<tool_call|>',
            [("f", None), ("g", {"b": 1})],
        ),
    ],
)
def test_what_models_write(form, text, wanted):
    assert [(call.name, call.arguments) for call in check(text, tool_format(form)).calls] == wanted


@pytest.mark.parametrize(
    ("text", "types", "wanted"),
    [
        ("5", "string", "5"),
        ("5", "integer", 5),
        ("5.0", "integer", 5),
        ("5.5", "integer", "5.5"),
        ("five", "integer", "five"),
        ("1e3", "number", 1000.0),
        ("1e999", "number", "1e999"),
        ("True", "boolean", True),
        ("true", "boolean", True),
        ("yes", "boolean", "yes"),
        ("None", "null", None),
        ("None", "string", "None"),
        ("null", "string null", None),
        ("5", "string integer", 5),
        ("five", "string integer", "five"),
        ('["a"]', "array", ["a"]),
        ("['a']", "array", "['a']"),
        (' {"a": null}\n', "object", {"a": None}),
        ("9" * 5000, "integer", "9" * 5000),
        ("[" * 100_000, "array", "[" * 100_000),
        ("5", "", 5),
        ('"5"', "", '"5"'),
        ("False", "", False),
        ("a b", "", "a b"),
    ],
    ids=str,
)
def test_values_have_the_type_of_the_schema(text, types, wanted):
    value = json.loads(to_json(text, frozenset(types.split())))
    assert (value, type(value)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "True", True),
        ({}, "2", 2),
        (None, "2", 2),
    ],
    ids=str,
)
def test_types_are_found_in_the_schema(schema, text, wanted):
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}  # OpenAI's wrapper left out
    call = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert parse_calls(call, tool_format("glm"), [tool]).calls[0].arguments == {"x": wanted}


BOMBS = {
    "hermes": ['<tool_call>{"name": "f", "arguments": ', "</tool_call>"],
    "qwen3-coder": ["<tool_call><function=f><parameter=x>", "</parameter></function></tool_call>"],
    "harmony": ["<|channel|>commentary to=functions.f<|message|>", "<|call|>"],
    "gemma4": ["<|tool_call>call:f{a:", "}<tool_call|>"],
    "mistral": ["[TOOL_CALLS]f[ARGS]", ""],
    "llama-json": ['{"name": "f", "parameters": ', "}"],
    "glm": ["<tool_call>f<arg_key>x</arg_key><arg_value>", "</arg_value></tool_call>"],
}


@each_format
@pytest.mark.parametrize("unit", ['{"a":', "[", "{a:", '"\\'])
def test_deep_and_long_replies(form, unit):
    before, after = BOMBS[form.name]
    reply = parse_calls(before + unit * 10_000 + after, form)
    assert all(
        call.arguments is None or call.arguments.keys() <= {"x", "a"} for call in reply.calls
    )  # if at all, as text
    many = parse_calls((before + "{}" + after) * 1000, form)
    assert len(many.calls) in (1, 1000)


def test_text_comes_out_as_soon_as_it_is_certain():
    stream = CallStream(tool_format("hermes").read)
    assert stream.feed("Let me see <b") == ["Let me see <b"]
    assert stream.feed(">.\n<tool") == [">."]
    assert stream.feed('_call>\n{"name": "get_') == []
    assert stream.feed('weather", "arguments": ') == [CallDelta(0, "get_weather")]
    assert stream.feed('{"ci') == [CallDelta(0, None, '{"ci')]
    assert stream.feed('ty": "Zü') == [CallDelta(0, None, 'ty": "Zü')]
    assert stream.calls == ()
    assert stream.feed('rich"}}\n</tool_call>\n') == [CallDelta(0, None, 'rich"}')]
    assert [call.arguments for call in stream.calls] == [{"city": "Zürich"}]
    assert stream.feed("Wait.") == ["\n\nWait."]
    assert stream.finish() == []


def test_a_call_that_breaks_off_ends_where_it_does():
    stream = CallStream(tool_format("gemma4").read)
    assert stream.feed("<|tool_call>call:f{a:1<tool_call|>Wait.") == [CallDelta(0, "f", '{"a":'), "Wait."]
    assert [call.arguments for call in stream.calls] == [None]


@each_format
@pytest.mark.parametrize("text", ["", " \n", " Hm. \n", "a < b [c] {d}\n\n"])
def test_replies_without_calls_pass_as_they_are(form, text):
    assert check(text, form) == ToolReply(text, ())


def test_a_stream_is_of_one_reply():
    stream = CallStream(tool_format("hermes").read)
    assert stream.finish() == []
    with pytest.raises(ValueError, match="wanted a new stream"):
        stream.feed("x")


def test_ids_are_the_models_own():
    (call,) = check("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", tool_format("mistral")).calls
    assert call.id == "abcdefghi"
    _, (delta,) = streamed([call.raw], tool_format("mistral"))
    assert delta == CallDelta(0, "f", "{}", "abcdefghi")
    for text in ('[{"id": "a1", "name": "f", "arguments": {}}]', '[{"name": "f", "arguments": {}, "id": "a1"}]'):
        assert check(f"[TOOL_CALLS]{text}", tool_format("mistral")).calls[0].id == "a1"
    assert check('<tool_call>{"name": "f"}</tool_call>', tool_format("hermes")).calls[0].id is None


def test_long_texts_stream_within_formats_without_json():
    stream = CallStream(tool_format("qwen3-coder").read, TOOLS)
    assert stream.feed("<tool_call>\n<function=f-2>\n<para") == [CallDelta(0, "f-2", "")]
    assert stream.feed('meter=city>\nprint("a")\n') == [CallDelta(0, None, '{"city": "print(\\"a\\")')]
    assert stream.feed("\n</parameter>\n</function>") == [CallDelta(0, None, '\\n"}')]


TEMPLATES_WITHOUT_TOOLS = ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B"]
OTHER_FORMATS = ["deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"]


def test_the_format_is_found(oracle):
    others = {
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
        "meta-llama-Llama-3.3-70B-Instruct": "llama-json",
    }
    for template, form in {**{case.template: case.form for case in CASES}, **others}.items():
        assert detect_format(source(oracle, template), (), "llama").name == form
        assert writes_tools(source(oracle, template), FORMATS[form])
    for template in TEMPLATES_WITHOUT_TOOLS:
        assert not any(writes_tools(source(oracle, template), form) for form in FORMATS.values())
        with pytest.raises(UnsupportedModel, match="neither .* gemma2 model"):
            detect_format(source(oracle, template), (), "gemma2")
    for template in OTHER_FORMATS:  # their words are not those that the vocabulary has for another model's
        with pytest.raises(UnsupportedModel, match="not implemented"):
            detect_format(source(oracle, template), ("<tool_call>",), "qwen2")
    with pytest.raises(UnsupportedModel, match="wanted one of hermes"):
        tool_format("chatml")


@pytest.mark.parametrize(
    ("token", "architecture", "form"),
    [
        ("<tool_call>", "qwen2", "hermes"),
        ("<tool_call>", "qwen35moe", "qwen3-coder"),
        ("<|python_tag|>", "llama", "llama-json"),
        ("[TOOL_CALLS]", "llama", "mistral"),
        ("<|call|>", "gpt-oss", "harmony"),
        ("<|tool_call>", "gemma4", "gemma4"),
        ("<arg_key>", "glm4moe", "glm"),
    ],
)
def test_without_a_template_the_vocabulary_tells(token, architecture, form):
    assert detect_format(None, {token, "<s>"}, architecture) is FORMATS[form]
    assert detect_format("{{ messages }}", {token, "<s>"}, architecture) is FORMATS[form]


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome or Zürich?"}]
CALLED = [ToolCall("get_weather", {"city": "Zürich", "days": 3}, "..."), ToolCall("f-2", {"tags": ["a", "b"]}, "...")]
# The template's own turns, and the empty reasoning that it puts into them.
INLINED = [
    ("Qwen-Qwen2.5-7B-Instruct", "hermes", "<|im_start|>{role}\n{content}<|im_end|>\n", ""),
    ("Qwen3.5-4B", "qwen3-coder", "<|im_start|>{role}\n{content}<|im_end|>\n", "<think>\n\n</think>\n\n"),
    ("GLM-4.6", "glm", "<|{role}|>\n{content}", "<think></think>\n"),
    (
        "meta-llama-Llama-3.2-3B-Instruct",
        "llama-json",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "",
    ),
]


@pytest.mark.parametrize(("template", "name", "turn", "reasoning"), INLINED, ids=[name for _, name, *_ in INLINED])
def test_plain_messages_say_what_the_template_would(oracle, template, name, turn, reasoning):
    """Where a template knows nothing of tools the model reads the words that its own template would write."""
    form = tool_format(name)
    alone = name == "llama-json"  # one call, without content
    called = CALLED[:1] if alone else CALLED
    conversation = render_assistant_calls(ASKED, "" if alone else "I look it up.", called)
    conversation = add_tool_results(conversation, ["22 °C", "a\nb"][: len(called)])
    conversation.append({"role": "assistant", "content": "Rome."})
    system, user, *later = inline_tools(conversation, TOOLS, form)
    by_template = render(oracle, template, conversation, TOOLS)
    assert by_template.replace(reasoning, "").endswith("".join(turn.format(**message) for message in later))

    definitions = form.inline.definitions(TOOLS)
    assert definitions in by_template
    if alone:
        assert (system["content"], user["content"]) == ("Be brief.", definitions + "Rome or Zürich?")
    else:
        assert (system["content"], user["content"]) == (f"Be brief.\n\n{definitions}", "Rome or Zürich?")
    assert inline_tools(ASKED[1:], TOOLS, form)[0]["content"].startswith(definitions)
    assert inline_tools(ASKED, [], form) == ASKED

    reply = parse_calls(later[0]["content"], form, TOOLS)
    assert [(call.name, call.arguments) for call in reply.calls] == [(call.name, call.arguments) for call in called]
    assert reply.content == conversation[2]["content"]


def test_formats_with_turns_of_their_own_need_a_template():
    for name in ("harmony", "gemma4", "mistral"):
        with pytest.raises(UnsupportedModel, match=f"the {name} format need"):
            inline_tools(ASKED, TOOLS, tool_format(name))


def test_results_answer_calls():
    conversation = render_assistant_calls(ASKED, "", CALLED)
    turn = conversation[-1]
    assert [call["id"] for call in turn["tool_calls"]] == ["call00000", "call00001"]
    assert turn["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}
    one = add_tool_results(conversation, ["b"], ["f-2"])
    assert one[-1] == {"role": "tool", "name": "f-2", "content": "b", "tool_call_id": "call00001"}
    both = add_tool_results(one, ["a"])
    assert both[-1] == {"role": "tool", "name": "get_weather", "content": "a", "tool_call_id": "call00000"}
    assert len(conversation) == 3
    for results, names in ((["a"], None), (["a", "b"], ["f-2"]), (["a"], ["other"])):
        with pytest.raises(ValueError, match="wanted one"):
            add_tool_results(both, results, names)
    again = render_assistant_calls(both, "", [ToolCall("f-2", {}, "", id="abcdefghi"), ToolCall("f-2", {}, "")])
    assert [call["id"] for call in again[-1]["tool_calls"]] == ["abcdefghi", "call00003"]


def test_a_call_that_cannot_be_read_is_replayed_as_it_was_written():
    text = '<tool_call>{"name": "f", "arguments": {"a": }</tool_call>'
    reply = parse_calls(f"Hm.{text}", tool_format("hermes"))
    assert render_assistant_calls(ASKED, reply.content, reply.calls)[-1] == {
        "role": "assistant",
        "content": f"Hm.{text}",
    }


@pytest.mark.parametrize(
    "recipient", ["<|channel|>commentary to=functions.f <|constrain|>json", " to=functions.f<|channel|>commentary json"]
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_after_reasoning(recipient, step):
    """The reasoning is taken out first; it leaves messages to tools as they are."""
    reply = "<|channel|>analysis<|message|>I ask to=functions.g.<|end|><|start|>assistant"
    reply += recipient + '<|message|>{"a": 1}'
    thinking, tools = Harmony().stream(), CallStream(tool_format("harmony").read)
    parts = [thinking.feed(reply[start : start + step]) for start in range(0, len(reply), step)] + [thinking.finish()]
    content = [event for part in parts for event in tools.feed(part.content)] + tools.finish()
    assert "".join(part.reasoning for part in parts) == "I ask to=functions.g."
    assert [(call.name, call.arguments) for call in tools.calls] == [("f", {"a": 1})]
    assert not any(isinstance(event, str) for event in content)


def test_string_arguments_are_decoded_once():
    assert decoded('{"a": "{\\"b\\": 1}"}') == {"a": '{"b": 1}'}
    assert decoded("") == decoded(None) == {}
    assert decoded("{not json") == "{not json"
    assert decoded("[1]") == "[1]"
    assert decoded({"a": "1"}) == {"a": "1"}
