"""What a model is, worked out once from its metadata: frozen dataclasses that modules, caches and the engine read.

A family's config extends `DecoderConfig`; facts that differ by layer stand in `layers`, and nothing later derives them
anew.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.metadata import REQUIRED, Metadata
from dasllama_torch.gguf.model_types import MODEL_TYPES
from dasllama_torch.gguf.source import TensorSource

MAX_LAYERS, MAX_WIDTH, MAX_CONTEXT = 4096, 1 << 22, 1 << 30  # far above any model; below what would exhaust memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies below `low` rotations are interpolated, above `high`
    kept. truncate: the ends of the ramp between them are rounded outward to whole pairs of dims.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a sequence that may hold more than `original_context` tokens has
    its frequencies divided by `factors`, dim/2 of them, in place of the spec's `freq_factors`.

    transformers goes by the tokens in hand and drops its cache where they cross the original context. Here a session
    goes by its n_ctx, for all of its tokens: results do not depend on how they are cut into steps. A forward without a
    cache goes by the tokens in hand.
    """

    factors: tuple[float, ...]
    original_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """One table of rotary angles (Su et al. 2021, arXiv:2104.09864), half-split: dims i and i + dim/2 turn together.

    dim: rotated dims of a head. theta: base. linear_factor: positions are divided by it. yarn: see `Yarn`.
    freq_factors: divisors of the frequencies, dim/2 of them (llama3 scaling, tensor `rope_freqs`).
    long: see `LongRope`. attention_factor: cos and sin are multiplied by it, so attention scores by its square.
    axes: which of a row's several positions turns each of the dim/2 frequencies (M-RoPE, Wang et al. 2024,
    arXiv:2409.12191); None: rows have one position.
    """

    dim: int
    theta: float
    linear_factor: float = 1.0
    yarn: Yarn | None = None
    freq_factors: tuple[float, ...] | None = None
    long: LongRope | None = None
    attention_factor: float = 1.0
    axes: tuple[int, ...] | None = None

    def inv_freq(self) -> Tensor:
        """Radians per position, f32 [dim/2], with the roundings of transformers' `modeling_rope_utils`."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        if self.yarn is not None:
            return self._yarn_inv_freq(self.theta**steps)
        inv_freq = 1.0 / self.theta**steps
        if self.freq_factors is not None:
            inv_freq = inv_freq / torch.tensor(self.freq_factors, dtype=torch.float32)
        return inv_freq / self.linear_factor

    def long_inv_freq(self) -> Tensor:
        """The frequencies of sequences that may outgrow the original context, f32 [dim/2]."""
        return replace(self, freq_factors=self.long.factors).inv_freq()

    def _yarn_inv_freq(self, pos_freqs: Tensor) -> Tensor:
        def dim_of(rotations: float) -> float:
            turns = self.yarn.original_context / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dim_of(self.yarn.beta_fast), dim_of(self.yarn.beta_slow)
        if self.yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = (high - low) or 0.001
        kept = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        return 1.0 / (self.yarn.factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSpec:
    """A gated delta rule (Yang et al. 2024, arXiv:2412.06464) behind a causal convolution over its inputs.

    n_v_heads states [k_dim, v_dim]; a key head serves n_v_heads / n_k_heads of them that follow each other. conv_taps:
    inputs that the convolution sees, the present one included.
    """

    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of all heads."""
        return 2 * self.n_k_heads * self.k_dim + self.n_v_heads * self.v_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): n_used of n_experts FFNs of `width` per token.

    gate, renormalize, scale: how logits become weights, see ops/moe_router.py; gate is "softmax" or "sigmoid".
    shared_width: of an FFN that every token goes through as well; 0: there is none.
    """

    n_experts: int
    n_used: int
    width: int
    gate: str
    renormalize: bool
    scale: float = 1.0
    shared_width: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One decoder layer. window: keys seen, self included; 0 means all. rope None: no positional encoding.

    kv_source: an earlier layer whose keys and values this one reads, having none of its own.
    delta: a recurrent layer, which has no attention; the heads are then those of the others.
    moe: experts in place of one FFN of ffn_width.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    rope: RopeSpec | None
    window: int = 0
    kv_source: int | None = None
    delta: DeltaSpec | None = None
    moe: MoESpec | None = None

    @property
    def cache(self) -> "CacheSpec | StateSpec | None":
        """What this layer keeps of a sequence."""
        if self.kv_source is not None:
            return None
        if (d := self.delta) is not None:
            return StateSpec(
                conv_taps=d.conv_taps, conv_channels=d.conv_channels, n_heads=d.n_v_heads, k_dim=d.k_dim, v_dim=d.v_dim
            )
        return CacheSpec(n_kv_heads=self.n_kv_heads, k_dim=self.head_dim, v_dim=self.head_dim, window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """Keys [n_kv_heads, k_dim] and values [n_kv_heads, v_dim] of every token, in pages.

    window: only the last so many tokens are ever read; 0: all.
    """

    n_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """Of a whole sequence: the last inputs [conv_taps - 1, conv_channels] of a convolution and a state
    [n_heads, k_dim, v_dim].
    """

    conv_taps: int
    conv_channels: int
    n_heads: int
    k_dim: int
    v_dim: int

    @property
    def numel(self) -> int:
        return (self.conv_taps - 1) * self.conv_channels + self.n_heads * self.k_dim * self.v_dim


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Facts that every decoder has, in GGUF's words; properties give the names that Hugging Face tools ask for.

    arch: `general.architecture`. n_ctx: the context that the model was made for. norm_eps: epsilon of all its RMS
    norms. pooling: how the tokens of a text become one vector: "none" (the file does not say), "mean", "cls" (the first
    token's), "last", "rank" (a score, no vector).
    """

    arch: str
    n_vocab: int
    n_ctx: int
    n_embd: int
    norm_eps: float
    pooling: str
    layers: tuple[LayerSpec, ...]

    @property
    def causal_because(self) -> str:
        """What forbids that a row sees those after it, "" if nothing does."""
        return "its recurrent layers go from row to row" if any(layer.delta for layer in self.layers) else ""

    @classmethod
    def build(cls, md: Metadata, g: "Geometry", layers: Iterable[LayerSpec], **own):
        """The config of md's architecture with the shared facts of `g`; own: the family's further fields."""
        return cls(
            arch=md.architecture,
            n_vocab=g.n_vocab,
            n_ctx=g.n_ctx,
            n_embd=g.n_embd,
            norm_eps=g.norm_eps,
            pooling=g.pooling,
            layers=tuple(layers),
            **own,
        )

    is_encoder_decoder = False
    use_cache = False  # of a forward, unless it is asked for

    model_type = property(lambda self: MODEL_TYPES[self.arch])
    vocab_size = property(lambda self: self.n_vocab)
    hidden_size = property(lambda self: self.n_embd)
    num_hidden_layers = property(lambda self: len(self.layers))
    max_position_embeddings = property(lambda self: self.n_ctx)
    rms_norm_eps = property(lambda self: self.norm_eps)
    num_attention_heads = property(lambda self: self.layers[0].n_heads)
    num_key_value_heads = property(lambda self: self.layers[0].n_kv_heads)
    head_dim = property(lambda self: self.layers[0].head_dim)
    intermediate_size = property(lambda self: self.layers[0].ffn_width)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "DecoderConfig":
        """This one: what a model sees and hears has no part in it."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The facts by Hugging Face's names; those that differ by layer are of the first."""
        return {name: getattr(self, name) for name in _HF_NAMES}


_HF_NAMES = (
    "model_type", "is_encoder_decoder", "use_cache", "vocab_size", "hidden_size", "num_hidden_layers",
    "max_position_embeddings", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",
)  # fmt: skip
_POOLINGS = ("none", "mean", "cls", "last", "rank")  # in the order of llama.cpp's numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The keys that all families share, read and checked against each other."""

    n_layers: int
    n_ctx: int
    n_embd: int
    n_vocab: int
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    head_dim: int
    ffn_width: tuple[int, ...]
    norm_eps: float
    pooling: str

    def layer(self, i: int, **more) -> LayerSpec:
        """The spec of layer i; more: `rope`, and what else differs by layer."""
        shared = dict(n_heads=self.n_heads[i], n_kv_heads=self.n_kv_heads[i], ffn_width=self.ffn_width[i])
        return LayerSpec(**{**shared, "head_dim": self.head_dim, **more})


def read_geometry(md: Metadata, w: TensorSource, *, experts_only: bool = False) -> Geometry:
    """Read the shared keys of md's architecture; the vocabulary's size is the number of rows of `token_embd`.

    experts_only: if a file of the family has experts, all layers have, and it may lack the width of another FFN.
    Raises GGUFError for a missing or impossible value, UnsupportedModel for a feature that no family here has.
    """
    a = md.arch
    n_layers = a.int("block_count", min=1, max=MAX_LAYERS)
    n_embd = a.int("embedding_length", min=1, max=MAX_WIDTH)
    n_heads = a.ints("attention.head_count", length=n_layers, min=1, max=MAX_WIDTH)
    n_kv_heads = a.ints("attention.head_count_kv", n_heads, length=n_layers, min=1, max=MAX_WIDTH)
    if any(h % g for h, g in zip(n_heads, n_kv_heads, strict=True)):
        raise UnsupportedModel(f"{md.origin}: query heads {n_heads} are no multiple of kv heads {n_kv_heads}")
    head_dim = a.int("attention.key_length", n_embd // n_heads[0], min=2, max=4096)
    a.expect("attention.value_length", head_dim)
    if head_dim % 2:
        raise UnsupportedModel(f"{md.origin}: head size {head_dim} is odd, wanted an even one for rotary pairs")
    n_vocab = w.rows("token_embd.weight")
    found = a.int("vocab_size", n_vocab, min=1)
    if found != n_vocab:
        raise UnsupportedModel(f"{md.origin}: vocab_size is {found}, and the embedding table has {n_vocab} rows")
    no_ffn = (0,) * n_layers if experts_only and "expert_count" in a else REQUIRED
    return Geometry(
        n_layers=n_layers,
        n_ctx=a.int("context_length", min=1, max=MAX_CONTEXT),
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_width=a.ints("feed_forward_length", no_ffn, length=n_layers, min=1, max=MAX_WIDTH),
        norm_eps=a.float("attention.layer_norm_rms_epsilon", min=0.0, max=1.0),
        pooling=_POOLINGS[a.int("pooling_type", 0, min=0, max=len(_POOLINGS) - 1)],
    )


def read_rotary_dim(md: Metadata, head_dim: int) -> int:
    """Dims of a head that are rotated, for families that leave some as they are; all if no key tells."""
    dim = md.arch.int("rope.dimension_count", head_dim, min=2, max=head_dim)
    if dim % 2:
        raise UnsupportedModel(f"{md.origin}: {dim} dims of a head are rotated, wanted an even number for pairs")
    return dim


def read_rope(md: Metadata, dim: int, freq_factors: tuple[float, ...] | None = None) -> RopeSpec:
    """Read the `rope.*` keys of md's architecture: plain, linear or YaRN scaling; others are refused by name.

    dim: rotated dims of a head, which `rope.dimension_count` must equal if it is there.
    """
    a = md.arch
    a.expect("rope.dimension_count", dim)
    theta = a.float("rope.freq_base", 10000.0, min=1.0)
    a.expect("rope.scaling.type", "none", "linear", "yarn")
    kind = a.str("rope.scaling.type", "linear" if "rope.scale_linear" in a else "none")
    factor = a.float("rope.scaling.factor", a.float("rope.scale_linear", 1.0, positive=True), positive=True)
    given_factor = a.float("rope.scaling.attn_factor", 1.0, positive=True)
    original = a.int("rope.scaling.original_context_length", a.int("context_length", min=1), min=1)
    a.expect("rope.scaling.finetuned", True, False)  # tells of training, changes nothing
    if kind != "yarn":
        return RopeSpec(
            dim=dim,
            theta=theta,
            linear_factor=factor if kind == "linear" else 1.0,
            freq_factors=freq_factors,
            attention_factor=given_factor,
        )
    if freq_factors is not None:
        raise UnsupportedModel(f"{md.origin}: YaRN together with tensor rope_freqs is not implemented")
    a.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    a.expect("rope.scaling.yarn_attn_factor", 1.0)
    yarn = Yarn(
        factor=factor,
        original_context=original,
        beta_fast=a.float("rope.scaling.yarn_beta_fast", 32.0, positive=True),
        beta_slow=a.float("rope.scaling.yarn_beta_slow", 1.0, positive=True),
    )
    # mscale and mscale_all_dim of DeepSeek's code; the former is 1 in all files, and the latter 0 where there is none.
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    magnitude = (growth + 1.0) / (growth * a.float("rope.scaling.yarn_log_multiplier", 0.0, min=0.0) + 1.0)
    return RopeSpec(dim=dim, theta=theta, yarn=yarn, attention_factor=given_factor * magnitude)


def read_delta(md: Metadata, n_layers: int) -> list[DeltaSpec | None]:
    """Read the `ssm.*` keys of md's architecture: the spec of each recurrent layer, None for one with attention.

    n_layers: without blocks that draft tokens, which `attention.recurrent_layers` may or may not list.
    """
    a = md.arch
    every = a.int("full_attention_interval", 4, min=1, max=MAX_LAYERS)
    by_interval = tuple((i + 1) % every != 0 for i in range(n_layers))
    recurrent = a.bools("attention.recurrent_layers", by_interval)
    if len(recurrent) not in (n_layers, a.int("block_count")):
        raise GGUFError(
            f"{md.origin}: attention.recurrent_layers has {len(recurrent)} entries, wanted one for each of the "
            f"{n_layers} layers"
        )
    k_heads = a.int("ssm.group_count", min=1, max=MAX_WIDTH)
    v_heads = a.int("ssm.time_step_rank", min=1, max=MAX_WIDTH)
    inner = a.int("ssm.inner_size", min=1, max=MAX_WIDTH)
    if v_heads % k_heads or inner % v_heads:
        raise UnsupportedModel(
            f"{md.origin}: ssm.time_step_rank is {v_heads}, wanted a multiple of ssm.group_count {k_heads} and a "
            f"divisor of ssm.inner_size {inner}"
        )
    delta = DeltaSpec(
        n_k_heads=k_heads,
        n_v_heads=v_heads,
        k_dim=a.int("ssm.state_size", min=1, max=MAX_WIDTH),
        v_dim=inner // v_heads,
        conv_taps=a.int("ssm.conv_kernel", min=1, max=64),
    )
    return [delta if is_recurrent else None for is_recurrent in recurrent[:n_layers]]


def read_axes(md: Metadata, dim: int, interleaved: bool) -> tuple[int, ...]:
    """`RopeSpec.axes` of M-RoPE from `rope.dimension_sections`: how many of the dim/2 frequencies turn with time,
    height and width. interleaved: the axes take turns, and time has what remains; otherwise each has a run.
    """
    sections = md.arch.ints("rope.dimension_sections", length=4, min=0, max=dim)
    if sum(sections) != dim // 2 or sections[3]:
        raise UnsupportedModel(
            f"{md.origin}: rope.dimension_sections are {sections}, wanted three that add up to {dim // 2}, and 0"
        )
    if not interleaved:
        return tuple(axis for axis, n in enumerate(sections) for _ in range(n))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(dim // 2))


_GATES = {1: "softmax", 2: "sigmoid", 3: "softmax"}  # llama.cpp's numbers; 3 is the softmax of the chosen logits


def read_moe(md: Metadata, *, gate: str = "softmax", renormalize: bool, shared: bool = False) -> MoESpec | None:
    """Read the `expert_*` keys of md's architecture; None without `expert_count`.

    gate, renormalize: what the family does where no key says otherwise. shared: whether it knows a shared expert; if it
    does not, keys of one stay unread and are refused. Raises UnsupportedModel for experts in groups.
    """
    a = md.arch
    n_experts = a.int("expert_count", 0, min=0, max=MAX_WIDTH)
    if not n_experts:
        return None
    a.expect("expert_group_count", 0, 1)
    a.expect("expert_group_used_count", 0, 1)
    a.expect("expert_gating_func", *_GATES)
    func = a.int("expert_gating_func", 0)
    width = a.int("expert_feed_forward_length", min=1, max=MAX_WIDTH)
    shared_width = 0
    if shared:
        count = a.int("expert_shared_count", 0, min=0, max=MAX_WIDTH)
        shared_width = a.int("expert_shared_feed_forward_length", count * width, min=0, max=MAX_WIDTH)
    return MoESpec(
        n_experts=n_experts,
        n_used=a.int("expert_used_count", min=1, max=n_experts),
        width=width,
        gate=_GATES.get(func, gate),
        renormalize=a.bool("expert_weights_norm", renormalize) or func == 3,
        scale=a.float("expert_weights_scale", 1.0, min=0.0) or 1.0,  # a file may say 0 for none
        shared_width=shared_width,
    )


def leave_nextn(md: Metadata, w: TensorSource, n_layers: int) -> int:
    """How many of n_layers blocks remain without those at the end that predict further tokens (NextN, DeepSeek-V3,
    arXiv:2412.19437): these are left in the file, with a warning.
    """
    n_nextn = md.arch.int("nextn_predict_layers", 0, min=0, max=n_layers - 1)
    for i in range(n_layers - n_nextn, n_layers):
        w.layer(i).leave()
    if n_nextn:
        warnings.warn(f"{md.origin}: {n_nextn} NextN block(s) for drafting tokens are not used yet", stacklevel=5)
    return n_layers - n_nextn
