"""`model.generate` as in transformers, greedy and sampling, on sessions that go through the model as one ragged batch.

Padding takes no part: a padded row gets what it would have got alone. A row that has ended is not evaluated any more.
B rows of the batch, T positions of the prompts, V vocab.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dasllama_torch import sampling
from dasllama_torch.engine.runner import ON_DEVICE
from dasllama_torch.engine.session import Session, eval_batch
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 20  # transformers' own

# Settings with the values that ask for nothing; any other is refused by name.
_NEUTRAL: dict[str, tuple] = {
    "num_beams": (1,),
    "use_cache": (True,),
    "return_dict_in_generate": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "synced_gpus": (False,),
}
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
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | Tensor | None = None
    pad_token_id: int | Tensor | None = None

    @classmethod
    def of(cls, *settings: Mapping[str, Any]) -> "Options":
        """Settings by name, of which later ones win. Raises TypeError for a name that is not known here,
        UnsupportedModel for one that asks for what is not implemented."""
        known = {each.name for each in fields(cls)}
        given: dict[str, Any] = {}
        for each in settings:
            given |= {name: value for name, value in each.items() if value is not None}
        for name in given.keys() - known:
            if name in _NEUTRAL and given[name] in _NEUTRAL[name]:
                continue
            if name in _NOTES:
                continue
            if name in _NEUTRAL:
                raise UnsupportedModel(f"generate: {name}={given[name]!r} is not implemented")
            raise TypeError(f"generate: {name!r} is not implemented; known are {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in given.items() if name in known})

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
        n = self.num_return_sequences
        if n < 1 or (n > 1 and not self.do_sample):
            raise ValueError(f"generate: num_return_sequences is {n}, wanted 1, or more where do_sample is True")
        penalty = dict(repetition_penalty=float(self.repetition_penalty), penalty_last_n=-1)
        if not self.do_sample:
            return SamplingParams(**penalty)
        if self.temperature <= 0:
            raise ValueError(f"generate: temperature is {self.temperature}, wanted more than 0 where do_sample is True")
        return SamplingParams(
            temp=float(self.temperature), top_k=int(self.top_k), top_p=float(self.top_p), min_p=float(self.min_p or 0),
            **penalty,
        )  # fmt: skip


def generate(
    model: CausalLM,
    open_session: Callable[..., Session],
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    logits_processor: Iterable[Callable[[Tensor, Tensor], Tensor]] = (),
    stopping_criteria: Iterable[Callable[[Tensor, None], Any]] = (),
    kv_dtype: str | tuple[str, str] | None = None,
    **settings,
) -> Tensor:
    """See `CausalLM.generate`. open_session: of n_ctx and kv_dtype."""
    given = inputs if input_ids is None else input_ids
    ids = _ids(inputs, input_ids)
    options = Options.of(_as_dict(model.generation_config), _as_dict(generation_config), settings)
    ends = _ends(model, options)
    pad = _pad(model, options, ends)
    real = _real(ids, attention_mask, pad, ends)
    new, params = options.n_new(ids.shape[1], model.config.n_ctx), options.sampling()
    rows = [i for i in range(len(ids)) for _ in range(options.num_return_sequences)]
    sequences = ids[rows]
    if streamer is not None:
        streamer.put(ids)
    sessions: list[Session] = []
    try:
        n_ctx = int(real.sum(1).max()) + new
        sessions = _prompted(open_session, n_ctx, kv_dtype, ids, real, options.num_return_sequences)
        loop = _Loop(sessions, params, list(logits_processor), list(stopping_criteria), ends, pad)
        for left in reversed(range(new)):
            tokens = loop.step(sequences)
            sequences = torch.cat([sequences, tokens[:, None]], 1)
            if streamer is not None:
                streamer.put(tokens)
            if loop.has_ended(sequences) or not left:
                break
            loop.advance(tokens)
    finally:
        for session in sessions:
            session.close()
    if streamer is not None:
        streamer.end()
    return sequences.to(given.device)


class _Loop:
    """One step after another of rows that end at different times."""

    def __init__(self, sessions, params: SamplingParams, processors, criteria, ends: list[int], pad: int | None):
        self.sessions, self.params, self.ends, self.pad = sessions, params, ends, pad
        self.processors, self.criteria = processors, criteria
        self.going = [True] * len(sessions)
        # Between the penalties and the rest, where transformers has its callers' processors.
        self.later = params if not processors else _without_penalties(params)
        if params.temp > 0:  # from torch's own generator, so that `torch.manual_seed` repeats a run
            for session in sessions:
                session.set_seed(int(torch.randint(2**62, ())))

    def step(self, sequences: Tensor) -> Tensor:
        """The next token of each row, int64 [B]; padding for one that has ended."""
        if self.processors:
            scores = torch.stack([sampling.penalize(each.logits, each.tokens, self.params) for each in self.sessions])
            for processor in self.processors:
                scores = processor(sequences, scores)
            for session, row in zip(self.sessions, scores, strict=True):
                session.logits = row
        tokens = [
            session.sample(self.later) if going else self.pad
            for session, going in zip(self.sessions, self.going, strict=True)
        ]
        return torch.tensor(tokens)

    def has_ended(self, sequences: Tensor) -> bool:
        """Note which rows have ended with their last token, and tell whether all have."""
        last = sequences[:, -1].tolist()
        stopped = [False] * len(last)
        for criterion in self.criteria:
            stopped = [a or bool(b) for a, b in zip(stopped, _each(criterion(sequences, None), len(last)), strict=True)]
        for row, token in enumerate(last):
            self.going[row] = self.going[row] and token not in self.ends and not stopped[row]
        if self.pad is None and any(self.going) and not all(self.going):
            raise ValueError("generate: a row has ended before others, wanted a pad_token_id")
        return not any(self.going)

    def advance(self, tokens: Tensor) -> None:
        """Evaluate the tokens of the rows that go on, in one batch."""
        rows = [row for row, going in enumerate(self.going) if going]
        logits = "last" if self.processors else ON_DEVICE
        eval_batch([self.sessions[row] for row in rows], [[int(tokens[row])] for row in rows], logits)


def _without_penalties(params: SamplingParams) -> SamplingParams:
    return SamplingParams(temp=params.temp, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def _each(answer: Any, n: int) -> list[bool]:
    """What a stopping criterion says, of each row."""
    return torch.as_tensor(answer, dtype=torch.bool).expand(n).tolist()


def _ids(inputs: Tensor | None, input_ids: Tensor | None) -> Tensor:
    if (inputs is None) == (input_ids is None):
        raise ValueError("generate: wanted either inputs or input_ids")
    ids = inputs if input_ids is None else input_ids
    if ids.dim() != 2 or not ids.shape[0] or not ids.shape[1] or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"generate: inputs are {ids.dtype} {list(ids.shape)}, wanted ids int64 [B, T]")
    return ids.to("cpu", torch.int64)


def _as_dict(config: Any) -> Mapping[str, Any]:
    """The settings of transformers' `GenerationConfig`, or of a dict."""
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else config.to_diff_dict()


def _ends(model: CausalLM, options: Options) -> list[int]:
    """What ends a generation, the vocabulary's own end first."""
    if options.eos_token_id is not None:
        return torch.as_tensor(options.eos_token_id).reshape(-1).tolist()
    tokenizer = model.tokenizer
    ends = set() if tokenizer is None else tokenizer.eog_ids
    return sorted(ends, key=lambda token: (token != tokenizer.eos_id, token))


def _pad(model: CausalLM, options: Options, ends: list[int]) -> int | None:
    if options.pad_token_id is not None:
        return int(options.pad_token_id)
    own = None if model.tokenizer is None else model.tokenizer.pad_id
    return next(iter(ends), None) if own is None else own


def _real(ids: Tensor, attention_mask: Tensor | None, pad: int | None, ends: list[int]) -> Tensor:
    """bool [B, T]: which positions are tokens. Without a mask, as in transformers, what is `pad` is padding, unless
    that also ends a generation."""
    if attention_mask is None:
        real = torch.ones_like(ids, dtype=torch.bool) if pad is None or pad in ends else ids != pad
        return real if real.any(1).all() else torch.ones_like(real)
    real = torch.as_tensor(attention_mask).bool().cpu()
    if real.shape != ids.shape:
        raise ValueError(f"generate: attention_mask has shape {list(real.shape)}, wanted {list(ids.shape)}")
    if not real.any(1).all():
        raise ValueError("generate: attention_mask leaves a row without any token, wanted one at least")
    return real


def _prompted(open_session, n_ctx: int, kv_dtype, ids: Tensor, real: Tensor, copies: int) -> list[Session]:
    """Sessions that hold the prompts, each as often as it is wanted."""
    sessions = [open_session(n_ctx=n_ctx, kv_dtype=kv_dtype) for _ in ids]
    try:
        eval_batch(sessions, [row[mask].tolist() for row, mask in zip(ids, real, strict=True)])
        return [each for session in sessions for each in (session, *(session.fork() for _ in range(copies - 1)))]
    except BaseException:
        for session in sessions:
            session.close()
        raise
