"""The stack that all decoders share: embedding, blocks, final norm."""

from collections.abc import Callable

from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.base import Module, ModuleList
from dasllama_torch.modules.linear import Embedding
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.step import Step


class Decoder(Module):
    """block(cfg, w, layer) makes one decoder layer, which maps x [..., T, C] and a Step to the next x."""

    def __init__(self, cfg: DecoderConfig, w: TensorSource, block: Callable[..., nn.Module], embed_scale: float = 1.0):
        super().__init__()
        self.embed_tokens = Embedding(w, "token_embd", cfg.n_vocab, cfg.n_embd, scale=embed_scale)
        self.layers = ModuleList(block(cfg, w.layer(i), i) for i in range(len(cfg.layers)))
        self.norm = RMSNorm(w, "output_norm", cfg.n_embd, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Embeddings x [B, T, C] -> normed hidden states [B, T, C]."""
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)
