"""Ids of llama.cpp: its own vocabulary tests, and the prompts of published models."""

import json
import os
from pathlib import Path

import pytest

from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

VOCABULARIES = ["llama-bpe", "llama-spm", "qwen2", "qwen35", "phi-3", "gpt-2", "gemma-4"]
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def folder(vocabulary_folder):
    return vocabulary_folder


@pytest.fixture(scope="module")
def load(vocabulary):
    return vocabulary


def cases(folder, name):
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(lines) >= 46
    assert texts[len(lines) :] in ([], [""])
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary(load, folder, name):
    tok = load(name)
    for text, ids in cases(folder, name):
        assert tok.encode(text, add_special=False) == ids
        assert tok.decode(ids) == text


def test_smaug_is_llama(folder):
    """A1: the same file under its other name."""
    md = GGUFFile(folder / "ggml-vocab-llama-bpe.gguf").metadata
    tok = Tokenizer.from_metadata({key: md[key] for key in md} | {"tokenizer.ggml.pre": "smaug-bpe"})
    for text, ids in cases(folder, "llama-bpe"):
        assert tok.encode(text) == [tok.bos_id, *ids]


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        # A2: with GPT-2's rules digits go in threes and signs one by one
        ("qwen2", "w048 7tuijk dsdfhu", [86, 15, 19, 23, 220, 22, 83, 1963, 41808, 11472, 2940, 16739]),
        ("qwen2", "333", [18, 18, 18]),
        ("qwen2", "\n\n\n", [1406]),
        ("qwen2", "\t\n", [1572]),
        ("qwen2", "Hello\n\n world", [9707, 271, 1879]),
        ("qwen2", "->", [405]),
        ("qwen2", "(x):\n", [2075, 982]),
        # A3: the reverse
        ("llama-bpe", "3333", [8765, 18]),
        ("llama-bpe", "33333", [8765, 1644]),
        ("llama-bpe", "w048 7tuijk dsdfhu", [86, 23904, 220, 22, 83, 2005, 42908, 11729, 3013, 17156]),
    ],
)
def test_faults_of_others(load, name, text, ids):
    assert load(name).encode(text, add_special=False) == ids


def test_marks_join_letters(load):
    """A5: Qwen 3.5 is not Qwen 2."""
    assert load("qwen2").encode("สวัสดีครับ") != load("qwen35").encode("สวัสดีครับ")


def test_gemma4_newlines(load):
    """Runs of newlines that are tokens; llama.cpp looks them up, and the merges lead to the same."""
    tok = load("gemma-4")
    tokens = {
        tok.piece(i): i for i in range(300) if set(tok.piece(i)) == {"\n"} and tok.token_type(i) is TokenType.NORMAL
    }
    assert len(tokens) > 25
    for text, token in tokens.items():
        assert tok.encode(text, add_special=False) == [token]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("llama-spm", {"</s>"}),
        ("qwen2", {"<|endoftext|>", "<|im_end|>"}),
        ("phi-3", {"<|endoftext|>", "<|end|>"}),
        ("gpt-2", {"<|endoftext|>"}),
        ("gemma-4", {"<eos>", "<turn|>", "<|tool_response>"}),
    ],
)
def test_ends_of_generation(load, name, wanted):
    tok = load(name)
    assert {tok.piece(i) for i in tok.eog_ids} == wanted


@pytest.mark.parametrize(
    ("fixture", "name"), [("demo_model", "smollm2-135m-instruct-q4_1"), ("gemma_model", "gemma-3-270m-q4_k_m")]
)
def test_prompts(request, oracle, fixture, name):
    check_prompts(request.getfixturevalue(fixture), json.loads((oracle / "real" / f"{name}.json").read_text()))


def test_prompts_of_a_local_model(oracle):
    """A file without a stated licence: nothing fetches it, it is read where someone has put it."""
    golden = json.loads((oracle / "real" / "qwen2.5-coder-0.5b-instruct-q4_k_m.json").read_text())
    local = Path(os.environ.get("DASLLAMA_TEST_MODELS", "models")).glob("*.gguf")
    path = next((path for path in local if path.stat().st_size == golden["size"]), None)
    if path is None:
        pytest.skip("model absent, and nothing fetches it: qwen2.5-coder-0.5b-instruct-q4_k_m in DASLLAMA_TEST_MODELS")
    check_prompts(path, golden)


def check_prompts(path, golden):
    tok = Tokenizer.from_metadata(GGUFFile(path).metadata)
    assert len(golden["prompts"]) == 8
    for prompt in golden["prompts"]:
        assert tok.encode(prompt["text"], add_special=True, parse_special=True) == prompt["ids"]
        assert tok.decode(prompt["ids"], skip_special=False).removeprefix("<bos>") == prompt["text"].removeprefix(
            "<bos>"
        )
