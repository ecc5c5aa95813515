"""Vectors of texts: the oracle is transformers' last hidden state, pooled and normed here in float64."""

import pytest
import torch
from families import TINY
from test_embeddings import twin
from test_invariants import text
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource

TEXTS = [bytes(text(seed, n)).decode("latin-1") for seed, n in ((1, 5), (2, 1), (3, 60), (4, 33))]


@pytest.fixture
def load(oracle, monkeypatch):
    """A golden model, whose tokens are the bytes of a text, with further metadata of its architecture."""

    def loaded(name, mode="native", **facts):
        file = GGUFFile(oracle / "tiny" / f"{name}.gguf")
        source = GGUFSource(file)
        source.native = mode == "native"
        own = {f"{file.metadata.architecture}.{key}": value for key, value in facts.items()}
        model = dl.build_model(Metadata({**file.metadata, **own}), source)
        monkeypatch.setattr(model, "encode", lambda text: list(text.encode("latin-1")))
        return model

    return loaded


def pooled(rows, pooling):
    rows = rows.double()
    vector = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]
    return vector / vector.square().sum().sqrt()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen35", "phi3_longrope"])
def test_transformers(name, load, oracle):
    model = load(name, "fp32")
    hf = twin(model, name, oracle)
    found = {pooling: dl.embed(model, TEXTS, pooling) for pooling in ("mean", "cls", "last")}
    for i, each in enumerate(TEXTS):
        rows = hf.model(input_ids=torch.tensor([model.encode(each)])).last_hidden_state[0]
        for pooling, vectors in found.items():
            wanted = pooled(rows, pooling)
            assert vectors.shape == (4, model.config.n_embd)
            assert vectors.dtype == torch.float32
            assert (vectors[i] - wanted).abs().max() <= FP32_LOGITS * TINY[name] * wanted.std()


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_a_vector_does_not_depend_on_the_others(name, load, threads):
    """Nor on threads, nor on how a long text is cut into windows of rows; and nothing is left in the pool."""
    model = load(name, context_length=2048)
    texts = [*TEXTS, bytes(text(5, 700)).decode("latin-1"), *TEXTS[:2], bytes(text(6, 500)).decode("latin-1")]
    found = dl.embed(model, texts)
    threads(1)
    for each, vector in zip(texts, found, strict=True):
        assert torch.equal(dl.embed(model, each), vector)
    whole = []
    hook = model.model.register_forward_hook(lambda module, args, output: whole.append(output[0]))
    with torch.no_grad():
        model(torch.tensor([model.encode(texts[4])]))
    hook.remove()
    assert torch.equal(found[4], pooled(whole[0], "mean").float())
    with dl.create_session(model, "f32", n_ctx=100) as session:
        session.eval([1, 2])
        logits, used = session.logits.clone(), session.pool.used_bytes
        dl.embed(model, texts)
        assert session.pool.used_bytes == used
        assert torch.equal(session.logits, logits)


def test_the_file_says_how(load):
    plain = load("llama")
    vectors = {pooling: dl.embed(plain, TEXTS, pooling) for pooling in ("mean", "cls", "last")}
    for number, pooling in enumerate(("mean", "mean", "cls", "last")):
        model = load("llama", pooling_type=number)
        assert torch.equal(dl.embed(model, TEXTS), vectors[pooling])
        assert torch.equal(dl.embed(model, TEXTS, "last"), vectors["last"])
    assert torch.equal(dl.embed(plain, TEXTS), vectors["mean"])
    with pytest.raises(dl.UnsupportedModel, match="llama: the file's pooling is 'rank'"):
        dl.embed(load("llama", pooling_type=4), TEXTS)
    with pytest.raises(dl.GGUFError, match="pooling_type"):
        load("llama", pooling_type=5)


def test_wrong_texts(load):
    model = load("llama", context_length=50)
    assert dl.embed(model, []).shape == (0, 64)
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        dl.embed(model, ["a", ""])
    with pytest.raises(dl.ContextFull, match="text 0 has 60 tokens, more than .* 50"):
        dl.embed(model, TEXTS[2])
    with pytest.raises(ValueError, match="pooling is 'max', wanted one of mean, cls, last"):
        dl.embed(model, TEXTS, "max")


def test_the_last_token_is_the_eos_that_the_vocabulary_adds(demo_model):
    model = dl.load_model(demo_model)
    tokenizer = model.tokenizer
    plain = model.encode("A quiet street at night")
    tokenizer.add_eos = True
    assert model.encode("A quiet street at night") == [*plain, tokenizer.eos_id]
    hidden = []
    hook = model.model.norm.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    with dl.create_session(model, "f32") as session:
        session.eval([*plain, tokenizer.eos_id])
    hook.remove()
    assert torch.equal(dl.embed(model, "A quiet street at night", "last"), pooled(hidden[0], "last").float())
    night, street, sum_ = dl.embed(model, ["A quiet street at night", "An empty road after dark", "2 + 2 = 4"])
    assert night @ street > night @ sum_
