"""Conversations as templates take them: messages in Hugging Face's form, plain data only.

A message is a mapping with `role` ("system", "user", "assistant", "tool"), `content` (text, or a list of parts) and, of
an assistant, `reasoning_content` and `tool_calls` ([{"function": {"name": ..., "arguments": {...}}}]).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dasllama_torch.errors import TemplateError

from .tools.calls import decoded

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first two


def normalize(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as transformers hands them to a template: keys whose value is None are left out, reasoning has both
    names that templates read, and values are plain data: what is not JSON, such as a picture, becomes the name of its
    type. TemplateError for an empty conversation, what is no mapping, and text that is not valid Unicode.
    """
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"message {index} is {type(message).__name__}, wanted a mapping", index=index)
        try:
            message = plain({key: value for key, value in message.items() if value is not None})
        except UnicodeEncodeError as e:
            role = str(message.get("role"))
            found = f"a lone surrogate, U+{ord(e.object[e.start]):04X}; wanted valid Unicode"
            raise TemplateError(f"message {index} ({role}) has {found}", index=index, role=role) from None
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        normal.append(message)
    if not normal:
        raise TemplateError("the conversation is empty, wanted at least one message")
    return normal


def plain(value: Any) -> Any:
    """The value rebuilt from JSON's types. UnicodeEncodeError for lone surrogates."""
    if isinstance(value, str):
        value.encode("utf-8")
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def decode_arguments(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of tool calls as objects where they are JSON text, as OpenAI's API has them;
    templates write them out themselves, and text would be quoted once more. "" and None mean no arguments; text that is
    not a JSON object stays as it is.
    """
    return [
        {**message, "tool_calls": [_decoded(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _decoded(call["function"])}
    return {**call, "arguments": decoded(call.get("arguments"))}


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every text in it changed, but for keys, and for words that say what something is: the `role` of
    a message, the `type` of a part.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: item if _is_kind(key, item) else map_text(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    return value


def _is_kind(key: str, value: Any) -> bool:
    return key in ("role", "type") and isinstance(value, str) and value.isidentifier()
