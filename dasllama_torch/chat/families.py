"""Templates for files that carry none, of families that the architecture and the vocabulary tell for certain.

They write plain conversations as the publishers' own do; tools need the file's. A family that is not here gets none.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """architectures: those of `general.architecture`. tokens: special tokens that the vocabulary must have."""

    name: str
    architectures: frozenset[str]
    tokens: frozenset[str]
    source: str


def find(architecture: str, specials: Collection[str]) -> Family | None:
    """The family of a file whose vocabulary has these special tokens; None if it is not known."""
    for family in FAMILIES:
        if architecture in family.architectures and family.tokens <= set(specials):
            return family
    return None


_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# A system message has no turn of its own: it begins the first turn of the user.
_GEMMA = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (system if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_GEMMA4 = """\
{{- bos_token }}
{%- set thinks = enable_thinking | default(false) %}
{%- if thinks or messages[0].role == 'system' %}
    {{- '<|turn>system\\n' + ('<|think|>\\n' if thinks else '') }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content | trim }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' + ('' if thinks else '<|channel>thought\\n<channel|>') }}
{%- endif %}"""

_PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

_QWEN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_QWEN2 = (
    """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
"""
    + _QWEN
)

_QWEN3 = (
    _QWEN
    + """
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
)

_GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n' }}
{{- 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\n\\nReasoning: ' + reasoning_effort | default('medium') }}
{{- '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- for message in messages %}
    {%- if message.role in ('system', 'developer') %}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '\\n\\n<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}"""

_GLM4_MOE = """\
{{- '[gMASK]<sop>' }}
{%- set off = enable_thinking is defined and not enable_thinking %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {{- '<think></think>\\n' + message.content | trim }}
    {%- else %}
        {{- message.content + ('/nothink' if off and message.role == 'user' else '') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if off else '') }}
{%- endif %}"""


FAMILIES = (
    Family(
        name="Llama 3",
        architectures=frozenset({"llama"}),
        tokens=frozenset({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}),
        source=_LLAMA3,
    ),
    Family(
        name="Gemma 2 and 3",
        architectures=frozenset({"gemma2", "gemma3"}),
        tokens=frozenset({"<start_of_turn>", "<end_of_turn>"}),
        source=_GEMMA,
    ),
    Family(
        name="Gemma 4",
        architectures=frozenset({"gemma4"}),
        tokens=frozenset({"<|turn>", "<turn|>", "<|channel>", "<channel|>"}),
        source=_GEMMA4,
    ),
    Family(
        name="Phi-3",
        architectures=frozenset({"phi3"}),
        tokens=frozenset({"<|user|>", "<|assistant|>", "<|end|>"}),
        source=_PHI3,
    ),
    Family(
        name="Qwen 2.5",
        architectures=frozenset({"qwen2"}),
        tokens=frozenset({"<|im_start|>", "<|im_end|>"}),
        source=_QWEN2,
    ),
    Family(
        name="Qwen 3",
        architectures=frozenset({"qwen3", "qwen3moe"}),
        tokens=frozenset({"<|im_start|>", "<|im_end|>", "<think>", "</think>"}),
        source=_QWEN3,
    ),
    Family(
        name="gpt-oss",
        architectures=frozenset({"gpt-oss"}),
        tokens=frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"}),
        source=_GPT_OSS,
    ),
    Family(
        name="GLM 4.5 and 4.6",
        architectures=frozenset({"glm4moe"}),
        tokens=frozenset({"[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>", "</think>"}),
        source=_GLM4_MOE,
    ),
)
