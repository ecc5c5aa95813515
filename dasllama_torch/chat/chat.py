"""A conversation with a model: messages in, replies out, and nothing of it evaluated twice.

    chat = Chat(template, tokenizer, architecture, session)           # create_chat(model) makes one
    chat.add_user("What is 2 + 2?")
    for piece in chat.respond(params):
        print(piece, end="", flush=True)                              # piece.kind: reasoning, content or call
    chat.reply.content, chat.messages, chat.stats.prefilled_tokens

The whole conversation is rendered for each turn, as its template may write the past anew: leave out old reasoning, say,
or move a system message. The session goes back to where the prompt departs from what it holds, and evaluates what
follows. Where the past is as it was, that is the new turn only: the end of the last reply, the new messages and the
beginning of the next reply. Replies stay in the tokens that were sampled (history.py).
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import DasllamaError, TemplateError, UnsupportedModel
from dasllama_torch.text.tokenizer import Tokenizer

from . import chat_file
from .caps import ChatCaps
from .choice import AUTO, NONE, behind_reasoning, constraint_of_choice, without_calls
from .closing import Closing
from .history import Message, Rendered, Sampled, digest, encode
from .messages import decode_arguments, normalize
from .reply import ChatPiece, ChatReply, ReplyReader, TokenText
from .template import ChatTemplate
from .thinking import NoReasoning, ReasoningFormat, Reply, ThinkStream
from .thinking import find as find_reasoning
from .tools import ToolCall, ToolFormat, ToolReply, conversation, detect_format, inline_tools, parse_calls, writes_tools
from .tools.calls import decoded, dumps, function_of
from .tools.schema import declared

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session, Stats
    from dasllama_torch.sampling import SamplingParams

_EFFORT = "reasoning_effort"  # what templates call it
# What a session says of its end -> what a reply does.
_FINISH = {"eog": "stop", "stop": "stop", "constraint": "stop", "length": "length", "context": "context"}


class Chat:
    """messages: the conversation, a list of messages in Hugging Face's form, which may be changed at will; plain dicts
    too may stand in it. tools: those declared. thinking: what `set_thinking` was told. reply: the last one of `respond`
    (a `ChatReply`), None before and while one begins. session: what the model's replies are evaluated in; None in a
    renderer, which only renders. template, tokenizer; reasoning, tool_format: how the model writes both, tool_format
    None where it has no calls.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        architecture: str,
        session: "Session | None" = None,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable] = (),
        thinking: bool | str | None = None,
    ):
        self.template, self.tokenizer, self.architecture, self.session = template, tokenizer, architecture, session
        self.messages: list[Mapping[str, Any]] = []
        self.tools: list[Mapping[str, Any]] = []
        self.thinking: bool | str | None = None
        self.reply: ChatReply | None = None
        self._latest: object | None = None  # the reply that began last
        self._inside = False  # whether the prompt that was rendered last ends within the reasoning
        self._variables: dict[str, Any] = {}  # for the template
        self.set_tools(tools)
        self.set_thinking(thinking)
        self.set_system(system)

    # What the model can do

    @cached_property
    def reasoning(self) -> ReasoningFormat:
        return find_reasoning(self.template.special_types, self._source) or NoReasoning()

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        try:
            return self._detect_format()
        except UnsupportedModel:
            return None

    def caps(self) -> ChatCaps:
        return self._caps

    # The conversation

    def set_system(self, text: str | None, escape_special: bool = True) -> None:
        """Begin the conversation with a system message, in place of one that there is; None: with none. TemplateError
        where the template refuses one, or leaves it out."""
        given = [] if text is None else [Message({"role": "system", "content": text}, escape_special=escape_special)]
        if given and not self._caps.system:
            self.template.render([*given, {"role": "user", "content": "Hello"}])
            origin = self.template.origin
            raise TemplateError(f"{origin}: message 0 (system) does not reach the prompt", index=0, role="system")
        there = bool(self.messages) and self.messages[0].get("role") == "system"
        self.messages[: int(there)] = given

    def add_user(self, text: str, escape_special: bool = True) -> None:
        """The next message of the user. escape_special: the names of special tokens in it stay text; False: they become
        those tokens, as in transformers. Raises TypeError for what is no text."""
        if not isinstance(text, str):
            raise TypeError(f"the message is {type(text).__name__}, wanted text")
        self.messages.append(Message({"role": "user", "content": text}, escape_special=escape_special))

    def add_assistant(
        self,
        text: str,
        calls: Sequence[ToolCall | Mapping[str, Any]] = (),
        *,
        reasoning: str = "",
        escape_special: bool = True,
    ) -> None:
        """A reply that is known, in place of one of the model. calls: of `ChatReply`, or {"name", "arguments"}; it is
        evaluated with the next turn."""
        calls = [call if isinstance(call, ToolCall) else _call(call) for call in calls]
        message = conversation.render_assistant_calls(self.messages, text, calls)[-1]
        if reasoning:
            message = {**message, "reasoning_content": reasoning}
        self.messages.append(Message(message, escape_special=escape_special))

    def add_tool_results(self, results: Sequence[Any], names: Sequence[str] | None = None) -> None:
        """What the calls of the last reply have given, in their order, or in that of `names`; what is not text becomes
        JSON. `respond` goes on from there. ValueError for a result without a call."""
        texts = [result if isinstance(result, str) else dumps(result) for result in results]
        added = conversation.add_tool_results(self.messages, texts, names)[len(self.messages) :]
        self.messages += map(Message, added)

    def undo(self) -> None:
        """Take the last turn back: the last message of the user, and all that followed."""
        users = [i for i, message in enumerate(self.messages) if message.get("role") == "user"]
        if not users:
            raise ValueError("there is no message of the user to take back")
        del self.messages[users[-1] :]

    def set_tools(self, tools: Sequence[Mapping[str, Any] | Callable]) -> None:
        """Declare the tools of the conversation: in OpenAI's form, or Python functions with type hints and a docstring
        (tools/schema.py). They stand at its beginning, so a change evaluates it anew. UnsupportedModel where the model
        has no calls, or its template cannot write them."""
        found = [declared(tool) for tool in tools]
        if found:
            form = self._detect_format()
            if not self._writes_tools:
                inline_tools([], found, form)  # or it says that it cannot
        self.tools = found

    def set_thinking(self, thinking: bool | str | None) -> None:
        """Turn reasoning on or off, or on with an effort ("low", "medium", "high") where the model knows any; None: as
        its template has it. UnsupportedModel for what the model cannot do: see `caps`."""
        variables: dict[str, Any] = {}
        if thinking is not None:
            if isinstance(self.reasoning, NoReasoning):
                raise UnsupportedModel(f"{self.template.origin}: the model does not reason, or not by known marks")
            if isinstance(thinking, str):
                if _EFFORT not in self.template.variables:
                    raise UnsupportedModel(f"{self.template.origin}: there is no {_EFFORT}, wanted True or False")
                variables[_EFFORT] = thinking
            elif not thinking and not self.template.switches:
                raise UnsupportedModel(f"{self.template.origin}: reasoning cannot be turned off")
            variables |= dict.fromkeys(self.template.switches, thinking is not False)
        self.thinking, self._variables = thinking, variables

    # Replies

    def respond(
        self, params: "SamplingParams | None" = None, max_tokens: int | None = None, *, tool_choice: str = AUTO
    ) -> Iterator[ChatPiece]:
        """The model's reply to the last message, in pieces as they come. params, max_tokens: as of `Session.generate`;
        a reply also ends at `effective_stop_ids`, and stop strings are looked for in all of its text. A constraint is
        about the content: a model that reasons may do so before it.

        tool_choice: "auto"; "none", no call can begin, and what looks like one is content; "required", the reply is
        calls; or the name of the tool that is called. ValueError for another, or for the last two beside a constraint
        in the params, which with "none" says alone what may come.

        Afterwards `reply` holds it whole, and it stands in `messages`: content, reasoning and calls apart. A caller may
        stop at any point; what was sampled up to there is then the reply. Where nothing was, as when the prompt does
        not fit (ContextFull) or the template refuses the conversation (TemplateError), the conversation stays as it
        was. `stats` tells what of the prompt was evaluated, and where it departs from what was held. The last token of
        a reply that was cut short is evaluated with the next turn.
        """
        self.reply = None
        self._latest = this = object()
        session = self._need_session()
        prompt = self._turn()
        params = self._held_to(params, tool_choice)
        # Layers that forget can go back to before the reply, for a template that will write it in another way.
        checkpoint = None if session.rewinds else self._n_shared(prompt)
        form = self.tool_format if self.tools and tool_choice != NONE else None
        reader = ReplyReader(self.reasoning, form, self.tools, self._inside)
        text = TokenText(self.tokenizer, prompt.ids, params.stop)
        finish = "caller"
        tokens = session.generate(prompt.ids, replace(params, stop=()), max_tokens, whole=True, checkpoint=checkpoint)
        try:
            for token, _ in tokens:
                if token is not None:  # the end of a text cut within a character
                    yield from reader.feed(text.feed(token))
                if self._latest is not this:
                    raise DasllamaError("another reply has begun: wanted each loop over `respond` left before the next")
                if text.stopped:
                    finish = "stop"
                    break
            else:
                finish = _FINISH[session.stats.stop]
        finally:
            tokens.close()
            rest = reader.feed(text.finish()) + reader.finish()
            if self._latest is this and (text.ids or finish != "caller"):
                self._take(reader.reply(text.ids, finish), prompt, text.kept)
        yield from rest

    def _held_to(self, params: "SamplingParams | None", tool_choice: str) -> "SamplingParams":
        """The params of a reply to the prompt that was rendered last."""
        from dasllama_torch.sampling import SamplingParams

        params = params or SamplingParams()
        special_ids = self.tokenizer.special_ids()
        if tool_choice == NONE and self.tools and self.tool_format and not params.constraint:
            params = without_calls(params, self.tool_format, special_ids)
        constraint = constraint_of_choice(tool_choice, self.tool_format, self.tools, special_ids)
        if constraint and params.constraint:
            raise ValueError(f"tool_choice is {tool_choice!r}, and the params have a constraint: wanted one of both")
        calls, constraint = constraint is not None, constraint or params.constraint
        if constraint and self.thinking is not False:
            constraint = behind_reasoning(constraint, self.reasoning, special_ids, inside=self._inside, calls=calls)
        stop_ids = self.effective_stop_ids() | set(params.stop_ids)
        return replace(params, constraint=constraint, stop_ids=stop_ids)

    def _take(self, reply: ChatReply, prompt: Rendered, kept: tuple[tuple[int, ...], str]) -> None:
        message = conversation.render_assistant_calls(self.messages, reply.content, reply.calls)[-1]
        if reply.reasoning:
            message = {**message, "reasoning_content": reply.reasoning}
        sampled = Sampled(
            ids=kept[0],
            text=kept[1],
            start=len(prompt.text),
            digest=digest(prompt.text),
            message=copy.deepcopy(message),
        )
        self.messages.append(Message(message, sampled=sampled))
        self.reply = reply

    def effective_stop_ids(self) -> frozenset[int]:
        """The tokens that end the next reply: those that end a generation by the vocabulary, the one with which the
        template ends an assistant's turn, and while reasoning is off what would begin it. Marks within a reply, such as
        gpt-oss's <|end|>, are none."""
        ends = self.tokenizer.eog_ids | ({self._closing.end} - {None} - self._ids(self.reasoning.tokens))
        return ends | self._ids(self.reasoning.stop_when_off if self.thinking is False else ())

    @property
    def stats(self) -> "Stats":
        """Of the session: the last reply's."""
        return self._need_session().stats

    # Prompts, without the model

    def render_turn(self) -> list[int]:
        """The ids of the next prompt: the whole conversation, and the beginning of a reply. What a session does not
        hold of it, `Session.prefill` evaluates."""
        return self._turn().ids

    def render_assistant(self, text: str) -> list[int]:
        """`add_assistant`, and the ids of the conversation up to the end of that turn, as the template writes one that
        ends there."""
        self.add_assistant(text)
        return self._render(generation=False).ids

    def render_assistant_calls(self, text: str, calls: Sequence[ToolCall | Mapping[str, Any]]) -> list[int]:
        """`render_assistant` of a reply with calls."""
        self.add_assistant(text, calls)
        return self._render(generation=False).ids

    def render_close(self) -> list[int]:
        """The ids that end an assistant's turn in every prompt; `respond` leaves them to the next turn."""
        return list(self._closing.ids)

    def render_turn_image(self, *_: Any) -> list[int]:
        """UnsupportedModel: there are no towers for pictures."""
        raise UnsupportedModel(f"architecture {self.architecture!r}: pictures need a tower, and none is implemented")

    def render_turn_audio(self, *_: Any) -> list[int]:
        """UnsupportedModel: there are no towers for sound."""
        raise UnsupportedModel(f"architecture {self.architecture!r}: sound needs a tower, and none is implemented")

    # Replies that come from elsewhere

    def make_think_stream(self) -> ThinkStream:
        """What tells reasoning from content in the next reply as it comes: `feed`, `finish`, or `drain` for a whole
        one. Where a reply is pending it begins as that prompt ends."""
        if self._is_pending():
            self._turn()
        return self.reasoning.stream(self._inside)

    def split_reasoning(self, reply: str) -> Reply:
        """Reasoning and content of a whole reply to the prompt that was rendered last."""
        return self.reasoning.split(reply, self._inside)

    def parse_calls(self, reply: str) -> ChatReply:
        """`split_reasoning`, and the calls in the content, whether tools are declared or not."""
        reasoning, content = self.split_reasoning(reply)
        found = parse_calls(content, self.tool_format, self.tools) if self.tool_format else ToolReply(content, ())
        return ChatReply(content=found.content, reasoning=reasoning, calls=found.calls, raw=reply)

    # The whole of it

    def fork(self) -> "Chat":
        """A chat that stands where this one does, with a fork of its session, whatever is done to either."""
        fork = copy.copy(self)
        fork.messages, fork.tools = copy.deepcopy(self.messages), copy.deepcopy(self.tools)
        fork.session = self.session and self.session.fork()
        return fork

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation to a file: JSON of messages, tools and `thinking`, and the ids of replies. Raises
        SessionFileError where it cannot be written."""
        chat_file.save(self, path)

    def load(self, path: str | os.PathLike) -> None:
        """Go on with a conversation that `save` wrote, in place of this one; the next turn evaluates it. The ids of
        replies stay where the vocabulary gives them the same text. SessionFileError for a file that is none, or that
        cannot be read; UnsupportedModel for tools or reasoning that this model has not."""
        chat_file.load(self, path)

    def close(self) -> None:
        """Close the session."""
        if self.session:
            self.session.close()

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # How prompts come about

    def _turn(self) -> Rendered:
        if not self._is_pending():
            raise ValueError("there is nothing to reply to: wanted add_user, or add_tool_results, first")
        prompt = self._render(generation=True)
        self._inside = self.reasoning.opened_by(prompt.text)
        return prompt

    def _is_pending(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("role") in ("user", "tool")

    def _render(self, *, generation: bool) -> Rendered:
        escapes = [getattr(message, "escape_special", True) for message in self.messages]
        messages = decode_arguments(normalize(self.messages))
        for message in messages:
            if message.get("role") == "assistant":
                message.setdefault("content", "")  # templates need one, beside calls too
        declared = self.tools or None
        if not self._writes_tools and (declared or any(message.get("role") == "tool" for message in messages)):
            marked = [{**message, "escape": escape} for message, escape in zip(messages, escapes, strict=True)]
            messages = inline_tools(marked, self.tools, self._detect_format())
            escapes = [message.pop("escape", True) for message in messages]
            declared = None
        segments = self.template.segments(
            messages,
            declared,
            escape_special=escapes,
            keep=self.reasoning.markers,
            add_generation_prompt=generation,
            **self._variables,
        )
        return encode(self.tokenizer, segments, self.messages)

    def _n_shared(self, prompt: Rendered) -> int:
        """The ids of a prompt before the beginning of the reply."""
        without = self._render(generation=False).ids
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt.ids, without, strict=False)))

    @cached_property
    def _source(self) -> str:
        return self.template.source + (self.template.tools_source or "")

    def _detect_format(self) -> ToolFormat:
        return detect_format(self._source, self.template.special_types, self.architecture)

    @cached_property
    def _writes_tools(self) -> bool:
        return self.tool_format is None or writes_tools(self._source, self.tool_format)

    @cached_property
    def _caps(self) -> ChatCaps:
        return ChatCaps.of(self.template)

    @cached_property
    def _closing(self) -> Closing:
        return Closing.of(self.template, self.tokenizer)

    def _ids(self, names: Sequence[str]) -> frozenset[int]:
        """Of special tokens that the vocabulary has."""
        ids = self.tokenizer.special_ids()
        return frozenset(ids[name] for name in names if name in ids)

    def _need_session(self) -> "Session":
        if self.session is None:
            raise DasllamaError("a renderer has no session to reply in: wanted create_chat(model)")
        return self.session


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = function_of(call)
    arguments = decoded(function.get("arguments"))
    raw = dumps(dict(function))
    return ToolCall(function["name"], arguments if isinstance(arguments, dict) else None, raw, call.get("id"))
