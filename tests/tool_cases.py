"""Templates that write tool calls, and what a model's reply is in what they render."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

_REASONING = re.compile(r"\A\s*(<think>.*?)?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """form: the tool format. begin, end: around the assistant's turn. content: whether calls keep the content. several:
    whether a turn may have several calls.
    """

    template: str
    form: str
    begin: str
    end: str
    content: bool = True
    several: bool = True

    def reply(self, oracle: Path, content: str, calls: list[dict]) -> str:
        """What the model must have written so that its turn is rendered like this."""
        calls = [{"type": "function", "id": f"call{i:05d}", "function": call} for i, call in enumerate(calls)]
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        text = render(oracle, self.template, [{"role": "user", "content": "Hello"}, turn], [])
        assert text.endswith(self.end)
        return _REASONING.sub("", text[text.index(self.begin) + len(self.begin) : len(text) - len(self.end)])


@cache
def source(oracle: Path, template: str) -> str:
    return (oracle / "templates" / f"{template}.jinja").read_text("utf-8")


def render(oracle: Path, template: str, messages: list[dict], tools: list[dict]) -> str:
    """As transformers renders it."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_jinja_template([messages], tools=tools, chat_template=source(oracle, template), **tokens)[0][0]


CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")
LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
HERMES_2 = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
CASES = [
    Case("Qwen-Qwen2.5-7B-Instruct", "hermes", *CHATML),
    Case("Qwen-Qwen3-0.6B", "hermes", *CHATML),
    Case(HERMES_2, "hermes", *CHATML, content=False),
    Case("Qwen3-Coder", "qwen3-coder", *CHATML),
    Case("Qwen3.5-4B", "qwen3-coder", *CHATML),
    Case("openai-gpt-oss-120b", "harmony", "<|start|>assistant", "<|call|>", content=False, several=False),
    Case("google-gemma-4-31B-it", "gemma4", "<|turn>model\n", "<|tool_response>"),
    Case("google-gemma-4-31B-it-interleaved", "gemma4", "<|turn>model\n", "<turn|>\n"),
    Case("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "[/INST]", "</s>", content=False),
    Case("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "[/INST]", "</s>", content=False),
    Case("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "[/INST]", "</s>"),
    Case("unsloth-mistral-Devstral-Small-2507", "mistral", "[/INST]", "</s>"),
    Case("meta-llama-Llama-3.1-8B-Instruct", "llama-json", *LLAMA, content=False, several=False),
    Case("meta-llama-Llama-3.2-3B-Instruct", "llama-json", *LLAMA, content=False, several=False),
    Case("GLM-4.6", "glm", "<|assistant|>", ""),
    Case("GLM-4.7-Flash", "glm", "<|assistant|>", ""),
]
