"""CausalLM: a decoder stack and its head, called by the engine with a Step and by people as a Hugging Face model."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig
from dasllama_torch.errors import TokenizerError
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.linear import Embedding, Linear
from dasllama_torch.ops.softcap import softcap
from dasllama_torch.step import Step


@dataclass
class CausalLMOutput:
    """logits: f32 [B, T, V], or [B, n, V] where only some rows were asked for."""

    logits: Tensor


class CausalLM(Module):
    """`model` (the decoder stack: hidden states from ids or embeddings and a Step) and `lm_head`.

    config: the family's frozen config. metadata: all keys of the file. tokenizer: built from them. logit_softcap: bound
    of the logits, see ops/softcap.py; 0: none.
    """

    def __init__(self, cfg: DecoderConfig, w: TensorSource, model: nn.Module, logit_softcap: float = 0.0):
        super().__init__()
        self.config = cfg
        self.model = model
        self.logit_softcap = logit_softcap
        # A file without a head of its own shares the embedding table with it.
        self.lm_head = Linear(w, "output" if w.has("output.weight") else "token_embd", cfg.n_vocab, cfg.n_embd)
        self.metadata: Metadata | None = None
        self.tokenizer = None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int = 0,
        *,
        step: Step | None = None,
    ) -> CausalLMOutput:
        """Logits of ids [B, T] or embeddings [B, T, C].

        attention_mask [B, T]: 0 marks padding, on either side. position_ids [B, T], or [3, B, T] for M-RoPE: rotary
        positions, 0 ... T-1 if absent.
        logits_to_keep: logits of the last n positions only; 0 keeps all. step: the engine's, in place of all the
        former.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("wanted either input_ids or inputs_embeds")
        x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3:
            raise ValueError(
                f"wanted ids [B, T] or embeddings [B, T, C], found rank {x.dim() - (inputs_embeds is None)}"
            )
        if step is None:
            step = Step.padded(x.shape[0], x.shape[1], attention_mask, position_ids, x.device)
            step.input_ids = input_ids
        hidden = self.model(x, step)
        if step.logit_rows is not None:
            hidden = hidden[:, step.logit_rows]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return CausalLMOutput(logits=self.compute_logits(hidden))

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
