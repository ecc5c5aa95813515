"""Chat templates: exactly transformers' text, for published templates and live; hostile ones are stopped; errors name
the message; the families' own templates."""

import datetime
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import vocabularies
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from dasllama_torch.chat import families, worker
from dasllama_torch.chat.caps import ChatCaps
from dasllama_torch.chat.messages import decode_arguments
from dasllama_torch.chat.sandbox import SANDBOX, Sandbox
from dasllama_torch.chat.template import ChatTemplate
from dasllama_torch.errors import TemplateError
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

NOW = datetime.datetime(2026, 1, 15, 12)
HELLO = [{"role": "user", "content": "Hello, who are you?"}]

# The message at fault, of golden cases that raise. Hermes' template stumbles over its tools before it reads a message.
AT_FAULT = {
    "parts": 0,
    "system": 0,
    "multi": 0,
    "html_unicode": 0,
    "tools_parallel": 1,
    "tools_call_none_content": 1,
    "tools_arguments_as_string": 1,
    "error_assistant_first": 0,
    "error_two_users": 1,
    "error_unknown_role": 1,
    "error_system_late": 2,
    "error_tool_without_call": 1,
    "error_channel_tags": 1,
    "error_empty": None,
    "single": None,
}


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


@pytest.fixture
def published(oracle):
    """Name -> template as published, with the clock of the goldens."""

    def template(name: str, special_tokens=None, **more) -> ChatTemplate:
        source = (oracle / "templates" / name).with_suffix(".jinja").read_bytes().decode()
        return ChatTemplate(source, special_tokens=special_tokens, clock=lambda: NOW, **more)

    return lambda name, *args, **more: template(f"{name}.jinja", *args, **more)


def theirs(source: str, messages: list, special_tokens: dict, **more) -> str:
    """transformers' text."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models

    model = HFTokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=source, **special_tokens)
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def test_golden_renders(oracle, published):
    cases = json.loads((oracle / "templates/renders.json").read_text(encoding="utf-8"))["renders"]
    assert len(cases) == 356
    raised = 0
    for case in cases:
        template = published(case["template"].removesuffix(".jinja"), case["special_tokens"])
        more = dict(add_generation_prompt=case["add_generation_prompt"], **case["kwargs"])
        if "text" in case:
            assert template.render(case["messages"], case["tools"], **more) == case["text"], case["id"]
            continue
        with pytest.raises(TemplateError) as error:
            template.render(case["messages"], case["tools"], **more)
        raised += 1
        index = AT_FAULT[case["id"].split("/")[1]]
        assert error.value.index == index, case["id"]
        text = str(error.value)
        assert "\n" not in text
        if index is not None:
            role = case["messages"][index]["role"]
            assert error.value.role == role
            assert text.startswith(f"chat_template: message {index} ({role}): line ")
        if case["id"].split("/")[1] != "error_empty":
            assert " ".join(case["error"]["message"].split()) in text
    assert raised == 35


AWKWARD = [
    {"role": "system", "content": 'temp > 10 & humidity < 50 (user\'s) — 안녕 a/b "q" \\ </tag>'},
    {"role": "user", "content": "\t x \u2028 y\r\n", "name": None},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "because",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"b": [1, 2.5, None], "a": "é<"}}}],
    },
    {"role": "tool", "name": "f", "content": '{"ok": true}'},
    {"role": "user", "content": "next"},
]
SOURCES = {
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}|"
    "{{ messages | tojson(ensure_ascii=true) }}|{{ messages | tojson(separators=(',', ':')) }}",
    "blocks": "{% for m in messages %}\n  {% if loop.index0 == 3 %}\n{% break %}\n  {% endif %}\n"
    "{% generation %}\n{{ m.role }}{{ loop.last }}\n{% endgeneration %}\n{% endfor %}\n{{ messages[1:]|length }}\n",
    "generation scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "clock": "{{ strftime_now('%d %b %Y, %H:%M') }}{{ tools is none }}{{ date_string is defined }}{{ documents }}",
    "names": "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.self }}{{ dict(a=1) }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ 'name' in m }}{% endfor %}",
    "text": "{% for m in messages %}{{ m.content | trim | replace('x', 'y') | upper }}{{ m | string }}{% endfor %}",
}


@pytest.mark.parametrize("name", SOURCES)
def test_renders_as_transformers(name, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    ours = ChatTemplate(SOURCES[name], special_tokens={"bos_token": "<s>"}, clock=lambda: NOW)
    wanted = theirs(SOURCES[name], AWKWARD, {"bos_token": "<s>"}, add_generation_prompt=True)
    assert ours.render(AWKWARD, add_generation_prompt=True) == wanted


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "google-gemma-4-31B-it", "GLM-4.6"])
def test_published_templates_render_awkward_text_as_transformers(name, published, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": AWKWARD[0]["content"],
                "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é", "<"]}}},
            },
        }
    ]
    template = published(name, {"bos_token": "<s>", "eos_token": "</s>"})
    more = dict(tools=tools, add_generation_prompt=True)
    wanted = theirs(template.source, AWKWARD, template.special_tokens, **more)
    assert template.render(AWKWARD, **more) == wanted


BOMBS = {
    "loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too much time"),
    "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "string": ("{{ 'x' * 10 ** 12 }}", "more than 1024 MiB"),
    "long string": ("{% for i in range(20) %}{{ 'x' * 10 ** 6 }}{% endfor %}", "more than 16777216 characters"),
    "padding": ("{{ 'x'.center(10 ** 11) }}{{ 'x' | indent(10 ** 11) }}", "more than 1024 MiB"),
    "lists in lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x == ns.x[0] }}{{ ns.x }}",
        "too much time",
    ),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "class": ("{{ ''.__class__ }}", "'__class__' of 'str'"),
    "subscript": ("{{ messages['__class__'] }}", "'__class__' of 'list'"),
    "attr": ("{{ messages | attr('__class__') }}", "'__class__' of 'list'"),
    "format": ("{{ '{0.__class__}'.format(messages) }}", "'__class__' of 'list'"),
    "globals": ("{{ raise_exception.__globals__ }}", "'__globals__' of 'function'"),
    "subclasses": ("{{ cycler.__init__.__globals__.os.system('true') }}", "'__init__' of 'type'"),
    "namespace": ("{% set ns = namespace(__class__=1) %}", "cannot hold '__class__'"),
    "change": ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "syntax": ("{% for m in messages %}\n{{ m.content }", "line 2: "),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_template_is_stopped(name, monkeypatch):
    source, wanted = BOMBS[name]
    with pytest.raises(TemplateError, match="^chat_template: ") as error:
        ChatTemplate(source).render(HELLO)
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "Hello, who are you?"  # the next is not affected


def test_a_worker_that_dies_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(HELLO)
    os.kill(SANDBOX._worker.pid, signal.SIGKILL)
    SANDBOX._worker.wait()
    assert template.render(HELLO) == "Hello, who are you?"


def test_an_interrupt_leaves_no_answer_behind(monkeypatch):
    sandbox = Sandbox()

    def interrupted(line):
        sandbox._worker.stdin.write(line)
        sandbox._worker.stdin.flush()
        raise KeyboardInterrupt

    request = dict(context={"messages": []}, now=NOW.isoformat())
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sandbox.ask(template="old", **request)
    assert sandbox.ask(template="new", **request) == {"text": "new"}
    process = sandbox._worker
    sandbox.close()
    assert process.returncode == 0


def test_threads_share_the_worker():
    wrong = []

    def render(n: int) -> None:
        for i in range(50):
            text = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": f"{n}/{i}"}])
            if text != f"{n}/{i}":
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fork_gets_a_worker_of_its_own():
    """And a process that ends takes its worker with it, silently."""
    code = """
import os, sys
from dasllama_torch.chat.sandbox import SANDBOX
from dasllama_torch.chat.template import ChatTemplate
say = lambda text: ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}])
say("before")
mine = SANDBOX._worker.pid
child = os.fork()
for i in range(100):
    assert say(str(i)) == str(i)
if child == 0:
    assert SANDBOX._worker.pid != mine
    SANDBOX.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0 and SANDBOX._worker.pid == mine
print(mine)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert run.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout), 0)


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([], "the conversation is empty, wanted at least one message"),
        (["hi"], "message 0 is str, wanted a mapping"),
        ([*HELLO, {"role": "tool", "content": "\ud800"}], "message 1 (tool) has a lone surrogate, U+D800"),
    ],
)
def test_what_is_no_conversation(messages, wanted):
    with pytest.raises(TemplateError) as error:
        ChatTemplate("{{ messages }}").render(messages)
    assert wanted in str(error.value)


def test_what_is_no_plain_data_stays_outside():
    message = {"role": "user", "content": ({"type": "image", "image": object()}, {"type": "text", "text": "a"})}
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == (
        "[{'type': 'image', 'image': '<object>'}, {'type': 'text', 'text': 'a'}]"
    )


@pytest.mark.parametrize(
    "name", ["openai-gpt-oss-120b", "Qwen3-Coder", "Qwen3.5-4B", "GLM-4.6", "google-gemma-4-31B-it"]
)
def test_string_arguments_are_decoded_once(name, published):
    """FAULTS B2."""

    def rendered(arguments) -> str:
        call = {"type": "function", "function": {"name": "run", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = decode_arguments([*HELLO, turn, {"role": "tool", "name": "run", "content": "done"}])
        return published(name, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True)

    arguments = {"command": 'echo "é" > a', "n": 2, "deep": {"list": [1, {"x": None}]}}
    assert rendered(json.dumps(arguments)) == rendered(arguments)
    assert rendered("") == rendered(None) == rendered({})


def test_arguments_that_are_no_object_stay_text():
    for arguments in ("{'a': 1}", "[1]", '"a"', "[" * 100_000):
        messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
        assert decode_arguments(messages) == messages


def test_null_content_counts_as_absent(published):
    """FAULTS B1: Qwen3's template needs a content; "" is the one that transformers needs too."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "content": "42"}
    template = published("Qwen-Qwen3-0.6B")
    with pytest.raises(
        TemplateError, match=r"message 1 \(assistant\): line \d+: 'dict object' has no attribute 'content'"
    ):
        template.render([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result])
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    assert template.render(messages) == theirs(template.source, messages, {})


def test_past_thinking_is_left_out(published):
    """FAULTS B9: in tags and apart, both render to the content only."""
    for turn in (
        {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
    ):
        text = published("Qwen-Qwen3-0.6B").render([*HELLO, turn, *HELLO])
        assert "<|im_start|>assistant\nb<|im_end|>\n" in text


# Families


def file(architecture: str, specials: list[str], **keys) -> tuple[Metadata, Tokenizer]:
    md = vocabularies.bpe("qwen2", dict.fromkeys(specials, TokenType.CONTROL))
    ids = {name: len(md["tokenizer.ggml.tokens"]) - len(specials) + i for i, name in enumerate(specials)}
    md |= {f"tokenizer.ggml.{key}": ids[name] for key, name in keys.items()}
    md["general.architecture"] = architecture
    return Metadata(md), Tokenizer.from_metadata(Metadata(md))


TWINS = {
    "google-gemma-2-2b-it": ("gemma2", "Gemma 2 and 3"),
    "google-gemma-4-31B-it": ("gemma4", "Gemma 4"),
    "microsoft-Phi-3.5-mini-instruct": ("phi3", "Phi-3"),
    "Qwen-Qwen2.5-7B-Instruct": ("qwen2", "Qwen 2.5"),
    "Qwen-Qwen3-0.6B": ("qwen3", "Qwen 3"),
    "openai-gpt-oss-120b": ("gpt-oss", "gpt-oss"),
    "GLM-4.6": ("glm4moe", "GLM 4.5 and 4.6"),
}
PLAIN = {"single", "single_nogen", "multi", "whitespace", "system", "thinking_on", "thinking_off", "html_unicode"}


@pytest.mark.parametrize("published_name", TWINS)
def test_a_familys_template_writes_what_its_publisher_does(published_name, oracle):
    architecture, name = TWINS[published_name]
    family = next(family for family in families.FAMILIES if family.name == name)
    assert families.find(architecture, family.tokens) is family
    cases = json.loads((oracle / "templates/renders.json").read_text(encoding="utf-8"))["renders"]
    tried = 0
    for case in cases:
        stem, which = case["id"].split("/")
        if stem != published_name or which not in PLAIN or "text" not in case:
            continue
        template = ChatTemplate(family.source, special_tokens=case["special_tokens"], clock=lambda: NOW)
        more = dict(add_generation_prompt=case["add_generation_prompt"], **case["kwargs"])
        assert template.render(case["messages"], **more) == case["text"], case["id"]
        tried += 1
    assert tried >= 2


def test_llama3s_template():
    """Source: the model card's prompt format of Llama 3 (meta-llama/Meta-Llama-3-8B-Instruct)."""
    family = families.find("llama", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    template = ChatTemplate(family.source, special_tokens={"bos_token": "<|begin_of_text|>"})
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}]
    assert template.render(messages, add_generation_prompt=True) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_gemmas_system_message_begins_the_first_turn():
    """Source: the chat template of google/gemma-3-1b-it."""
    family = next(family for family in families.FAMILIES if family.name == "Gemma 2 and 3")
    template = ChatTemplate(family.source, special_tokens={"bos_token": "<bos>"})
    turns = [("system", "Be brief. "), ("user", " Hi\n"), ("assistant", "Hello."), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert template.render(messages, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief. \n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_where_a_template_comes_from():
    md, tokenizer = file("gemma3", ["<bos>", "<start_of_turn>", "<end_of_turn>"], bos_token_id="<bos>")
    ours = ChatTemplate.from_metadata(md, tokenizer)
    assert ours.origin == "template of Gemma 2 and 3"
    assert ours.render(HELLO).startswith("<bos><start_of_turn>user\nHello")
    given = ChatTemplate.from_metadata(md, tokenizer, chat_template="{{ bos_token }}!")
    assert (given.origin, given.render(HELLO)) == ("chat_template", "<bos>!")
    own = Metadata({**md, "tokenizer.chat_template": "mine", "tokenizer.chat_template.tool_use": "tools"})
    template = ChatTemplate.from_metadata(own, tokenizer)
    assert (template.origin, template.render(HELLO), template.render(HELLO, [])) == (
        "tokenizer.chat_template",
        "mine",
        "mine",
    )
    assert template.render(HELLO, [{"type": "function", "function": {"name": "f"}}]) == "tools"


@pytest.mark.parametrize(
    ("architecture", "specials"), [("llama", ["<|im_start|>", "<|im_end|>"]), ("gemma3", ["<bos>"])]
)
def test_no_other_familys_template_is_taken(architecture, specials):
    md, tokenizer = file(architecture, specials)
    with pytest.raises(TemplateError, match="tokenizer.chat_template is missing, .* wanted chat_template=") as error:
        ChatTemplate.from_metadata(md, tokenizer)
    assert repr(architecture) in str(error.value)


def test_a_late_system_message_is_refused_where_the_family_cannot_say_it():
    """FAULTS B10."""
    family = next(family for family in families.FAMILIES if family.name == "Gemma 2 and 3")
    with pytest.raises(
        TemplateError, match=r"message 1 \(user\): line \d+: Conversation roles must alternate"
    ) as error:
        ChatTemplate(family.source, special_tokens={"bos_token": "<bos>"}).render(HELLO * 2)
    assert (error.value.index, error.value.role) == (1, "user")


# What a chat can do


@pytest.mark.parametrize(
    ("name", "system", "tools", "reasoning", "off"),
    [
        ("google-gemma-2-2b-it", False, False, False, False),
        ("microsoft-Phi-3.5-mini-instruct", True, False, False, False),
        ("meta-llama-Llama-3.1-8B-Instruct", True, True, False, False),
        ("Qwen-Qwen3-0.6B", True, True, True, True),
        ("openai-gpt-oss-120b", True, True, True, False),
        ("google-gemma-4-31B-it", True, True, True, True),
        ("mistralai-Ministral-3-14B-Reasoning-2512", True, True, True, False),
        ("deepseek-ai-DeepSeek-V3.1", True, False, True, True),
    ],
)
def test_caps(name, system, tools, reasoning, off, published):
    markers = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"]
    markers += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    types = dict.fromkeys(markers, TokenType.CONTROL)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    caps = ChatCaps.of(published(name, tokens, special_types=types))
    assert (caps.system, caps.tools, caps.reasoning, caps.reasoning_off) == (system, tools, reasoning, off)
    inert = ChatCaps.of(published(name, tokens))  # a vocabulary without the markers
    assert (inert.system, inert.tools, inert.reasoning, inert.reasoning_off) == (system, tools, False, False)


def test_the_workers_limits_are_the_ones_that_are_tested():
    assert (worker.MEMORY, worker.MAX_OUTPUT) == (1 << 30, 1 << 24)


def test_a_broken_template_is_not_laid_to_the_message_of_an_earlier_one():
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"
    with pytest.raises(TemplateError, match="^chat_template: line 1") as e:
        _ = ChatTemplate("{% for").variables
    assert e.value.index is None
