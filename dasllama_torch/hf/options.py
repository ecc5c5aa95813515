"""Settings of `generate` by transformers' names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 20  # transformers' own

# Settings with the values that ask for nothing; any other is refused by name.
_NEUTRAL: dict[str, tuple] = {"use_cache": (True,), "synced_gpus": (False,)}
# What a file of settings says of itself.
_NOTES = ("transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id")


@dataclass(frozen=True, kw_only=True)
class Options:
    """transformers' names and defaults. eos_token_id, pad_token_id None: those of the vocabulary, see `generate`."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | Tensor | None = None
    pad_token_id: int | Tensor | None = None
    return_dict_in_generate: bool = False
    output_scores: bool = False
    output_logits: bool = False
    output_hidden_states: bool = False
    output_attentions: bool = False

    @classmethod
    def of(cls, *settings: Any) -> "Options":
        """Settings by name, of which later ones win: mappings, transformers' `GenerationConfig`, None. Raises TypeError
        for a name that is not known here, UnsupportedModel for one that asks for what is not implemented, ValueError
        for a value outside its range."""
        known = {each.name for each in fields(cls)}
        given: dict[str, Any] = {}
        for each in settings:
            given |= {name: value for name, value in _as_dict(each).items() if value is not None}
        for name in given.keys() - known:
            if name in _NEUTRAL and given[name] in _NEUTRAL[name]:
                continue
            if name in _NOTES:
                continue
            if name in _NEUTRAL:
                raise UnsupportedModel(f"generate: {name}={given[name]!r} is not implemented")
            raise TypeError(f"generate: {name!r} is not implemented; known are {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in given.items() if name in known})

    def __post_init__(self):
        n, beams = self.num_return_sequences, self.num_beams
        if beams < 1:
            raise ValueError(f"generate: num_beams is {beams}, wanted 1 or more")
        if n < 1 or (beams == 1 and n > 1 and not self.do_sample):
            raise ValueError(f"generate: num_return_sequences is {n}, wanted 1, or more where do_sample is True")
        if beams > 1 and n > beams:
            raise ValueError(f"generate: num_return_sequences is {n}, wanted no more than num_beams={beams}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"generate: early_stopping is {self.early_stopping!r}, wanted a bool or 'never'")
        if self.do_sample and self.temperature <= 0:
            raise ValueError(f"generate: temperature is {self.temperature}, wanted more than 0 where do_sample is True")

    def n_new(self, length: int, n_ctx: int) -> int:
        """Tokens to generate at most, behind prompts of `length` positions in a model for n_ctx."""
        if self.max_new_tokens is not None:
            new = self.max_new_tokens
        elif self.max_length is not None:
            new = self.max_length - length
        else:
            new = min(DEFAULT_NEW_TOKENS, n_ctx - length)
        if new < 1:
            raise ValueError(f"generate: {new} new tokens behind prompts of {length}, wanted 1 or more")
        return new

    def sampling(self) -> SamplingParams:
        """transformers' order of work is ours, and its penalty counts all tokens."""
        penalty = dict(repetition_penalty=float(self.repetition_penalty), penalty_last_n=-1)
        if not self.do_sample:
            return SamplingParams(**penalty)
        return SamplingParams(
            temp=float(self.temperature), top_k=int(self.top_k), top_p=float(self.top_p), min_p=float(self.min_p or 0),
            **penalty,
        )  # fmt: skip

    def ends(self, model: CausalLM) -> list[int]:
        """What ends a generation, the vocabulary's own end first."""
        if self.eos_token_id is not None:
            return torch.as_tensor(self.eos_token_id).reshape(-1).tolist()
        tokenizer = model.tokenizer
        ends = set() if tokenizer is None else tokenizer.eog_ids
        return sorted(ends, key=lambda token: (token != tokenizer.eos_id, token))

    def pad(self, model: CausalLM) -> int | None:
        """What rows are filled up with that have ended; None where nobody says."""
        if self.pad_token_id is not None:
            return int(self.pad_token_id)
        own = None if model.tokenizer is None else model.tokenizer.pad_id
        return next(iter(self.ends(model)), None) if own is None else own


def _as_dict(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else config.to_diff_dict()
