"""Calls and results as messages in Hugging Face's form: {"role", "content", "tool_calls"}. Nothing here changes the
messages it is given.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dasllama_torch.errors import UnsupportedModel

from .calls import ToolCall, function_of
from .formats import ToolFormat

Message = Mapping[str, Any]


def render_assistant_calls(messages: Sequence[Message], text: str, calls: Sequence[ToolCall]) -> list[Message]:
    """The conversation with an assistant's turn of `text` and `calls` after it.

    A call whose arguments cannot be read goes into the text as the model wrote it. One without an id gets the number
    that it has in the conversation, as nine letters and digits, which Mistral's templates ask for.
    """
    number = sum(len(message.get("tool_calls") or ()) for message in messages)
    text += "".join(call.raw for call in calls if call.arguments is None)
    readable = [call for call in calls if call.arguments is not None]
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if readable:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.id or f"call{number + i:05d}",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(readable)
        ]
    return [*messages, turn]


def add_tool_results(
    messages: Sequence[Message], results: Sequence[str], names: Sequence[str] | None = None
) -> list[Message]:
    """The conversation with the results of the last assistant's calls after it, in the order of the calls, or in that
    of `names`. ValueError for a result without a call.
    """
    pending = _pending_calls(messages)
    if names is None:
        names = [function_of(call)["name"] for call in pending[: len(results)]]
    if len(names) != len(results):
        raise ValueError(f"{len(results)} results, wanted one for each of these calls: {', '.join(names) or 'none'}")
    added = []
    for name, result in zip(names, results, strict=True):
        call = _take(pending, name)
        if call is None:
            left = ", ".join(function_of(call)["name"] for call in pending) or "none"
            raise ValueError(f"a result of {name!r}, wanted one of the calls without a result: {left}")
        answers = {"tool_call_id": call["id"]} if call.get("id") else {}
        added.append({"role": "tool", "name": name, "content": result, **answers})
    return [*messages, *added]


def _pending_calls(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The calls of the last assistant's turn that have no result yet."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "tool":
        end -= 1
    pending = list(messages[end - 1].get("tool_calls") or ()) if end else []
    for result in messages[end:]:
        _take(pending, result.get("name"), result.get("tool_call_id"))
    return pending


def _take(calls: list[Mapping[str, Any]], name: str | None, call_id: str | None = None) -> Mapping[str, Any] | None:
    """Removes the first call with that id, or where none is given with that name, and returns it."""
    for i, call in enumerate(calls):
        if call.get("id") == call_id if call_id else function_of(call)["name"] == name:
            return calls.pop(i)
    return None


def inline_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Message]:
    """The conversation as plain messages, for a template that knows nothing of tools: what the tools are stands before
    the first user's message or in the system's, and calls and results are text. UnsupportedModel for a format that has
    turns of its own.
    """
    inline = form.inline
    if inline is None:
        raise UnsupportedModel(f"tools in the {form.name} format need a chat template that writes them; this has none")
    plain: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
            if len(results) > 1:
                plain.pop()
            plain.append({"role": inline.result_role, "content": inline.results(results)})
            continue
        results = []
        turn = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            text = turn.get("content") or ""
            turn["content"] = text + (inline.before_calls if text else "") + inline.calls(list(map(function_of, calls)))
        plain.append(turn)
    if tools:
        _define(plain, inline.definitions(tools), in_user_message=inline.in_user_message)
    return plain


def _define(messages: list[dict[str, Any]], definitions: str, *, in_user_message: bool) -> None:
    if in_user_message:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is not None:
            first["content"] = definitions + first["content"]
            return
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{definitions}"
    else:
        messages.insert(0, {"role": "system", "content": definitions})
