"""What a model can do and what it is made of, in a few facts, from its config."""

from collections import Counter
from dataclasses import dataclass

from dasllama_torch.chat.caps import ChatCaps
from dasllama_torch.config import DecoderConfig, LayerSpec
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """architecture: `general.architecture`. context: tokens that the model was made for. vocabulary, chat_template:
    whether the file has one. layers: kind of layer -> how many, in the order of their first.

    rewinds: whether a session can go back to any position; otherwise only to a checkpoint, because a layer keeps a
    state instead of its tokens. experts, experts_used: of a layer, and for each token; 0 in a dense model.
    positions: how they are encoded, "rope" and what scales it ("yarn", "llama3", "longrope", "linear"), "m-rope" for
    several axes, "partial" if some dims of a head are not rotated, "none" in layers without. chat: what its template
    can do, None where there is none that works.
    """

    architecture: str
    context: int
    vocabulary: bool
    chat_template: bool
    layers: dict[str, int]
    rewinds: bool
    experts: int
    experts_used: int
    positions: tuple[str, ...]
    chat: ChatCaps | None

    @classmethod
    def of(cls, config: DecoderConfig, metadata: Metadata, tokenizer: Tokenizer) -> "Caps":
        """The caps of a model of this config whose file has this metadata and vocabulary."""
        moe = next((layer.moe for layer in config.layers if layer.moe), None)
        positions = dict.fromkeys(word for layer in config.layers if not layer.delta for word in _positions(layer))
        return cls(
            architecture=config.arch,
            context=config.n_ctx,
            vocabulary="tokenizer.ggml.tokens" in metadata,
            chat_template="tokenizer.chat_template" in metadata,
            layers=dict(Counter(map(_kind, config.layers))),
            rewinds=not any(layer.delta for layer in config.layers),
            experts=moe.n_experts if moe else 0,
            experts_used=moe.n_used if moe else 0,
            positions=tuple(positions),
            chat=ChatCaps.of_file(metadata, tokenizer),
        )

    def __str__(self) -> str:
        layers = ", ".join(f"{n} {kind}" for kind, n in self.layers.items())
        experts = f"; {self.experts_used} of {self.experts} experts for each token" if self.experts else ""
        back = "sessions go back anywhere" if self.rewinds else "sessions go back to checkpoints"
        chat = f"; chat: {self.chat}" if self.chat else ""
        return f"layers: {layers}{experts}; positions: {', '.join(self.positions)}; {back}{chat}"


def _kind(layer: LayerSpec) -> str:
    if layer.delta:
        kind = "gated delta net"
    elif layer.kv_source is not None:
        kind = "attention over an earlier layer's keys"
    else:
        kind = "attention"
    window = f" over {layer.window} tokens" if layer.window else ""
    return kind + window + (" with experts" if layer.moe else "")


def _positions(layer: LayerSpec) -> list[str]:
    rope = layer.rope
    if rope is None:
        return ["none"]
    said = {
        "yarn": rope.yarn,
        "llama3": rope.freq_factors,
        "longrope": rope.long,
        "linear": rope.linear_factor != 1.0,
        "partial": rope.dim < layer.head_dim,
    }
    return ["m-rope" if rope.axes else "rope", *(word for word, there in said.items() if there)]
