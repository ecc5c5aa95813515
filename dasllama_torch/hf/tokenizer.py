"""A tokenizer of transformers from nothing but a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Tokenizers

from dasllama_torch.errors import TokenizerError
from dasllama_torch.hf.common import import_transformers
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.text.tokenizer import Tokenizer


class _Given:
    """A tokenizer for transformers to have. It would copy one, through JSON, which takes seconds for 262,144 tokens."""

    def __init__(self, tokenizer: Tokenizers):
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict) -> Tokenizers:
        return self._tokenizer


def hf_tokenizer(model: CausalLM):
    """The model's vocabulary as a `PreTrainedTokenizerFast` of transformers, with its special tokens and its chat
    template; it pads on the left, as generation needs it.

    Ids are those of `model.encode(text, parse_special=True)`, of SentencePiece vocabularies for natural text: see
    `text/fast.py`. Raises TokenizerError for a model without a vocabulary, DasllamaError where transformers is missing.
    """
    if model.metadata is None:
        raise TokenizerError("this model was built without a tokenizer")
    return hf_tokenizer_of(model.metadata)


def hf_tokenizer_of(metadata: Mapping[str, Any]):
    """`hf_tokenizer` of a file's metadata."""
    transformers = import_transformers("for its tokenizers")
    tokenizer = Tokenizer.from_metadata(metadata)
    fast = tokenizer.to_tokenizers()
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    names = {f"{name}_token": fast.id_to_token(i) for name, i in ids.items() if i is not None}
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_Given(fast),
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=int(context) if context else None,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
