"""What a generation begins with, the steps that it takes, and what comes out.

B prompts, R rows: each prompt as often as there are beams, or sequences, of it. T positions of the prompts,
C embedding, H query heads, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dasllama_torch.engine.runner import ON_DEVICE
from dasllama_torch.hf.cache import SessionCache, evaluate
from dasllama_torch.hf.options import Options
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.outputs import ModelOutput

_OUTPUTS = ("scores", "logits", "attentions", "hidden_states")


@dataclass
class GenerateOutput(ModelOutput):
    """What `return_dict_in_generate` gives, with the fields of transformers' `GenerateDecoderOnlyOutput`, and those of
    `GenerateBeamDecoderOnlyOutput` for beams. None: not asked for. The others are tuples of a value for each new token.

    sequences: int64 [B * num_return_sequences, T + n]. sequences_scores: f32 [B * num_return_sequences] of beams.
    scores: f32 [R, V], what was drawn from: logits, or log-probabilities of beams, after penalties, processors and
    warpers. logits: f32 [R, V] as the model gives them. beam_indices: int32 [B * num_return_sequences, n], the row of
    each step that a beam's token came from, -1 behind its end. attentions and hidden_states: of the layers, f32
    [R, H, T, S] and [R, T, C], with T = 1 but for the prompts; see `hf.cache.forward`. cache: of R rows, without their
    last tokens. A row that has ended is evaluated no more, and has zeros.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    attentions: tuple[tuple[Tensor, ...], ...] | None = None
    hidden_states: tuple[tuple[Tensor, ...], ...] | None = None
    cache: SessionCache | None = None


@dataclass(frozen=True)
class Prompts:
    """ids: int64 [B, T], what the sequences begin with, or [B, 0] for embeddings alone. given: what is evaluated, ids
    or embeddings f32 [B, T, C]. real: bool [B, T], which of that is no padding."""

    ids: Tensor
    given: Tensor
    real: Tensor

    def history(self, row: int) -> list[int]:
        """The ids that penalties count."""
        return self.ids[row, self.real[row]].tolist() if self.ids.shape[1] else []


@dataclass(frozen=True)
class Rules:
    """n_new: tokens at most. ends: tokens that end a row. pad: what fills it up then, None: nobody has said. processors
    and criteria: the caller's, as of transformers."""

    options: Options
    n_new: int
    ends: list[int]
    pad: int | None
    processors: list[Callable[[Tensor, Tensor], Tensor]]
    criteria: list[Callable[[Tensor, None], Any]]

    def processed(self, sequences: Tensor, scores: Tensor) -> Tensor:
        """Scores f32 [R, V] behind sequences [R, n]."""
        for processor in self.processors:
            scores = processor(sequences.to(scores.device), scores)
        return scores

    def stops(self, sequences: Tensor) -> Tensor:
        """bool [R]: which sequences [R, n] their last token has ended."""
        stopped = torch.isin(sequences[:, -1], torch.tensor(self.ends, dtype=torch.int64))
        for criterion in self.criteria:
            stopped = stopped | torch.as_tensor(criterion(sequences, None)).bool().cpu()
        return stopped

    def check_padding(self, needed: bool) -> None:
        if needed and self.pad is None:
            raise ValueError("generate: a row has ended before others, wanted a pad_token_id")


class Steps:
    """Evaluates the rows of a generation, and keeps of each step what its output shall have, on `device`.

    cache: a session for each row. logits: of each row [V], after its last token that was evaluated.
    """

    def __init__(self, model: CausalLM, cache: SessionCache, options: Options, device: torch.device):
        self.model, self.cache, self.device = model, cache, device
        self.logits: list[Tensor] = []
        self._returns_dict = options.return_dict_in_generate
        self._kept: dict[str, list] = {
            name: [] for name in _OUTPUTS if self._returns_dict and getattr(options, f"output_{name}")
        }

    def begin(self, prompts: Prompts, copies: int) -> None:
        """Evaluate the prompts; from here on there are so many rows of each."""
        self._evaluate(prompts.given, prompts.real, copies)
        self.cache.batch_repeat_interleave(copies)

    def advance(self, tokens: Tensor, going: Tensor) -> None:
        """Evaluate the tokens [R] of the rows that go on, bool [R], in one batch."""
        self._evaluate(tokens[:, None].to(self.device), going[:, None])

    def keeps(self, name: str) -> bool:
        return name in self._kept

    def keep_scores(self, scores: Tensor, going: Tensor) -> None:
        """Note the scores [R, V] of a step, if they are wanted."""
        if self.keeps("scores"):
            self._kept["scores"].append(scores.masked_fill(~going[:, None].to(scores.device), 0.0).to(self.device))

    def result(self, sequences: Tensor, **beams: Tensor | None) -> Tensor | GenerateOutput:
        """What `generate` returns; beams: the fields that only these have."""
        sequences = sequences.to(self.device)
        if not self._returns_dict:
            return sequences
        beams = {name: None if value is None else value.to(self.device) for name, value in beams.items()}
        kept = {name: tuple(values) for name, values in self._kept.items()}
        return GenerateOutput(sequences=sequences, cache=self.cache, **kept, **beams)

    def _evaluate(self, given: Tensor, real: Tensor, copies: int = 1) -> None:
        looks = self.keeps("hidden_states"), self.keeps("attentions")
        found = evaluate(self.model, self.cache, given, real, ON_DEVICE, *looks)
        fresh = [logits for logits in found.logits for _ in range(copies)]
        if self.keeps("logits"):
            zeros = torch.zeros(1, self.model.config.n_vocab)
            rows = [(each if len(each) else zeros).to(self.device) for each in fresh]
            self._kept["logits"].append(torch.cat(rows))
        self.logits = [each[0] if len(each) else self.logits[row] for row, each in enumerate(fresh)]
        for name, values in (("hidden_states", found.hidden_states), ("attentions", found.attentions)):
            if values is not None:
                self._kept[name].append(tuple(value.repeat_interleave(copies, 0) for value in values))
