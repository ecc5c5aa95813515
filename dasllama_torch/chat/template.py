"""A file's chat template: a conversation to the text, or the segments, of a prompt.

    template = ChatTemplate.from_metadata(model.metadata, model.tokenizer)
    template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)     # text
    model.tokenizer.encode_segments(template.segments(messages, add_generation_prompt=True))  # ids

Templates are Jinja, and render exactly as in transformers; how they are kept from harm, worker.py says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import TemplateError
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

from . import families
from .escape import Escape, Segment
from .messages import map_text, normalize, plain
from .sandbox import SANDBOX

if TYPE_CHECKING:
    from dasllama_torch.gguf.metadata import Metadata

KEY = "tokenizer.chat_template"
# What templates call the switch for reasoning.
SWITCHES = ("enable_thinking", "thinking")


class ChatTemplate:
    """source: Jinja. special_tokens: what templates call tokens ("bos_token", "eos_token", ...) -> their names.
    special_types: name -> type of the special tokens that text of people must not become. tools_source: the template
    for conversations with tools where the file has one of its own. origin: where the source comes from, for errors.
    clock: the time for templates that write the date.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        special_types: Mapping[str, TokenType] | None = None,
        tools_source: str | None = None,
        origin: str = "chat_template",
        clock: Callable[[], datetime] = datetime.now,
    ):
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.special_types = dict(special_types or {})
        self.tools_source = tools_source
        self.origin = origin
        self.clock = clock

    @classmethod
    def from_metadata(
        cls,
        md: "Metadata",
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> "ChatTemplate":
        """The template of a file: `chat_template` where it is given, else the file's own, else ours for the family that
        its architecture and vocabulary tell. TemplateError if there is none: no other family's is taken instead.
        """
        named = {f"{name}_token": getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
        tokens = {name: tokenizer.piece(token_id) for name, token_id in named.items() if token_id is not None}
        types = tokenizer.special_types()
        shared = dict(special_tokens=tokens, special_types=types, clock=clock)
        if chat_template is not None:
            return cls(chat_template, **shared)
        if source := md.str(KEY, ""):
            return cls(source, tools_source=md.str(f"{KEY}.tool_use", None), origin=KEY, **shared)
        family = families.find(md.architecture, types)
        if family is None:
            raise TemplateError(
                f"{KEY} is missing, and architecture {md.architecture!r} with this vocabulary is no family whose "
                "template is known; wanted chat_template=, the Jinja source of the model's own"
            )
        return cls(family.source, origin=f"template of {family.name}", **shared)

    def __repr__(self) -> str:
        return f"ChatTemplate({self.origin}, {len(self.source)} characters)"

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text, exactly that of transformers' `apply_chat_template(tokenize=False)`.

        messages, tools: in Hugging Face's form, see messages.py. add_generation_prompt: ends with what an assistant's
        turn begins with. variables: what else the template takes (`enable_thinking`, `date_string`, ...). As there, a
        message's `content` of None counts as absent; for templates that need one, such as Qwen3's, give "".
        TemplateError if the template is broken, was stopped or refuses the conversation; it names the message, where
        that is known, and never falls back on another template.
        """
        return self._run(normalize(messages), _plain_tools(tools), add_generation_prompt, variables)

    def segments(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        *,
        escape_special: bool | Sequence[bool] = True,
        keep: Iterable[str] = (),
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> list[Segment]:
        """As `render`, but in segments for `Tokenizer.encode_segments`, so that only the template's own text becomes
        control tokens.

        escape_special: whether the names of special tokens in a message stay text, for all messages or for each. Tools
        are treated as most carefully treated of them. keep: names that stay tokens in an assistant's message, such as
        the tags around its reasoning, which templates look for.
        """
        normal = normalize(messages)
        each = [escape_special] * len(normal) if isinstance(escape_special, bool) else list(escape_special)
        if len(each) != len(normal):
            raise ValueError(f"escape_special has {len(each)} values for {len(normal)} messages")
        hidden = [
            map_text(message, lambda text, message=message: self._hidden(text, message, keep)) if escaped else message
            for message, escaped in zip(normal, each, strict=True)
        ]
        declared = _plain_tools(tools)
        if any(each):
            declared = map_text(declared, self._escape.hide)
        return self._escape.segments(self._run(hidden, declared, add_generation_prompt, variables))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        return frozenset(self._facts["variables"])

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The variables that turn reasoning on and off; none where the model always or never reasons."""
        return tuple(name for name in SWITCHES if name in self.variables)

    def _hidden(self, text: str, message: dict[str, Any], keep: Iterable[str]) -> str:
        return self._escape.hide(text, keep if message.get("role") == "assistant" else ())

    @cached_property
    def _escape(self) -> Escape:
        """Control tokens, and what else the template writes or reads as a token, such as "<tool_call>". Other user
        defined tokens are ordinary text, such as runs of spaces and HTML tags."""
        texts = "\0".join(self._facts["texts"])
        return Escape(
            name
            for name, kind in self.special_types.items()
            if kind is not TokenType.USER_DEFINED or (name in texts and not name.isspace())
        )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return self._ask([], template=self.source)

    def _run(
        self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        context = {
            **self.special_tokens,
            "documents": None,
            **plain(variables),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.tools_source if tools and self.tools_source else self.source
        return self._ask(messages, template=source, context=context, now=self.clock().isoformat())["text"]

    def _ask(self, messages: list[dict], **request: Any) -> dict[str, Any]:
        try:
            reply = SANDBOX.ask(**request)
        except TemplateError as e:
            raise TemplateError(f"{self.origin}: {e}") from None
        if "error" not in reply:
            return reply
        index = reply["index"]
        if index is None:
            raise TemplateError(f"{self.origin}: {reply['error']}")
        role = str(messages[index].get("role"))
        raise TemplateError(f"{self.origin}: message {index} ({role}): {reply['error']}", index=index, role=role)


def _plain_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[dict] | None:
    return None if tools is None else [plain(tool) for tool in tools]
