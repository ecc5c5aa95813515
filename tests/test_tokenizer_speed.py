"""No text may take time out of proportion: runs of one character are the worst case of cutting and of merging."""

import time
from functools import cache

import pytest
from vocabularies import gemma4, spm

from dasllama_torch.text.bpe import BYTE_ALPHABET
from dasllama_torch.text.pretokenizers import PRE_TOKENIZERS
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

LENGTH = 200_000
SECONDS = 2.0  # of this process: what others do on the machine is not counted
RUNS = ["a", " ", "\n", "1", "é", "!", "字"]
# One name for each way to cut text.
NAMES = {pre.patterns: name for name, pre in reversed(PRE_TOKENIZERS.items()) if pre.byte_level}.values()


def merges_of_runs(spell):
    """Merges that make each character of RUNS out of its symbols, and then 2, 4, 8 and 16 of it."""
    merges = []
    for symbols in map(spell, RUNS):
        made = symbols[0]
        for symbol in symbols[1:]:
            merges.append(f"{made} {symbol}")
            made += symbol
        for _ in range(4):
            merges.append(f"{made} {made}")
            made += made
    return merges


@cache
def tokenizer(kind):
    if kind == "gemma4":
        return Tokenizer.from_metadata(gemma4(merges=merges_of_runs(lambda char: char.replace(" ", "▁"))))
    if kind == "llama":
        # Every length up to 16, so that merges of unlike neighbours compete, and as many special tokens as Gemma 3 has.
        pieces = {char * n: -float(n) for char in "▁aé1!字" for n in range(1, 17)}
        runs = {"\n" * n: TokenType.USER_DEFINED for n in range(1, 32)}
        return Tokenizer.from_metadata(spm(pieces, runs | {f"<unused{i}>": TokenType.CONTROL for i in range(6000)}))
    merges = merges_of_runs(lambda char: [BYTE_ALPHABET[b] for b in char.encode()])
    tokens = [*BYTE_ALPHABET, *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    keys = {"model": "gpt2", "pre": kind, "tokens": tokens, "merges": merges}
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def check(kind, text):
    start = time.process_time()
    ids = tokenizer(kind).encode(text, add_special=False, parse_special=True)
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{len(text)} characters, {text[:8]!r}...: {seconds:.2f} s"
    return ids


@pytest.mark.parametrize("kind", [*NAMES, "gemma4", "llama"])
def test_runs_of_one_character(kind):
    for char in RUNS:
        assert tokenizer(kind).decode(check(kind, char * LENGTH)[:100]).strip(char) == ""


@pytest.mark.parametrize("kind", ["gemma4", "llama", "llama-bpe", "gpt-4o"])
def test_other_long_texts(kind):
    """Ends that make a pattern step back, and short words without end."""
    for char in (" ", "A", "\u0301"):
        check(kind, char * LENGTH + "x")
    for text in (" a", " \n", "\r\n", "aA", "' ", "<unused"):
        check(kind, (text * LENGTH)[:LENGTH])
