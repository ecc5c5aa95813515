"""What a model's chat can do: found out by asking its template, since no key of the file says it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dasllama_torch.errors import TemplateError

from .template import ChatTemplate
from .thinking import find

if TYPE_CHECKING:
    from dasllama_torch.gguf.metadata import Metadata
    from dasllama_torch.text.tokenizer import Tokenizer

_SYSTEM, _TOOL = "Systemprobe", "toolprobe"
_USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCaps:
    """template: where it comes from. system: whether a system message reaches the prompt (some models refuse it).
    tools: whether declared tools do. reasoning: whether replies may hold reasoning that can be told from content.
    reasoning_off: whether it can be turned off.
    """

    template: str
    system: bool
    tools: bool
    reasoning: bool
    reasoning_off: bool

    @classmethod
    def of(cls, template: ChatTemplate) -> "ChatCaps":
        """TemplateError for a template that cannot be compiled."""
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": parameters}}
        reasons = find(template.special_types, template.source) is not None
        return cls(
            template=template.origin,
            system=_writes(template, _SYSTEM, [{"role": "system", "content": _SYSTEM}, _USER]),
            tools=_writes(template, _TOOL, [_USER], [tool]),
            reasoning=reasons,
            reasoning_off=reasons and bool(template.switches),
        )

    @classmethod
    def of_file(cls, md: "Metadata", tokenizer: "Tokenizer") -> "ChatCaps | None":
        """None if no template works: there is none, or it cannot be compiled."""
        try:
            return cls.of(ChatTemplate.from_metadata(md, tokenizer))
        except TemplateError:
            return None

    def __str__(self) -> str:
        reasoning = "reasoning" + (" that can be turned off" if self.reasoning_off else "")
        can = {"system message": self.system, "tools": self.tools, reasoning: self.reasoning}
        said = ", ".join(what for what, there in can.items() if there) or "plain turns only"
        return f"{said} ({self.template})"


def _writes(
    template: ChatTemplate, probe: str, messages: list[dict[str, Any]], tools: list[dict] | None = None
) -> bool:
    """Whether the probe stands in the prompt."""
    try:
        return probe in template.render(messages, tools, add_generation_prompt=True)
    except TemplateError:  # it refuses such a conversation
        return False
