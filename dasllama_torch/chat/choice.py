"""What a reply is held to: a constraint of the caller's or a choice of tools, and where in the reply that begins.

A constraint is about the content, so a model that reasons may do so before it: what the reasoning looks like goes into
the grammar, and the model chooses where it ends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .thinking import Harmony, NoReasoning, ReasoningFormat, Tagged
from .tools import ToolFormat, choice_grammar, no_call_grammar

if TYPE_CHECKING:
    from dasllama_torch.constraints import Constraint
    from dasllama_torch.sampling import SamplingParams

AUTO, NONE, REQUIRED = "auto", "none", "required"
_TEXT = "/(?s:.*)/"  # has no special token in it


def constraint_of_choice(
    choice: str, form: ToolFormat | None, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int]
) -> "Constraint | None":
    """A reply of calls, for "required" or the name of a tool. ValueError for a choice that is none."""
    if choice in (AUTO, NONE):
        return None
    if form is None or not tools:
        raise ValueError(f"tool_choice is {choice!r}, and no tools are declared: wanted set_tools first")
    from dasllama_torch.constraints import Constraint

    # A call begins with a token of its own, or with text, which has lost that space; it begins with none of its own.
    return Constraint(choice_grammar(form, tools, choice, special_ids), before="first?")


def without_calls(params: "SamplingParams", form: ToolFormat, special_ids: Mapping[str, int]) -> "SamplingParams":
    """The params of a reply that begins no call. A token that begins one is banned; where text does, a constraint
    leaves it out."""
    banned = {special_ids[text]: -float("inf") for text in form.openings if text in special_ids}
    constraint = None
    if texts := [text for text in form.openings if text not in special_ids]:
        from dasllama_torch.constraints import Constraint

        constraint = Constraint.lark(no_call_grammar(texts))
    return replace(params, logit_bias={**dict(params.logit_bias), **banned}, constraint=constraint)


def behind_reasoning(
    constraint: "Constraint", reasoning: ReasoningFormat, special_ids: Mapping[str, int], *, inside: bool, calls: bool
) -> "Constraint":
    """The constraint for a whole reply of a model that may reason before it. inside: the reply begins within the
    reasoning. calls: the constraint is of tool calls, which have headers of their own."""

    def mark(name: str) -> str:
        return f"<[{special_ids[name]}]>"

    match reasoning:
        case NoReasoning():
            return constraint
        case Harmony():
            thought = f'{mark("<|channel|>")} "analysis" {mark("<|message|>")} {_TEXT} {mark("<|end|>")}'
            final = f'{mark("<|channel|>")} "final" {mark("<|message|>")} behind'
            begun = f"({thought})?" if calls else f'({thought} {mark("<|start|>")} "assistant")? {final}'
        case Tagged(open=begin, tokens=(first, last)):
            word = begin.removeprefix(first)
            opened = rf"/\n{{0,2}}/ {mark(first)} {json.dumps(word) if word else ''}"
            space = "behind?" if calls else "behind"
            closed = rf"{_TEXT} {mark(last)} ({space} /\n{{0,2}}/ | /\n{{1,2}}/)"
            begun = closed if inside else f"({opened} {closed} | {constraint.before})"
    return replace(constraint, before=begun)
