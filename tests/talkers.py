"""Small models that have a vocabulary, and models that say what they are told."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

import dasllama_torch as dl
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.random_source import RandomSource


class _Source(RandomSource):
    def __init__(self, seed: int, n_vocab: int):
        super().__init__(seed)
        self.n_vocab = n_vocab

    def rows(self, name: str) -> int:
        assert name == "token_embd.weight"
        return self.n_vocab


def tiny_llama(words: dict, seed: int = 0):
    """Two layers of random weights over a vocabulary of `vocabularies`."""
    n_vocab = len(words["tokenizer.ggml.tokens"])
    return dl.build_model(
        Metadata(
            {
                "general.architecture": "llama",
                "llama.block_count": 2,
                "llama.context_length": 2048,
                "llama.embedding_length": 64,
                "llama.feed_forward_length": 96,
                "llama.attention.head_count": 4,
                "llama.attention.head_count_kv": 2,
                "llama.rope.dimension_count": 16,
                "llama.attention.layer_norm_rms_epsilon": 1e-5,
                "llama.vocab_size": n_vocab,
                **words,
            }
        ),
        _Source(seed, n_vocab),
    )


@contextmanager
def saying(model, tokens: Iterable[int]) -> Iterator[None]:
    """By far the likeliest token of each forward is the next of these, and the last one for ever."""
    left = iter(tokens)
    last = [0]

    def say(module, args, output):
        last.append(next(left, last[-1]))
        said = torch.zeros_like(output)
        said[..., last[-1]] = 50.0
        return said

    hook = model.lm_head.register_forward_hook(say)
    try:
        yield
    finally:
        hook.remove()
