"""Gemma 4 (text): local and global layers of different head sizes, norms on q, k and v, unscaled scores, GeGLU, norms
before and after each part, a scalar for each layer. Global layers may take v from k; in 26B-A4B experts add to every
layer's FFN; in E2B and E4B every layer has an embedding table of its own, and the last layers read the keys and values
of earlier ones.
Source: Gemma 4 (Google DeepMind 2026); GGUF arch `gemma4`.
T tokens of the ragged batch, C embedding, P embedding of each layer's own table, L layers, H query heads, G kv heads, D
head dim."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from dasllama_torch.config import DecoderConfig, MoESpec, read_geometry, read_moe, read_rope
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.source import TensorSource
from dasllama_torch.modules.attention import PagedAttention
from dasllama_torch.modules.base import Module
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.modules.decoder import Decoder
from dasllama_torch.modules.ffn import ACTS, GatedMLP
from dasllama_torch.modules.linear import Embedding, F32Linear, Linear
from dasllama_torch.modules.moe import Experts, choose
from dasllama_torch.modules.norm import RMSNorm, WeightlessRMSNorm
from dasllama_torch.modules.rope import Rope
from dasllama_torch.ops.gated_act import gated_act
from dasllama_torch.step import Step

IGNORED: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """n_embd_layer: width of the layers' own embeddings, 0 if they have none. logit_softcap: bound of the logits."""

    n_embd_layer: int
    logit_softcap: float

    @property
    def causal_because(self) -> str:
        return "E2B and E4B read pictures causally, too" if self.n_embd_layer else super().causal_because

    @classmethod
    def from_gguf(cls, md: Metadata, w: TensorSource) -> "Gemma4Config":
        g = read_geometry(md, w)
        a = md.arch
        moe = read_moe(md, renormalize=True)
        is_local = a.bools("attention.sliding_window_pattern", length=g.n_layers)
        window = a.int("attention.sliding_window", min=1)
        local_dim = a.int("attention.key_length_swa", min=2, max=4096)
        a.expect("attention.value_length_swa", local_dim)
        a.expect("rope.dimension_count_swa", local_dim)
        if local_dim % 2:
            raise UnsupportedModel(f"{md.origin}: head size {local_dim} is odd, wanted an even one for rotary pairs")
        # The factors of global layers leave all but the first pairs as they are ("proportional" rope).
        factors = tuple(w.f32("rope_freqs.weight", g.head_dim // 2).tolist()) if w.has("rope_freqs.weight") else None
        everywhere = read_rope(md, g.head_dim, factors)
        theta = a.float("rope.freq_base_swa", 10000.0, min=1.0)
        local = replace(everywhere, dim=local_dim, theta=theta, linear_factor=1.0, freq_factors=None)
        first_shared = g.n_layers - a.int("attention.shared_kv_layers", 0, min=0, max=g.n_layers - 1)

        def source(i: int) -> int | None:
            """The last layer of i's kind before those that share."""
            if i < first_shared:
                return None
            same = [j for j in range(first_shared) if is_local[j] == is_local[i] and g.n_kv_heads[j] == g.n_kv_heads[i]]
            if not same:
                raise UnsupportedModel(
                    f"{md.origin}: layer {i} shares keys, and no layer before {first_shared} is alike"
                )
            return same[-1]

        def layer(i: int):
            if is_local[i]:
                return g.layer(i, rope=local, head_dim=local_dim, window=window, kv_source=source(i), moe=moe)
            return g.layer(i, rope=everywhere, kv_source=source(i), moe=moe)

        return cls.build(
            md,
            g,
            map(layer, range(g.n_layers)),
            n_embd_layer=a.int("embedding_length_per_layer_input", 0, min=0, max=g.n_embd),
            logit_softcap=a.float("final_logit_softcapping", 0.0, min=0.0),
        )


class Gemma4Attention(Module):
    def __init__(self, cfg: Gemma4Config, w: TensorSource, layer: int):
        super().__init__()
        spec = cfg.layers[layer]
        C, H, G, D = cfg.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.head_dim, self.has_kv = D, spec.kv_source is None
        self.q_proj = Linear(w, "attn_q", H * D, C)
        self.q_norm = RMSNorm(w, "attn_q_norm", D, cfg.norm_eps)
        if self.has_kv:
            v_from_k = not spec.window and not w.has("attn_v.weight")
            self.k_proj = Linear(w, "attn_k", G * D, C)
            self.v_proj = None if v_from_k else Linear(w, "attn_v", G * D, C)
            self.k_norm = RMSNorm(w, "attn_k_norm", D, cfg.norm_eps)
            self.v_norm = WeightlessRMSNorm(cfg.norm_eps)
        self.o_proj = Linear(w, "attn_output", C, H * D)
        self.rope = Rope(spec.rope)
        is_source = any(other.kv_source == layer for other in cfg.layers)
        self.attn = PagedAttention(
            layer, scale=1.0, window=spec.window, source=spec.kv_source, is_source=is_source, causal=not spec.window
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [..., T, H, D]
        q, k, v = self.rope(q, step), None, None
        if self.has_kv:
            k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [..., T, G, D]
            v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)) if self.v_proj else k
            k, v = self.rope(self.k_norm(k), step), self.v_norm(v)
        return self.o_proj(self.attn(q, k, v, step).flatten(-2))


class Gemma4Router(Module):
    """x [T, C] -> logits [T, E] (transformers: their softmax), weights and ids [T, k]; it norms x on its own."""

    def __init__(self, w: TensorSource, n_embd: int, spec: MoESpec, eps: float):
        super().__init__()
        self.spec, self.root = spec, n_embd**-0.5
        self.norm = WeightlessRMSNorm(eps)
        self.proj = F32Linear(w, "ffn_gate_inp", spec.n_experts, n_embd)
        self.scale = nn.Parameter(w.f32("ffn_gate_inp.scale", n_embd), requires_grad=False)
        self.per_expert_scale = nn.Parameter(w.f32("ffn_down_exps.scale", spec.n_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.proj(self.norm(x) * self.scale * self.root)
        weights, ids = choose(logits, self.spec)
        return logits, weights * self.per_expert_scale[ids], ids


class Gemma4DecoderLayer(Module):
    def __init__(self, cfg: Gemma4Config, w: TensorSource, layer: int):
        super().__init__()
        C, P, eps, moe = cfg.n_embd, cfg.n_embd_layer, cfg.norm_eps, cfg.layers[layer].moe
        self.self_attn = Gemma4Attention(cfg, w, layer)
        self.mlp = GatedMLP(w, C, cfg.layers[layer].ffn_width, "gelu_tanh")
        self.input_layernorm = RMSNorm(w, "attn_norm", C, eps)
        self.post_attention_layernorm = RMSNorm(w, "post_attention_norm", C, eps)
        self.pre_feedforward_layernorm = RMSNorm(w, "ffn_norm", C, eps)
        self.post_feedforward_layernorm = RMSNorm(w, "post_ffw_norm", C, eps)
        self.register_buffer("layer_scalar", w.f32("layer_output_scale.weight", 1))
        self.has_experts = moe is not None
        if moe:
            self.router = Gemma4Router(w, C, moe, eps)
            self.experts = Experts(w, C, moe, "gelu_tanh")
            self.post_feedforward_layernorm_1 = RMSNorm(w, "post_ffw_norm_1", C, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(w, "pre_ffw_norm_2", C, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(w, "post_ffw_norm_2", C, eps)
        if P:
            self.per_layer_input_gate = Linear(w, "inp_gate", P, C)
            self.per_layer_projection = Linear(w, "proj", C, P)
            self.post_per_layer_input_norm = RMSNorm(w, "post_norm", C, eps)

    def forward(self, x: Tensor, step: Step, own: Tensor | None) -> Tensor:
        """own [..., T, P]: the tokens' embeddings of this layer."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(self._routed(x))
        x = x + self.post_feedforward_layernorm(y)
        if own is not None:
            gated = gated_act(self.per_layer_input_gate(x), own, ACTS["gelu_tanh"])
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar

    def _routed(self, x: Tensor) -> Tensor:
        """The experts' part; the router sees x as it is."""
        rows = x.flatten(0, -2)
        _, weights, ids = self.router(rows)
        return self.experts(self.pre_feedforward_layernorm_2(rows), ids, weights).view(x.shape)


class Gemma4Decoder(Decoder):
    def __init__(self, cfg: Gemma4Config, w: TensorSource):
        super().__init__(cfg, w, Gemma4DecoderLayer, embed_scale=cfg.n_embd**0.5)
        self.shape = L, P = len(cfg.layers), cfg.n_embd_layer
        if P:
            self.embed_tokens_per_layer = Embedding(w, "per_layer_token_embd", cfg.n_vocab, L * P, scale=P**0.5)
            self.per_layer_model_projection = Linear(w, "per_layer_model_proj", L * P, cfg.n_embd)
            self.per_layer_projection_norm = RMSNorm(w, "per_layer_proj_norm", P, cfg.norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Embeddings x [B, T, C] -> normed hidden states [B, T, C]; ids of the rows are in the step."""
        L, P = self.shape
        for layer, own in zip(self.layers, self._own(x, step) if P else [None] * L, strict=True):
            x = layer(x, step, own)
        return self.norm(x)

    def _own(self, x: Tensor, step: Step) -> tuple[Tensor, ...]:
        """Each layer's own embeddings [B, T, P]: looked up by id, and projected from the model's."""
        if step.input_ids is None:
            raise ValueError("wanted input_ids: each layer of this model looks them up in a table of its own")
        ids = self.embed_tokens_per_layer(step.input_ids).unflatten(-1, self.shape)  # [B, T, L, P]
        context = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        context = self.per_layer_projection_norm(context.unflatten(-1, self.shape))
        return ((context + ids) * 2**-0.5).unbind(-2)


class Gemma4ForCausalLM(CausalLM):
    def __init__(self, cfg: Gemma4Config, w: TensorSource):
        super().__init__(cfg, w, Gemma4Decoder(cfg, w), logit_softcap=cfg.logit_softcap)
