"""CausalLM: a decoder stack and its head, called by the engine with a Step and by people as a Hugging Face model."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig
from dasllama_torch.errors import DasllamaError, TokenizerError
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.linear import Embedding, Linear, Packed
from dasllama_torch.modules.outputs import (
    CausalLMOutput,
    ModelOutput,
    keep_rows,
    next_token_loss,
    selected,
    watched,
)
from dasllama_torch.ops.softcap import softcap
from dasllama_torch.step import Step


class GenerationSettings(SimpleNamespace):
    """Settings of `generate` by transformers' names, as attributes; None for one that is not set."""

    def to_diff_dict(self) -> dict[str, Any]:
        """Those that are set, as transformers' `GenerationConfig` gives them."""
        return dict(vars(self))

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # what copies and pickles look for
            raise AttributeError(name)


class CausalLM(Module):
    """`model` (the decoder stack: hidden states from ids or embeddings and a Step) and `lm_head`.

    config: the family's frozen config. metadata: all keys of the file. tokenizer: built from them. logit_softcap: bound
    of the logits, see ops/softcap.py; 0: none.
    name_or_path: where it was loaded from. generation_config: settings of `generate`, a folder's own to begin with;
    transformers' `GenerationConfig` will do, too. verbs: what takes sessions, `hf.verbs.Verbs`; None in a model that
    `build_model` has not built. placement: of a model that lies on two devices, which parts do where
    (`engine.placement`); None for any other.
    """

    main_input_name = "input_ids"
    base_model_prefix = "model"

    def __init__(self, cfg: DecoderConfig, w: TensorSource, model: nn.Module, logit_softcap: float = 0.0):
        super().__init__()
        self.config = cfg
        self.model = model
        self.logit_softcap = logit_softcap
        # A file without a head of its own shares the embedding table with it.
        self.lm_head = Linear(w, "output" if w.has("output.weight") else "token_embd", cfg.n_vocab, cfg.n_embd)
        self.metadata: Metadata | None = None
        self.tokenizer = None
        self.name_or_path = ""
        self.generation_config = GenerationSettings()
        self.verbs = None
        self.placement = None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        past_key_values: Any = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        step: Step | None = None,
    ) -> CausalLMOutput | tuple:
        """Logits of ids [B, T] or embeddings f32 [B, T, C], by the conventions of transformers 5.24.

        attention_mask [B, T]: 0 marks padding, on either side; its rows have logits that mean nothing. position_ids
        [B, T], or [3, B, T] for M-RoPE: rotary positions, 0 ... T-1 whatever the padding if absent. labels [B, T]: ids,
        -100 where none; the loss is of each position's next one. logits_to_keep: see `outputs.keep_rows`.
        output_hidden_states, an index or several of them keep only these. return_dict False: the output as a tuple.

        cache: a session, a list of B of them, or what a forward has given as `cache`; past_key_values is its older
        name. use_cache True: begin one; without, none is made, and the forward has gradients. A cache goes on with the
        tokens that are no padding, and positions count these; attention_mask may cover what is in the cache, too. What
        sessions cannot do raises ValueError, ContextFull or OutOfPages.

        step: the engine's, in place of all but ids or embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("wanted either input_ids or inputs_embeds")
        if past_key_values is not None:
            if cache is not None:
                raise ValueError("cache and past_key_values are one argument, wanted only one of them")
            cache = past_key_values
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given.dim() != (2 if inputs_embeds is None else 3):
            raise ValueError(f"wanted ids [B, T] or embeddings [B, T, C], found rank {given.dim()}")
        if step is not None:
            return CausalLMOutput(logits=self._logits(self._embedded(input_ids, inputs_embeds), step))
        if cache is not None or use_cache:
            looks = output_hidden_states or False, output_attentions or False
            output = self._verbs().forward(self, given, attention_mask, position_ids, cache, logits_to_keep, *looks)
        else:
            x = self._embedded(input_ids, inputs_embeds)
            step = Step.padded(x.shape[0], x.shape[1], attention_mask, position_ids, x.device)
            step.input_ids = input_ids
            output = self._looked_at(x, step, logits_to_keep, output_hidden_states or False, output_attentions or False)
        if labels is not None:
            output.loss = next_token_loss(output.logits, labels)
        return output.to_tuple() if return_dict is False else output

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        return self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds

    def _logits(self, x: Tensor, step: Step) -> Tensor:
        """Of embeddings [B, T, C], for the engine: of the rows that the step names."""
        hidden = self.model(x, step)
        return self.compute_logits(hidden if step.logit_rows is None else hidden[:, step.logit_rows])

    def _looked_at(self, x: Tensor, step: Step, logits_to_keep, hidden_states, attentions) -> CausalLMOutput:
        """Of embeddings [B, T, C], with what is to be seen of the way."""
        if hidden_states is False and not attentions:
            return CausalLMOutput(logits=self.compute_logits(keep_rows(self.model(x, step), logits_to_keep)))
        with watched(self.get_decoder(), hidden_states is not False, attentions) as forwards:
            logits = self.compute_logits(keep_rows(self.model(x, step), logits_to_keep))
        (seen,) = forwards
        return CausalLMOutput(
            logits=logits,
            hidden_states=None if hidden_states is False else selected(tuple(seen.states), hidden_states),
            attentions=tuple(seen.probabilities) if attentions else None,
        )

    def generate(self, inputs: Tensor | None = None, **how) -> Tensor | ModelOutput:
        """Ids int64 [B * num_return_sequences, T + new] that begin with `inputs`, ids [B, T], as in transformers.

        how: input_ids in the place of inputs; inputs_embeds f32 [B, T, C], behind which only new ids are returned
        unless ids are given, too; attention_mask [B, T], generation_config (transformers' or a dict), streamer,
        logits_processor and stopping_criteria (lists), max_new_tokens (20) or max_length, do_sample, temperature, top_k
        (50), top_p, min_p, repetition_penalty, num_beams with length_penalty and early_stopping, num_return_sequences,
        eos_token_id, pad_token_id; and kv_dtype as in `create_session`, f32 in `fp32` mode. return_dict_in_generate
        gives a `hf.steps.GenerateOutput`, with output_scores, output_logits, output_hidden_states, output_attentions as
        they are asked for. What is not given is as the model's generation_config says. Any other is refused by name.

        Ends are those of the vocabulary (`tokenizer.eog_ids`) unless eos_token_id says otherwise; a row that has ended
        is filled up with padding. Padding is neither evaluated nor penalized: a row gets what it would have got alone.
        Draws come from torch's generator; those of beams are transformers', others are not. Hooks work in each step,
        where the rows of all prompts or tokens stand one behind the other, [1, rows, C].
        Raises TypeError or UnsupportedModel for a setting that is not known or not implemented, ValueError for one
        outside its range, OutOfPages.
        """
        with torch.no_grad():
            return self._verbs().generate(self, inputs, **how)

    def _verbs(self):
        if self.verbs is None:
            raise DasllamaError("a model that was not built by build_model has no sessions to keep a cache in")
        return self.verbs

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of what the decoder stack gives, [..., C]."""
        logits = self.lm_head(hidden)
        return softcap(logits, self.logit_softcap) if self.logit_softcap else logits

    def get_decoder(self) -> nn.Module:
        """The decoder stack, wherever the family keeps it."""
        return self.model

    def get_input_embeddings(self) -> Embedding:
        """The embedding table of the decoder stack."""
        return self.get_decoder().embed_tokens

    def get_output_embeddings(self) -> Linear:
        """The head; where a file has none of its own, it holds the embedding table."""
        return self.lm_head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.qweight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations; weights are of the file's types."""
        return torch.float32

    def can_generate(self) -> bool:
        return True

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the weights stand for, packed ones included, a shared head counted once, as in transformers.
        None is trainable."""
        if only_trainable:
            return 0
        packed = [module for module in self.modules() if isinstance(module, Packed)]
        if self.lm_head.gguf_name == self.get_input_embeddings().gguf_name:
            packed.remove(self.lm_head)
        if exclude_embeddings:
            packed = [module for module in packed if not isinstance(module, Embedding)]
        return sum(module.numel() for module in packed) + sum(each.numel() for each in self.parameters())

    @property
    def padding_id(self) -> int:
        """The token that stands for a row of embeddings where layers look tokens up in tables of their own."""
        padding = None if self.tokenizer is None else self.tokenizer.pad_id
        return 0 if padding is None else padding

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of text. add_special: BOS/EOS where the model wants them; parse_special: control tokens by name."""
        return self._tokenizer().encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._tokenizer().decode(ids)

    def piece(self, token: int) -> str:
        """Text of one token; bytes of an incomplete character show as U+FFFD."""
        return self._tokenizer().piece(token)

    def _tokenizer(self):
        if self.tokenizer is None:
            raise TokenizerError("this model was built without a tokenizer")
        return self.tokenizer


class LanguageModel(Module):
    """The decoder stack of a model that also sees: transformers keeps it at `model.language_model`."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.language_model = decoder

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.language_model(x, step)


class ConditionalLM(CausalLM):
    """A CausalLM whose decoder stack is at `model.language_model`."""

    def __init__(self, cfg: DecoderConfig, w: TensorSource, decoder: nn.Module):
        super().__init__(cfg, w, LanguageModel(decoder))

    def get_decoder(self) -> nn.Module:
        return self.model.language_model
