"""What a reply is held to: a constraint of the caller's or a choice of tools, and where in the reply that begins.

A constraint is about the content, so a model that reasons may do so before it: what the reasoning looks like goes into
the grammar, and the model chooses where it ends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .thinking import Harmony, NoReasoning, ReasoningFormat, Tagged
from .tools import ToolFormat, choice_grammar

if TYPE_CHECKING:
    from dasllama_torch.constraints import Constraint

AUTO, NONE, REQUIRED = "auto", "none", "required"
_TEXT = "/(?s:.*)/"  # has no special token in it
_LINES = r"/\n{0,2}/"


def constraint_of_choice(
    choice: str, form: ToolFormat | None, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int]
) -> "Constraint | None":
    """A reply of calls, for "required" or the name of a tool. ValueError for a choice that is none."""
    if choice in (AUTO, NONE):
        return None
    if form is None or not tools:
        raise ValueError(f"tool_choice is {choice!r}, and no tools are declared: wanted set_tools first")
    from dasllama_torch.constraints import Constraint

    return Constraint.lark(choice_grammar(form, tools, choice, special_ids))


def behind_reasoning(
    constraint: "Constraint", reasoning: ReasoningFormat, special_ids: Mapping[str, int], *, inside: bool, calls: bool
) -> "Constraint":
    """The constraint for a whole reply of a model that may reason before it. inside: the reply begins within the
    reasoning. calls: the constraint is of tool calls, which have headers of their own."""
    before = _before(reasoning, special_ids, inside, calls)
    return replace(constraint, before=before) if before else constraint


def _before(reasoning: ReasoningFormat, special_ids: Mapping[str, int], inside: bool, calls: bool) -> str:
    """What may come before the content, in llguidance's Lark."""

    def mark(name: str) -> str:
        return f"<[{special_ids[name]}]>"

    match reasoning:
        case NoReasoning():
            return ""
        case Harmony():
            thought = f'{mark("<|channel|>")} "analysis" {mark("<|message|>")} {_TEXT} {mark("<|end|>")}'
            if calls:
                return f"({thought})?"
            final = f'{mark("<|channel|>")} "final" {mark("<|message|>")}'
            return f'({thought} {mark("<|start|>")} "assistant")? {final}'
        case Tagged(open=begin, tokens=(first, last)):
            word = begin.removeprefix(first)
            opened = f"{_LINES} {mark(first)} {json.dumps(word) if word else ''}"
            closed = f"{_TEXT} {mark(last)} {_LINES}"
            return closed if inside else f"({opened} {closed})?"
