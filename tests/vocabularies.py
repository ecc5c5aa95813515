"""Small vocabularies as GGUF metadata, for the tests of the tokenizer."""

import json
from functools import cache

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dasllama_torch.text.special import TokenType

CORPUS = [
    "The old lighthouse keeper began to write down everything he remembered about the storm of 1911.",
    "It's what they'll have said: we've no idea, I'm sure you'd agree; they're DON'TS and Do's.",
    "Das Öl brennt in der alten Laterne, während draußen der Sturm über die Küste fegt. ÄÖÜ äöü ß",
    "Старый смотритель маяка начал записывать всё, что он помнил о буре. ΑΒΓ αβγ",
    "在那年春天，灯塔看守人开始写下他记得的一切。日本語のテキスト、ひらがなとカタカナ。",
    "def f(x):\n    if x >= 10:\n        return [x, -x]  # a comment\n\n\nprint(f(12345))\r\n\tend",
    "क्षि हिन्दी में एक वाक्य। ไทย สวัสดีครับ é é café naïve 🦙 👩‍👩‍👧 12 345 6789 ½ Ⅷ",
    "a  b   c    d     e      f        g                h\n\n\nx\t\t\ty",
]


@cache
def _trained() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Byte-level tokens and merges learned from CORPUS. The words are GPT-2's, so that merges do not favour any other
    way to cut text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tuple(tokens), tuple(" ".join(pair) for pair in merges)


def bpe(pre: str, specials: dict[str, TokenType] | None = None, **keys) -> dict:
    """A byte-level vocabulary of about 700 tokens, then `specials`. keys: further ones below `tokenizer.ggml.`."""
    tokens, merges = _trained()
    specials = specials or {}
    return _metadata(
        "gpt2",
        [*tokens, *specials],
        [TokenType.NORMAL] * len(tokens) + [*specials.values()],
        pre=pre,
        merges=merges,
        **keys,
    )


def spm(pieces: dict[str, float], specials: dict[str, TokenType] | None = None, **keys) -> dict:
    """<unk>, <s>, </s>, 256 bytes, `specials`, then `pieces` with their scores."""
    head = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    head |= {f"<0x{b:02X}>": TokenType.BYTE for b in range(256)} | (specials or {})
    scores = np.array([0.0] * len(head) + list(pieces.values()), np.float32)
    return _metadata(
        "llama", [*head, *pieces], [*head.values()] + [TokenType.NORMAL] * len(pieces), scores=scores, **keys
    )


GEMMA4_MERGES = ["▁ ▁", "▁▁ ▁▁", "\n \n", "\n\n \n", "t h", "th e", "▁ the", "▁ t", "▁▁ the"]


def gemma4(specials: dict[str, TokenType] | None = None, merges: list[str] = GEMMA4_MERGES) -> dict:
    """Merges over UTF-8: <eos>, <bos>, 256 bytes, the characters of CORPUS, what `merges` make, `specials`."""
    head = {"<eos>": TokenType.CONTROL, "<bos>": TokenType.CONTROL}
    head |= {f"<0x{b:02X}>": TokenType.BYTE for b in range(256)}
    texts = dict.fromkeys("".join(CORPUS).replace(" ", "▁"))
    for merge in merges:
        texts |= dict.fromkeys([*merge.split(" "), merge.replace(" ", "")])
    types = [*head.values()] + [TokenType.NORMAL] * len(texts) + [*(specials or {}).values()]
    return _metadata("gemma4", [*head, *texts, *(specials or {})], types, merges=merges, bos_token_id=1, eos_token_id=0)


def _metadata(model: str, tokens: list[str], types: list[int], **keys) -> dict:
    keys = {"model": model, "tokens": tokens, "token_type": np.array(types, np.int32), **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
