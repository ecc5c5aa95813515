"""Reasoning and content, told apart: every format, every way to cut the text, and what models get wrong."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasllama_torch.chat import thinking
from dasllama_torch.chat.template import ChatTemplate
from dasllama_torch.chat.thinking import Reply
from dasllama_torch.chat.tools import parse_calls, tool_format

HARMONY, GEMMA4, THINK, BRACKETS = thinking.FORMATS


def streamed(form, pieces, inside=False) -> Reply:
    stream = form.stream(inside)
    replies = [stream.feed(piece) for piece in pieces] + [stream.finish()]
    return Reply("".join(reply.reasoning for reply in replies), "".join(reply.content for reply in replies))


TAGGED = [
    # form, inside, text, reasoning, content
    (THINK, False, "<think>\nI add.\n</think>\n\nIt is 4.\n", "I add.", "It is 4."),
    (THINK, True, "I add.\n</think>\n\nIt is 4.", "I add.", "It is 4."),
    (THINK, True, "<think>\nI add.</think>It is 4.", "I add.", "It is 4."),
    (THINK, False, "  It is 4. \n", "", "  It is 4. \n"),
    (THINK, False, "  \n", "", "  \n"),
    (THINK, False, "", "", ""),
    (THINK, False, "<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    (THINK, False, "<think>I add, and", "I add, and", ""),
    (THINK, True, "I add </thi", "I add </thi", ""),
    (THINK, False, " \n<think>a</think> b", "a", "b"),
    (THINK, False, "Well. <think>a</think> It is 4.", "a", "Well.  It is 4."),
    (THINK, False, "<think>a</think>b<think>c</think>d", "ac", "bd"),
    (THINK, False, "2 < 3 and <thin> </think", "", "2 < 3 and <thin> </think"),
    (THINK, False, "[THINK]a[/THINK]", "", "[THINK]a[/THINK]"),
    (BRACKETS, False, "[THINK]a[/THINK]b", "a", "b"),
    (GEMMA4, False, "<|channel>thought\nI add.\n<channel|>It is 4.", "I add.", "It is 4."),
    (GEMMA4, False, "It is <|channel>final\n4", "", "It is <|channel>final\n4"),
]

FINAL = "<|channel|>final<|message|>It is 4."
CALL = " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
HARMONIES = [
    ("<|channel|>analysis<|message|>I add.<|end|><|start|>assistant" + FINAL, "I add.", "It is 4."),
    ("<|channel|>analysis<|message|>I add.<|end|><|start|>assistant" + FINAL + "<|return|>", "I add.", "It is 4."),
    ("It is 4.", "", "It is 4."),
    (" It is 4. \n", "", " It is 4. \n"),
    ("", "", ""),
    (FINAL, "", "It is 4."),
    ("<|channel|>??<|message|>x", "", "x"),
    ("<|channel|>commentary?<|message|>I call f.<|end|>", "I call f.", ""),
    ("<|start|>assistant" + CALL, "", "<|start|>assistant" + CALL),
    (CALL, "", CALL),
    (
        "<|channel|>analysis<|message|>I call f.<|end|><|start|>assistant" + CALL,
        "I call f.",
        "<|start|>assistant" + CALL,
    ),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",) * 2,
    ("<|channel|>analysis<|message|>I add", "I add", ""),
    ("<|channel|>analysis<|message|>I add.<|channel|>final<|message|>It is 4.", "I add.", "It is 4."),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\nb", ""),
    ("<|channel|>analysis to=assistant<|message|>a<|end|>", "a", ""),
    ("<|channel|>final", "", ""),
    ("<|message|>x", "", "x"),
    ("to be, or", "", "to be, or"),
    ("to=5", "", "to=5"),
    ("a<|end|>b<|start|>assistant<|channel|>final<|message|>c", "", "a\nb\nc"),
    ("a<|message|>b", "", "ab"),
]
HARMONIES = [case if len(case) == 3 else (case[0], "", case[1]) for case in HARMONIES]
CASES = TAGGED + [(HARMONY, False, *case) for case in HARMONIES]


@pytest.mark.parametrize(("form", "inside", "text", "reasoning", "content"), CASES)
def test_split(form, inside, text, reasoning, content):
    assert form.split(text, inside) == (reasoning, content)
    assert streamed(form, text, inside) == (reasoning, content)  # letter by letter


PARTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>", "<|start|>", "assistant"]
PARTS += ["<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
PARTS += [" to=functions.f", "<|constrain|>", "json", "{}", " ", "\n", "It is 4.", "<", "|", "th", "é🦙", "t", "to="]


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(thinking.FORMATS),
    inside=st.booleans(),
    text=st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    data=st.data(),
)
def test_how_text_is_cut_makes_no_difference(form, inside, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = streamed(form, [text], inside)
    assert streamed(form, pieces, inside) == whole
    assert streamed(form, text, inside) == whole
    if form is THINK and text.count("<") == 0:  # nothing is lost and nothing is added
        assert whole == ((text.strip(), "") if inside else ("", text))


def test_text_comes_as_soon_as_it_is_certain():
    stream = THINK.stream()
    assert [stream.feed(piece) for piece in ("<thi", "nk>\nI", " add", ".</", "b>", "</think>", "\n\nIt", " is")] == [
        ("", ""),
        ("I", ""),
        (" add", ""),
        (".", ""),
        ("</b>", ""),
        ("", ""),
        ("", "It"),
        ("", " is"),
    ]
    stream = HARMONY.stream()
    said = [stream.feed(piece) for piece in ("Hel", "lo", " there", "<|", "x")]
    assert said == [("", "Hel"), ("", "lo"), ("", " there"), ("", ""), ("", "<|x")]


@pytest.mark.parametrize("inside", [True, False])
def test_a_reply_that_closes_what_the_prompt_opened(inside):
    """FAULTS B4. A whole reply tells even without the prompt."""
    pieces = ["internal", " reasoning</thi", "nk>answer"]
    assert THINK.split("".join(pieces), inside) == ("internal reasoning", "answer")
    assert streamed(THINK, pieces, inside=True) == ("internal reasoning", "answer")


OPENED = {
    "Qwen3.5-4B": (True, False),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (True, True),
    "deepseek-ai-DeepSeek-V3.1": (True, False),
    "Qwen-Qwen3-0.6B": (False, False),
    "GLM-4.6": (False, False),
    "openai-gpt-oss-120b": (False, False),
    "google-gemma-4-31B-it": (False, False),
}


@pytest.mark.parametrize("name", OPENED)
def test_prompts_that_begin_the_reasoning(name, oracle):
    source = (oracle / f"templates/{name}.jinja").read_bytes().decode()
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    form = thinking.find(PARTS, source) if name != "google-gemma-4-31B-it" else GEMMA4
    opened = tuple(
        form.opened_by(
            template.render(
                [{"role": "user", "content": "2+2?"}],
                add_generation_prompt=True,
                **dict.fromkeys(template.switches, on),
            )
        )
        for on in (True, False)
    )
    assert opened == OPENED[name]


@pytest.mark.parametrize(
    ("name", "specials", "form"),
    [
        ("Qwen-Qwen3-0.6B", ["<think>", "</think>"], THINK),
        ("GLM-4.7-Flash", ["<think>", "</think>"], THINK),
        ("Qwen-Qwen3-0.6B", ["<|im_start|>"], None),
        ("Qwen-Qwen2.5-7B-Instruct", ["<think>", "</think>"], None),
        ("openai-gpt-oss-120b", HARMONY.tokens, HARMONY),
        ("google-gemma-4-31B-it", GEMMA4.tokens, GEMMA4),
        ("mistralai-Ministral-3-14B-Reasoning-2512", ["[THINK]", "[/THINK]"], BRACKETS),
        ("meta-llama-Llama-3.1-8B-Instruct", ["<think>", "</think>"], None),
    ],
)
def test_who_reasons(name, specials, form, oracle):
    source = (oracle / f"templates/{name}.jinja").read_bytes().decode()
    assert thinking.find(specials, source) is form


def test_history_of_a_harmony_reply(oracle):
    """FAULTS B7: what is kept of a reply renders again, without its channels."""
    source = (oracle / "templates/openai-gpt-oss-120b.jinja").read_bytes().decode()
    reply = HARMONY.split("<|channel|>analysis<|message|>I add.<|end|><|start|>assistant" + FINAL)
    messages = [{"role": "user", "content": "2+2?"}, reply.message(), {"role": "user", "content": "And 3+3?"}]
    text = ChatTemplate(source).render(messages, add_generation_prompt=True)
    assert "<|start|>assistant<|channel|>final<|message|>It is 4.<|end|><|start|>user" in text
    assert "I add." not in text
    assert json.loads(json.dumps(messages[1])) == {
        "role": "assistant",
        "content": "It is 4.",
        "reasoning_content": "I add.",
    }
    assert Reply("", "x").message() == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("form", "tools", "text"),
    [
        (HARMONY, "harmony", "<|channel|>analysis<|message|>I call f.<|end|><|start|>assistant" + CALL),
        (HARMONY, "harmony", CALL),
        (THINK, "hermes", '<think>I call f.</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (GEMMA4, "gemma4", "<|channel>thought\nI call f.<channel|><|tool_call>call:f{}<tool_call|>"),
    ],
)
def test_calls_are_left_in_the_content_for_their_parser(form, tools, text):
    reply = form.split(text)
    assert reply.reasoning == ("" if text == CALL else "I call f.")
    calls = parse_calls(reply.content, tool_format(tools)).calls
    assert [(call.name, call.arguments) for call in calls] == [("f", {})]
