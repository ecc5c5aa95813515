"""A conversation in a file: one JSON object, which people may read and programs write.

{"dasllama_torch.chat": 1, "messages": [...], "tools": [...], "thinking": null, "notes": [...]}

notes: for each message `escape_special`, and of a reply that stands as it was said, how that was (history.py).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import SessionFileError
from dasllama_torch.files import appearing
from dasllama_torch.text.tokenizer import Tokenizer

from .history import Message, Sampled

if TYPE_CHECKING:
    from .chat import Chat

KEY, VERSION = "dasllama_torch.chat", 1
_SAID = {"ids": list, "text": str, "start": int, "digest": str}  # of a reply; its message is the one in the file


def save(chat: "Chat", path: str | os.PathLike) -> None:
    """See `Chat.save`. The file appears whole or not at all."""
    data = {
        KEY: VERSION,
        "messages": chat.messages,
        "tools": chat.tools,
        "thinking": chat.thinking,
        "notes": [_note(message) for message in chat.messages],
    }
    try:
        with appearing(path) as part:
            part.write_text(json.dumps(data, ensure_ascii=False, indent=1), "utf-8")
    except OSError as error:
        raise SessionFileError(f"{path}: the chat cannot be written: {error.strerror}") from None


def load(chat: "Chat", path: str | os.PathLike) -> None:
    """See `Chat.load`."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SessionFileError(f"{path}: no chat can be read: {error}") from None
    if not isinstance(data, dict) or data.get(KEY) != VERSION:
        raise SessionFileError(f"{path}: {KEY} is missing or of another version, wanted {VERSION}")
    wanted = {"messages": list, "tools": list, "thinking": (bool, str, type(None)), "notes": list}
    for key, kind in wanted.items():
        if not isinstance(data.get(key), kind):
            raise SessionFileError(f"{path}: {key} is {type(data.get(key)).__name__}")
    items = [*data["messages"], *data["tools"], *data["notes"]]
    if not all(isinstance(item, dict) for item in items) or len(data["notes"]) != len(data["messages"]):
        raise SessionFileError(f"{path}: wanted objects as messages and tools, and a note for each message")
    messages = [_message(chat.tokenizer, *pair) for pair in zip(data["messages"], data["notes"], strict=True)]
    before = chat.tools
    try:
        chat.set_tools(data["tools"])
        chat.set_thinking(data["thinking"])
    except ValueError as error:
        raise SessionFileError(f"{path}: {error}") from None
    except BaseException:
        chat.tools = before
        raise
    chat.messages, chat.reply = messages, None


def _note(message: Mapping[str, Any]) -> dict[str, Any]:
    note: dict[str, Any] = {"escape_special": getattr(message, "escape_special", True)}
    sampled = getattr(message, "sampled", None)
    if sampled is not None and message == sampled.message:
        note |= {key: value for key, value in asdict(sampled).items() if key in _SAID}
    return note


def _message(tokenizer: Tokenizer, fields: dict[str, Any], note: dict[str, Any]) -> Message:
    """A message, with the ids of a reply if they are what the vocabulary has for its text."""
    sampled = None
    if all(isinstance(note.get(key), kind) for key, kind in _SAID.items()):
        said = {key: note[key] for key in _SAID}
        if _spell(tokenizer, said["ids"], said["text"]):
            sampled = Sampled(**{**said, "ids": tuple(said["ids"])}, message=json.loads(json.dumps(fields)))
    return Message(fields, escape_special=note.get("escape_special") is not False, sampled=sampled)


def _spell(tokenizer: Tokenizer, ids: list[Any], text: str) -> bool:
    if not all(type(token) is int and 0 <= token < len(tokenizer) for token in ids):
        return False
    # A word's own space shows or not by what is before it.
    return tokenizer.decode(ids, skip_special=False).removeprefix(" ") == text.removeprefix(" ")
