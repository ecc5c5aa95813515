"""Tool calls in the words of each family of models: one file for each wire format.

    form = detect_format(template, vocabulary, architecture)
    reply = parse_calls(text, form, tools)                          # ToolReply(content, calls)
    messages = render_assistant_calls(messages, reply.content, reply.calls)
    messages = add_tool_results(messages, ["22 °C"])

`CallStream(form.read, tools)` takes a reply as it arrives; `choice_grammar(form, tools, "required")` leaves a model
nothing to write but calls. Replies are text with the names of special tokens in it (`decode(skip_special=False)`),
without the end of the turn and without reasoning (chat/thinking.py).

A parser never raises: a call that has no name is content, and one whose arguments cannot be read has `arguments=None`
and its text in `raw`. Sources: the publishers' chat templates; llama.cpp common/chat.cpp.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from dasllama_torch.errors import UnsupportedModel

from . import gemma4, glm, harmony, hermes, llama_json, mistral, qwen3_coder
from .calls import CallDelta, ToolCall, ToolReply
from .conversation import add_tool_results, inline_tools, render_assistant_calls
from .formats import ToolFormat
from .grammar import choice_grammar, no_call_grammar
from .stream import CallStream

__all__ = [
    "FORMATS",
    "CallDelta",
    "CallStream",
    "ToolCall",
    "ToolFormat",
    "ToolReply",
    "add_tool_results",
    "choice_grammar",
    "detect_format",
    "inline_tools",
    "no_call_grammar",
    "parse_calls",
    "render_assistant_calls",
    "tool_format",
    "writes_tools",
]

_MODULES = (hermes, qwen3_coder, harmony, gemma4, mistral, llama_json, glm)
FORMATS: dict[str, ToolFormat] = {module.FORMAT.name: module.FORMAT for module in _MODULES}

# What only this format writes, looked for in this order: some also write what stands further down.
_IN_TEMPLATES = (
    ("<|tool_call>call:", "gemma4"),
    ("<|call|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ('{"name": function name, "parameters": ', "llama-json"),
)
_IN_VOCABULARIES = (
    ("<|tool_call>", "gemma4"),
    ("<|call|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama-json"),
)
_BY_ARCHITECTURE = {"qwen35": "qwen3-coder", "qwen35moe": "qwen3-coder"}  # their vocabulary is that of hermes


def tool_format(name: str) -> ToolFormat:
    """The format of that name. UnsupportedModel if there is none."""
    if name not in FORMATS:
        raise UnsupportedModel(f"no tool format is called {name!r}; wanted one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect_format(template: str | None, vocabulary: Container[str], architecture: str) -> ToolFormat:
    """The format that a model speaks: by its chat template, and where that says nothing of tools by its special tokens.

    template: Jinja source, None where the file has none. vocabulary: texts of special tokens. architecture:
    `general.architecture`. UnsupportedModel if the model has no format, or one that is not implemented.
    """
    if template is not None:
        for mark, name in _IN_TEMPLATES:
            if mark in template:
                return FORMATS[name]
        if "tool_calls" in template:
            raise _unknown("the chat template writes tool calls in a format that is not implemented")
    for token, name in _IN_VOCABULARIES:
        if token in vocabulary:
            return FORMATS[_BY_ARCHITECTURE.get(architecture, name)]
    raise _unknown(f"neither the chat template nor the vocabulary of this {architecture} model has tool calls")


def writes_tools(template: str, form: ToolFormat) -> bool:
    """Whether a chat template writes tools in this format. `inline_tools` is for one that does not."""
    return any(mark in template for mark, name in _IN_TEMPLATES if name == form.name)


def _unknown(found: str) -> UnsupportedModel:
    return UnsupportedModel(f"{found}; to use one of {', '.join(FORMATS)} all the same, name it")


def parse_calls(text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()) -> ToolReply:
    """The content and the calls of a whole reply. tools: those declared, in OpenAI's form; formats without JSON take
    the types of arguments from them.
    """
    stream = CallStream(form.read, tools)
    events = stream.feed(text) + stream.finish()
    return ToolReply("".join(event for event in events if isinstance(event, str)), stream.calls)
