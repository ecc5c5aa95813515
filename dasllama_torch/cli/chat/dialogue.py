"""A chat with a person: what they type becomes messages, commands and results of tools."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import DasllamaError

from ..output import one_line
from .respond import report, respond
from .screen import Screen

if TYPE_CHECKING:
    from dasllama_torch.chat.chat import Chat
    from dasllama_torch.sampling import SamplingParams

_THINK = {"on": True, "off": False, "auto": None}


class Dialogue:
    """read: the next text for a prompt; EOFError ends the dialogue, KeyboardInterrupt only what is being typed."""

    def __init__(
        self,
        chat: "Chat",
        params: "SamplingParams",
        max_tokens: int | None,
        screen: Screen,
        read: Callable[[str], str],
    ):
        self._chat, self._params, self._max_tokens = chat, params, max_tokens
        self._screen, self._read = screen, read
        self._results: list[str] = []  # of the last reply's calls, as far as they are known
        self._ended = False
        # name -> what it does, what it takes, what is said of it
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "system": (self._system, "TEXT|off", "what the model is told beforehand; alone: show it"),
            "think": (self._think, "on|off|EFFORT|auto", "whether it reasons, or how much; auto: as the model has it"),
            "tools": (self._tools, "FILE.json|off", "tools that it may call, in OpenAI's form; alone: their names"),
            "result": (self._result, "TEXT", "what the next call has given; a line that is no command is the same"),
            "retry": (self._retry, "", "answer the last message anew"),
            "undo": (self._undo, "", "take the last message back, and its answer"),
            "save": (self._save, "FILE", "write the conversation to a file"),
            "load": (self._load, "FILE", "go on with one from a file"),
            "stats": (self._stats, "", "tokens and speed of the last answer"),
            "help": (self._help, "", "this list"),
            "quit": (self._quit, "", "the end, as Ctrl-D"),
        }

    def run(self) -> None:
        """Until the person has had enough. What goes wrong is told, and the dialogue goes on."""
        self._screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat")
        while not self._ended:
            try:
                self._take(self._read(self._prompt()))
            except EOFError:
                self._screen.note("")
                break
            except KeyboardInterrupt:
                self._screen.note("")
            except (DasllamaError, OSError, ValueError) as e:
                self._screen.note(f"error: {one_line(str(e))}")

    def _prompt(self) -> str:
        calls = self._open_calls()
        return f"result of {one_line(calls[0])}> " if calls else "> "

    def _take(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            if name not in self._commands:
                raise DasllamaError(f"there is no command /{name}; /help lists them, and //{name} is a message")
            self._commands[name][0](argument.strip())
        elif self._open_calls():
            self._result(text)
        elif text.strip():
            self._chat.add_user(text[1:] if text.startswith("//") else text)
            self._respond()

    def _open_calls(self) -> list[str]:
        """The names of the calls whose results are wanted."""
        calls = _last(self._chat).get("tool_calls") or ()
        return [call["function"]["name"] for call in calls][len(self._results) :]

    def _respond(self) -> None:
        try:
            if respond(self._chat, self._params, self._max_tokens, self._screen):
                self._screen.note("(stopped)")
        finally:
            if self._chat.reply is None:  # what got no answer is as if it had not been said
                while _last(self._chat).get("role") in ("user", "tool"):
                    self._chat.messages.pop()

    def _system(self, text: str) -> None:
        if text:
            self._chat.set_system(None if text == "off" else text)
        else:
            first = self._chat.messages[0] if self._chat.messages else {}
            self._screen.note(first["content"] if first.get("role") == "system" else "none")

    def _think(self, text: str) -> None:
        if not text:
            raise DasllamaError("wanted /think on, off, auto, or an effort such as low")
        self._chat.set_thinking(_THINK.get(text, text))

    def _tools(self, text: str) -> None:
        if text:
            self._chat.set_tools([] if text == "off" else _declared(text))
        else:
            names = [tool["function"]["name"] for tool in self._chat.tools]
            self._screen.note("\n".join(names) or "none")

    def _result(self, text: str) -> None:
        open_calls = self._open_calls()
        if not open_calls:
            raise DasllamaError("no call waits for a result")
        self._results.append(text)
        if len(open_calls) == 1:
            results, self._results = self._results, []
            self._chat.add_tool_results(results)
            self._respond()

    def _retry(self, _: str) -> None:
        users = [message for message in self._chat.messages if message["role"] == "user"]
        self._undo("")
        self._chat.messages.append(users[-1])
        self._respond()

    def _undo(self, _: str) -> None:
        self._chat.undo()
        self._results = []

    def _save(self, text: str) -> None:
        self._chat.save(_path(text))

    def _load(self, text: str) -> None:
        self._chat.load(_path(text))
        self._results = []

    def _stats(self, _: str) -> None:
        if self._chat.reply is None:
            raise DasllamaError("nothing was answered yet")
        stats, held = self._chat.stats, self._chat.session.n_past
        self._screen.note(report(self._chat))
        self._screen.note(f"{stats.reused_tokens} of the prompt's tokens were held before, and {held} in all are now")

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {takes}", what) for name, (_, takes, what) in self._commands.items()]
        rows += [
            ('"""', "begins and ends a message of several lines"),
            ("... \\", "a line that goes on in the next"),
        ]
        self._screen.note("\n".join(f"{what:24}{meaning}" for what, meaning in rows))

    def _quit(self, _: str) -> None:
        self._ended = True


def _last(chat: "Chat") -> Any:
    return chat.messages[-1] if chat.messages else {}


def _path(text: str) -> Path:
    if not text:
        raise DasllamaError("wanted the name of a file")
    return Path(text).expanduser()


def _declared(name: str) -> list[Any]:
    """The tools of a JSON file: a list of them, or an object that has it as `tools`."""
    path = _path(name)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise DasllamaError(f"{path}: no JSON: {e}") from None
    found = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise DasllamaError(f"{path}: wanted a list of tools in OpenAI's form")
    return found
