"""`dasllama-torch chat`: what a pipe gets, what a terminal shows, and that nothing a person types ends the chat but its
end."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys

import chat_models
import pytest
from conftest import ROOT

import dasllama_torch as dl
from dasllama_torch import cli
from dasllama_torch.chat.reply import ChatPiece
from dasllama_torch.chat.tools import CallDelta
from dasllama_torch.cli.chat.dialogue import Dialogue
from dasllama_torch.cli.chat.editor import read_message
from dasllama_torch.cli.chat.screen import Screen
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf

COMMAND = [sys.executable, "-m", "dasllama_torch.cli", "chat"]
TEMPLATE = "HuggingFaceTB-SmolLM3-3B"
QWEN3 = "Qwen-Qwen3-0.6B"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model_file(oracle, tmp_path_factory):
    """A tiny SmolLM3 that has a vocabulary, a chat template and room for long answers."""
    path = tmp_path_factory.mktemp("chat") / "talker.gguf"
    file = GGUFFile(oracle / "tiny/smollm3.gguf")
    words = chat_models.vocabulary(chat_models.SPECIALS[TEMPLATE])
    metadata = {key: file.metadata.typed(key) for key in file.metadata} | {key: words.typed(key) for key in words}
    metadata |= {"smollm3.context_length": 1 << 17, "tokenizer.chat_template": chat_models.source(oracle, TEMPLATE)}
    tensors = {tensor.name: (tensor.data, tensor.qtype) for tensor in file.tensors.values()}
    write_gguf(path, "smollm3", metadata, tensors)
    return path


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_pipe_gets_the_answer_alone(model_file, capsys, monkeypatch, tmp_path):
    with dl.create_chat(dl.load_model(model_file), "Be brief.") as chat:
        chat.add_user("What is\n/help?")
        wanted = "".join(piece.text for piece in chat.respond(max_tokens=12) if piece.kind == "content")
    pipe(monkeypatch, b"What is\n/help?\n")
    assert cli.main(["chat", str(model_file), "--system", "Be brief.", "-n", "12"]) == 0
    out, err = capsys.readouterr()
    assert wanted
    assert out == wanted + "\n"
    assert err.startswith("prompt: ")
    assert err.endswith("ended by length\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("--json-schema", '{"enum": ["yes", "no"]}', {'"yes"', '"no"'}),
        ("--grammar", 'root ::= "yes" | "no"', {"yes", "no"}),
        ("--regex", "yes|no", {"yes", "no"}),
    ],
)
def test_an_answer_is_what_it_has_to_be(model_file, capsys, monkeypatch, tmp_path, option, given, wanted):
    file, template = tmp_path / "given", tmp_path / "plain.jinja"
    file.write_text(given)
    template.write_text(PLAIN)
    pipe(monkeypatch, b"Yes or no?")
    value = given if option == "--regex" else str(file)
    assert cli.main(["chat", str(model_file), option, value, "--template", str(template), "-n", "20"]) == 0
    out, err = capsys.readouterr()
    assert out.removesuffix("\n") in wanted
    assert err.endswith("ended by stop\n")


def test_an_answer_ends_before_a_stop_string(model_file, capsys, monkeypatch, tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    with dl.create_chat(dl.load_model(model_file), chat_template=PLAIN) as chat:
        chat.add_user("Hello")
        said = "".join(map(str, chat.respond(max_tokens=12)))
    end = said[len(said) // 2 :][:2]
    pipe(monkeypatch, b"Hello")
    options = ["--template", str(template), "-n", "12", "--stop", "nowhere in it", "--stop", end]
    assert cli.main(["chat", str(model_file), *options]) == 0
    out, err = capsys.readouterr()
    assert out == said[: said.index(end)] + "\n"
    assert err.endswith("ended by stop\n")


@pytest.mark.parametrize(
    ("data", "options", "wanted"),
    [
        (b"", [], "the message on standard input is empty"),
        (b" \n\n", [], "the message on standard input is empty"),
        (bytes(range(256)), [], "standard input is not UTF-8 text: byte 128 is 0x80"),
        (b"x", ["--template", "{}/none"], "No such file"),
        (b"x", ["--template", "{}/garbage"], "/garbage is not UTF-8 text: byte 0 is 0xff"),
        (b"x", ["--template", "{}/broken"], "chat_template: "),
        (b"x", ["--json-schema", "{}/broken"], "the JSON schema is no JSON"),
        (b"x", ["--grammar", "{}/garbage"], "/garbage is not UTF-8 text: byte 0 is 0xff"),
        (b"x", ["--regex", "("], "refused"),
        (b"x", ["--regex", "a", "--grammar", "{}/broken"], "wanted one of --json-schema, --regex and --grammar"),
        (b"x", ["--device", "nosuch"], "device 'nosuch' is unknown"),
        (b"x", ["--top-p", "2"], "top_p is 2.0, wanted in (0, 1]"),
        (b"x" * 100_000, ["--ctx", "512"], "n_ctx=512"),
        (b"x", ["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_wrong_input_is_one_line(model_file, capsys, monkeypatch, tmp_path, data, options, wanted):
    (tmp_path / "garbage").write_bytes(b"\xff\x00")
    (tmp_path / "broken").write_text("{% for")
    pipe(monkeypatch, data)
    assert cli.main(["chat", str(model_file), *(option.format(tmp_path) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert wanted in err


def test_a_file_without_a_template_is_one_line(oracle, capsys, monkeypatch):
    pipe(monkeypatch, b"x")
    assert cli.main(["chat", str(oracle / "tiny/llama.gguf")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.fixture
def talk(oracle, load):
    """Lets a person type texts into a chat whose replies are said beforehand: the chat, and what the terminal shows
    after each. A text may be an exception, as Ctrl-C is."""
    chats = []

    def talk(typed: list, replies: list[str] = (), chat=None) -> tuple[dl.Chat, list[str]]:
        if chat is None:
            chat = chat_models.create_chat(oracle, load("qwen3"), QWEN3)
            chats.append(chat)
        replies = iter(replies)
        out = Terminal()
        shown: list[str] = []
        texts = iter(typed)

        def read(prompt: str) -> str:
            shown.append(out.getvalue().replace("\x1b[0m\x1b[2m", ""))  # between two pieces
            out.seek(0)
            out.truncate()
            out.write(prompt)
            if (text := next(texts, EOFError())) and isinstance(text, BaseException):
                raise text
            return text

        respond = chat.respond

        def scripted(*args):
            chat_models.script(chat, chat_models.encode(chat, next(replies)), "<|im_end|>")
            return respond(*args)

        chat.respond = scripted
        Dialogue(chat, dl.SamplingParams(), 200, Screen(out, out), read).run()
        chat.respond = respond
        return chat, shown[1:]

    yield talk
    for chat in chats:
        chat.close()


def roles(chat) -> str:
    return " ".join(message["role"] for message in chat.messages)


def test_reasoning_is_dimmed(talk):
    chat, shown = talk(["2 + 2?"], ["<think>\nTwo twos.\n</think>\n\nIt is 4."])
    assert shown == ["> \x1b[2mTwo twos.\x1b[0m\n\nIt is 4.\n"]
    assert chat.reply.reasoning == "Two twos."


def test_the_conversation_goes_on(talk):
    chat, shown = talk(
        ["/system Be brief.", "/system", "//help me", "", "   ", "Again", "/undo", "/retry", "/stats", "/system off"],
        ["With what?", "What?", "With that?"],
    )
    assert [text.removeprefix("> ") for text in shown[:-2]] == [
        "", "Be brief.\n", "With what?\n", "", "", "What?\n", "", "With that?\n",
    ]  # fmt: skip
    assert [message["content"] for message in chat.messages] == ["/help me", "With that?"]
    assert "ended by stop" in shown[-2]
    assert "tokens were held" in shown[-2]


def test_reasoning_can_be_turned_off(talk):
    chat, shown = talk(["/think off", "/think", "/think high", "/think on", "/think off"])
    assert chat.thinking is False
    assert [text.removeprefix("> ") for text in shown[:2]] == [
        "",
        "error: wanted /think on, off, auto, or an effort such as low\n",
    ]
    assert shown[2].startswith("> error: ")


def test_tools_are_called_and_answered(talk, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    calls = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>'
    chat, shown = talk(
        [f"/tools {tools}", "/tools", "Call them", "one", "/result /two", "/result three", "Thanks"],
        [calls, "Both.", "Yes."],
    )
    assert shown[1] == "> f\ng\n"
    assert shown[2] == '> \x1b[2mf {"a": 1}\x1b[0m\n\x1b[2mg {}\x1b[0m\n'
    assert shown[3] == "result of f> "
    assert shown[4] == "result of g> Both.\n"
    assert shown[5] == "> error: no call waits for a result\n"
    results = [(message["name"], message["content"]) for message in chat.messages if message["role"] == "tool"]
    assert results == [("f", "one"), ("g", "/two")]
    assert roles(chat) == "user assistant tool tool assistant user assistant"
    assert talk(["/tools off"], chat=chat)[0].tools == []


def test_an_open_call_can_be_left(talk, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps({"tools": TOOLS}))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    chat, shown = talk([f"/tools {tools}", "Call it", "/undo", "Never mind"], [call, "Good."])
    assert shown[-1] == "> Good.\n"
    assert roles(chat) == "user assistant"


def test_a_chat_is_saved_and_loaded(talk, tmp_path):
    path = tmp_path / "a chat.json"
    talk(["Hello", f"/save {path}"], ["Hi."])
    chat, shown = talk([f"/load {path}", "And?"], ["No more."])
    assert [message["content"] for message in chat.messages] == ["Hello", "Hi.", "And?", "No more."]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("/nosuch", "there is no command /nosuch; /help lists them"),
        ("/", "there is no command /;"),
        ("/\x1b[31m", "there is no command /\\x1b[31m;"),
        ("/tools {}/none.json", "No such file"),
        ("/tools {}/garbage", "no JSON: "),
        ("/tools {}/broken.json", "no JSON: "),
        ("/tools {}/deep.json", "no JSON: "),
        ("/tools {}/other.json", "wanted a list of tools"),
        ("/tools {}/nameless.json", "name"),
        ("/save {}", "Is a directory"),
        ("/save", "wanted the name of a file"),
        ("/load {}/garbage", "no chat can be read"),
        ("/load {}/other.json", "is missing or of another version"),
        ("/undo", "no message of the user"),
        ("/retry", "no message of the user"),
        ("/result x", "no call waits for a result"),
        ("/stats", "nothing was answered yet"),
        ("x" * 100_000, "n_ctx=2048"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "can't decode byte 0xff"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_goes_wrong_is_told_and_the_chat_goes_on(talk, tmp_path, typed, wanted):
    (tmp_path / "garbage").write_bytes(bytes(range(256)))
    (tmp_path / "broken.json").write_text('[{"name": ')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "other.json").write_text('{"name": "f"}')
    (tmp_path / "nameless.json").write_text('[{"function": {"parameters": {}}}]')
    typed = typed.format(tmp_path) if isinstance(typed, str) else typed
    chat, shown = talk([typed, "Hello"], ["Hi.", "Hi."])
    assert shown[0].startswith("> error: ")
    assert shown[0].count("\n") == 1
    assert "\x1b" not in shown[0]
    assert wanted in shown[0]
    assert shown[1] == "> Hi.\n"
    assert roles(chat) == "user assistant"


def test_help_names_every_command(talk):
    _, (shown,) = talk(["/help"])
    for name in ("system", "think", "tools", "result", "retry", "undo", "save", "load", "stats", "help", "quit"):
        assert f"/{name} " in shown
    assert talk(["/quit", "Hello"])[1] == []


def test_ctrl_c_keeps_the_chat(talk):
    """While a prompt is typed; and while a reply comes, of which the part that came stays."""
    chat, shown = talk([KeyboardInterrupt(), "Hello"], ["Hi."])
    assert shown == ["> \n", "> Hi.\n"]

    respond = chat.respond

    def interrupted(*args):
        for i, piece in enumerate(respond(*args)):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield piece

    chat.respond = interrupted
    text = "A long story, which is told again and again."
    chat, shown = talk(["Tell me", "And?"], [text, "So."], chat=chat)
    told = shown[0].removeprefix("> ").removesuffix("\n(stopped)\n")
    assert told
    assert text.startswith(told)
    assert text != told
    assert chat.messages[-3]["content"] == told
    assert shown[1] == "> So.\n"


def test_ctrl_c_while_the_prompt_is_read_takes_the_message_back(talk, monkeypatch):
    chat, _ = talk(["Hello"], ["Hi."])
    with monkeypatch.context() as patch:
        patch.setattr(chat.session, "generate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        assert talk(["A long text"], ["none"], chat=chat)[1] == ["> (stopped)\n"]
    assert roles(chat) == "user assistant"


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_a_terminal_without_styles_gets_none(monkeypatch, variable):
    monkeypatch.setenv(variable, "dumb")
    out = Terminal()
    show(Screen(out, out))
    assert out.getvalue() == "Hm\\x1b[0m\n\nYes\n\ta\\x1b[31m\nf {}\ng {}\n"


def test_a_pipe_gets_content_as_it_is(monkeypatch):
    out, aside = io.StringIO(), io.StringIO()
    show(Screen(out, aside))
    assert out.getvalue() == "Yes\n\ta\x1b[31m\n"
    assert aside.getvalue() == "Hm\\x1b[0m\n\nf {}\ng {}\n"


def show(screen: Screen) -> None:
    pieces = [ChatPiece("reasoning", "H"), ChatPiece("reasoning", "m\x1b[0m"), ChatPiece("content", "Yes\n\ta\x1b[31m")]
    for name in ("f", "g"):
        pieces += [ChatPiece("call", name, CallDelta(0, name, "")), ChatPiece("call", "{}", CallDelta(0, None, "{}"))]
    for piece in pieces:
        screen.write(piece)
    screen.finish()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "a", "", '  b"""'], "\na\n\n  b"),
        (['"""a"""'], "a"),
        (['"""a \\', 'b"""'], "a \\\nb"),
    ],
)
def test_messages_of_several_lines(lines, message):
    left = iter(lines)
    assert read_message("> ", lambda prompt: next(left)) == message
    assert next(left, None) is None


class Person:
    """Someone at a terminal, in which a chat runs."""

    def __init__(self, *args: str, **environment: str):
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, args)],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL,  # where a spinner would turn
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self._seen = ""

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def sees(self, text: str) -> None:
        """Waits until the terminal shows this text."""
        while text not in self._seen:
            self._look(text)
        self._seen = self._seen.partition(text)[2]

    def sees_more(self, n: int) -> None:
        """Waits until the terminal shows n further characters."""
        while len(self._seen) < n:
            self._look(f"{n} characters")
        self._seen = ""

    def _look(self, wanted: str) -> None:
        ready, _, _ = select.select([self._master], [], [], 60)
        assert ready, f"{wanted!r} does not come, but {self._seen!r}"
        self._seen += os.read(self._master, 1 << 16).decode("utf-8", "replace")

    def leaves(self) -> int:
        code = self.process.wait(60)
        os.close(self._master)
        return code


def take_terminal() -> None:
    """The terminal is the process's own, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_person_at_a_terminal(model_file, tmp_path):
    person = Person(model_file, "--ctx", "100000", DASLLAMA_HOME=str(tmp_path))
    try:
        person.sees("/help lists the commands")
        person.sees("> ")
        person.types("/system Be brief.\n")
        person.sees("> ")
        person.types("/system\n")
        person.sees("Be brief.\r\n")
        person.sees("> ")
        person.types("\x1b[A\x1b[A\x7f!\n")  # up, up, and the full stop becomes something else
        person.sees("!\r\n> ")
        person.types("/system\n")
        person.sees("Be brief!\r\n> ")
        person.types("Tell a story\n")
        person.sees("Tell a story\r\n")
        person.sees_more(100)  # of an answer that does not end
        person.types("\x03")
        person.sees("(stopped)\r\n> ")
        person.types("/stats\n")
        person.sees("ended by interrupt")
        person.sees("> ")
        person.types("\x04")
        assert person.leaves() == 0
    finally:
        person.process.kill()
    history = tmp_path / "chat_history"
    assert b"/system Be brief!" in history.read_bytes().splitlines()
    assert history.stat().st_mode & 0o077 == 0
