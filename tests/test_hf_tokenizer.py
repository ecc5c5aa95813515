"""Tokenizers of transformers made from a file's vocabulary, and vocabularies made from transformers' folders."""

import json

import pytest
from test_tokenizer_golden import SEPARATOR, folder, load  # noqa: F401 (fixtures)
from vocabularies import CORPUS, bpe, gemma4

import dasllama_torch as dl
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.hf.tokenizer import hf_tokenizer_of
from dasllama_torch.hf.vocabulary import gguf_vocabulary
from dasllama_torch.text.special import TokenType
from dasllama_torch.text.tokenizer import Tokenizer

TEXTS = [*CORPUS, "", " ", "  two spaces first", "a\n\n b", "last space "]
SPECIALS = {"<|im_start|>": TokenType.CONTROL, "<|im_end|>": TokenType.CONTROL, "<pad>": TokenType.CONTROL}
SPECIALS |= {"<think>": TokenType.USER_DEFINED}
CHAT = "To the user:<|im_start|>user\nWhat does <think> mean?<|im_end|>\n"


def metadata(md: dict) -> dict:
    return {"general.architecture": "llama", "llama.context_length": 512, **md}


def with_ends(pre: str, **keys) -> dict:
    """A small vocabulary whose BOS, EOS and padding are SPECIALS."""
    md = bpe(pre, SPECIALS, **keys)
    ids = {text: i for i, text in enumerate(md["tokenizer.ggml.tokens"])}
    named = {"bos": "<|im_start|>", "eos": "<|im_end|>", "padding": "<pad>"}
    return metadata({**md, **{f"tokenizer.ggml.{name}_token_id": ids[text] for name, text in named.items()}})


def assert_same(fast, ours: Tokenizer, texts) -> None:
    for text in texts:
        assert fast(text)["input_ids"] == ours.encode(text, parse_special=True), text
        ids = ours.encode(text, add_special=False, parse_special=True)
        assert fast(text, add_special_tokens=False)["input_ids"] == ids
        assert fast.decode(ids, skip_special_tokens=False) == ours.decode(ids, skip_special=False)


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2"])
def test_published_vocabularies(name, load, folder):  # noqa: F811
    path = folder / f"ggml-vocab-{name}.gguf"
    fast, ours = hf_tokenizer_of(GGUFFile(path).metadata), load(name)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    for text in [*texts, *CORPUS]:
        ids = ours.encode(text, add_special=False, parse_special=True)
        assert fast(text, add_special_tokens=False)["input_ids"] == ids, text
    assert fast("Hello world")["input_ids"] == ours.encode("Hello world")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-4o", "tekken", "default"])
def test_small_vocabularies(pre):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    md = with_ends(pre, add_eos_token=True) | {"tokenizer.chat_template": template}
    fast, ours = hf_tokenizer_of(md), Tokenizer.from_metadata(md)
    assert_same(fast, ours, [*TEXTS, CHAT])
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert fast.model_max_length == 512
    assert len(fast) == len(ours)
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert fast.apply_chat_template(messages, tokenize=False) == "onetwo"
    batch = fast(["a", "the old lighthouse"], return_tensors="pt", padding=True)
    assert batch["attention_mask"][0, 0] == 0
    assert batch["input_ids"][0, 0] == ours.pad_id


def test_gemma4():
    md = metadata(gemma4({"<|turn>": TokenType.CONTROL}))
    assert_same(hf_tokenizer_of(md), Tokenizer.from_metadata(md), ["the  the\n\n\n the", *CORPUS[:5], "<|turn>the"])


def test_a_published_file(demo_model, tmp_path):
    """As a tokenizer of transformers, and written as a folder and read again as one of ours."""
    md = GGUFFile(demo_model).metadata
    ours, fast = Tokenizer.from_metadata(md), dl.AutoTokenizer.from_pretrained(demo_model)
    assert_same(fast, ours, TEXTS)
    assert fast.chat_template == md.get("tokenizer.chat_template")
    fast.save_pretrained(tmp_path)
    values = {"general.architecture": "llama", "llama.vocab_size": len(ours)}
    again = Tokenizer.from_metadata({**values, **gguf_vocabulary(tmp_path, values)})
    for text in TEXTS:
        assert again.encode(text, parse_special=True) == ours.encode(text, parse_special=True), text
    assert (again.bos_id, again.eos_id, again.pad_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert dl.AutoTokenizer.from_pretrained(tmp_path)("The sea")["input_ids"] == ours.encode("The sea")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-4o", "tekken", "gpt-2"])
def test_a_folder_gives_the_vocabulary_back(pre, tmp_path):
    md = with_ends(pre, add_bos_token=True)
    ours = Tokenizer.from_metadata(md)
    hf_tokenizer_of(md).save_pretrained(tmp_path)
    values = {"general.architecture": "qwen2", "qwen2.vocab_size": len(ours) + 5}  # filled up, as embeddings are
    again = Tokenizer.from_metadata({**values, **gguf_vocabulary(tmp_path, values)})
    assert len(again) == len(ours) + 5
    for text in [*TEXTS, CHAT]:
        for special in (True, False):
            assert again.encode(text, parse_special=special) == ours.encode(text, parse_special=special)
    assert again.token_type(len(ours) - 1) is TokenType.USER_DEFINED


def test_a_folder_gives_a_sentencepiece_vocabulary_back(load, folder, tmp_path):  # noqa: F811
    path, ours = folder / "ggml-vocab-llama-spm.gguf", load("llama-spm")
    hf_tokenizer_of(GGUFFile(path).metadata).save_pretrained(tmp_path)
    values = {"general.architecture": "llama", "llama.vocab_size": len(ours)}
    again = Tokenizer.from_metadata({**values, **gguf_vocabulary(tmp_path, values)})
    assert (again.model, again.add_bos, again.add_space_prefix) == ("llama", True, True)
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text), text


def write(folder, **parts):  # noqa: F811
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**file, **parts}))


def test_what_is_not_implemented_is_refused_by_name(tmp_path):
    values = {"general.architecture": "llama", "llama.vocab_size": 800}
    assert gguf_vocabulary(tmp_path, values) == {}
    hf_tokenizer_of(metadata(bpe("qwen2"))).save_pretrained(tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    for parts, says in (
        ({"model": {**file["model"], "type": "Unigram"}}, "Unigram"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated"}}, r"x\+"),
    ):
        write(tmp_path, **{**file, **parts})
        with pytest.raises(dl.TokenizerError, match=says):
            gguf_vocabulary(tmp_path, values)
    write(tmp_path, **file)
    with pytest.raises(dl.TokenizerError, match="and config.json 5 tokens"):
        gguf_vocabulary(tmp_path, values | {"llama.vocab_size": 5})
    for broken in ({"model": {"vocab": 3}}, {"added_tokens": [3]}, {"model": None}):
        write(tmp_path, **{**file, **broken})
        with pytest.raises(dl.FolderError, match=r"tokenizer\.json"):
            gguf_vocabulary(tmp_path, values)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(dl.FolderError, match="holds a list"):
        gguf_vocabulary(tmp_path, values)


def test_a_model_without_a_vocabulary(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf")
    with pytest.raises(dl.TokenizerError, match="no vocabulary"):
        dl.hf_tokenizer(model)


def test_without_transformers(monkeypatch, oracle, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(dl.DasllamaError, match=r"pip install 'dasllama-torch\[hf\]'"):
        hf_tokenizer_of(metadata(bpe("qwen2")))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(dl.DasllamaError, match=r"pip install 'dasllama-torch\[hf\]'"):
        dl.load_model(tmp_path)
