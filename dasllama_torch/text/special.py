"""Tokens that are not cut from text: their types, which of them end a generation, and how they are found in a text."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` (GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found in a text as they stand, before it is cut: control and unknown tokens where the caller asks for it,
# user-defined ones always.
SPECIAL_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})

# Ends of generation by their names, because files often give one of them in their metadata while the model uses
# another. Source: llama.cpp src/llama-vocab.cpp.
END_NAMES = frozenset(
    ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]  # Llama 3, Granite
    + ["<|im_end|>", "<|endoftext|>", "<|end|>"]  # ChatML, GPT-2, Phi-3
    + ["<|return|>", "<|call|>", "<|flush|>", "<|calls|>"]  # gpt-oss, Solar Open
    + ["<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>"]  # Gemma
    + ["<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "[e~["]
    + ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]  # the end of a middle that was to be filled in
    + ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"]  # another file begins
)
# An end only where the file calls it a control token: in Gemma's vocabularies it is the HTML tag.
END_NAMES_IF_CONTROL = frozenset({"</s>"})
# Control tokens by their names, whatever type a converter gave them: those ends, and the markers around a middle.
CONTROL_NAMES = END_NAMES | frozenset(
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"]
    + ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
    + ["<PRE>", "<SUF>", "<MID>", "▁<PRE>", "▁<SUF>", "▁<MID>", "<|prefix|>", "<|suffix|>", "<|middle|>"]
    + ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"]
)


def end_ids(named: Mapping[str, int]) -> frozenset[int]:
    """The ids of `named` (text -> id of the ends of a vocabulary) without `<|end|>` where it only ends a message within
    a turn: in Harmony (gpt-oss) `<|return|>` or `<|call|>` ends the turn, in Solar Open `<|flush|>` or `<|calls|>`.
    """
    harmony = {"<|return|>", "<|call|>"} <= named.keys()
    solar = "<|flush|>" in named and ("<|call|>" in named or "<|calls|>" in named)
    return frozenset(i for text, i in named.items() if text != "<|end|>" or not (harmony or solar))


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is found in text as it stands. lstrip, rstrip: it swallows the white space on that side."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


def strips(token: str, model_name: str, pre: str | None) -> tuple[bool, bool]:
    """(lstrip, rstrip) of a special token. No key says it: like llama.cpp, go by the names of the few models
    (`general.name`, `tokenizer.ggml.pre`) that are known to have it.
    """
    model_name = model_name.lower()
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code"):
        return token == "<mask>", False
    if "phi-3" in model_name or "phi3" in model_name:
        return False, token not in ("<unk>", "<s>", "<|endoftext|>")
    return "modern-bert" in model_name and token == "[MASK]", False


_SPACE = " \t\n\v\f\r"  # C's isspace
_KEY = 3  # characters; enough to tell a vocabulary's families of special tokens apart


class SpecialTokens:
    """Finds special tokens in texts, longer ones first: where two overlap the longer wins, even if it begins further
    right. Source: llama.cpp src/llama-vocab.cpp, tokenizer_st_partition.
    """

    def __init__(self, specials: Iterable[Special]):
        # A vocabulary may have 6,000 of them. They share few beginnings, and a text is searched for each of those once.
        self._families: dict[tuple[str, int], dict[str, Special]] = defaultdict(dict)
        for special in specials:
            self._families[special.text[:_KEY], len(special.text)][special.text] = special

    def split(self, text: str) -> list[str | Special]:
        """The text as special tokens and the non-empty texts between them."""
        parts: list[str | Special] = [text] if text else []
        for special in sorted(self._found(text), key=lambda special: (-len(special.text.encode()), special.id)):
            parts = [piece for part in parts for piece in (_cut(part, special) if isinstance(part, str) else (part,))]
        return parts

    def _found(self, text: str) -> list[Special]:
        """All that occur in the text, overlapping or not."""
        found: list[Special] = []
        for (key, length), family in self._families.items():
            if len(family) == 1:
                found += [special for special in family.values() if special.text in text]
                continue
            candidates = set()
            at = text.find(key)
            while at >= 0:
                candidates.add(text[at : at + length])
                at = text.find(key, at + 1)
            found += [family[candidate] for candidate in candidates if candidate in family]
        return found


def _cut(text: str, special: Special) -> list[str | Special]:
    first, *rest = text.split(special.text)
    parts: list[str | Special] = [first]
    for part in rest:
        if special.lstrip:
            parts[-1] = parts[-1].rstrip(_SPACE)
        parts += [special, part.lstrip(_SPACE) if special.rstrip else part]
    return [part for part in parts if part != ""]
