"""Kernels for CUDA one by one, against what the card can do: bytes per second, and products per second.

    python benchmarks/cuda.py [--what few,many,experts,...] [--models 8B] [--types Q4_K,Q6_K] [--few 1,4] [--many 512]

Each line is a call of an op, or of one of the launches that stand for several ops in a captured step, at a shape of a
model. Calls take arguments of their own in turn, enough of them that they come from memory and not from the cache, and
all are one replayed graph, so that the host has no part; what an op does with several launches, the rounding of a
product's activation among them, is within its time. Times are medians over replays. GB/s count what the op has to read
and write at least (`registry.cost_of`: of experts the matrices in use, of a cache the keys that are seen), and are
shares of what a copy of memory moves; TFLOP/s count a multiplication and an addition of each product, and are shares of
the library's product of two bf16 matrices. The nearer of the two shares is the one to look at; where calls take a few
microseconds, most of it is what any launch takes. The ladder of versions stays: `reference` decodes the matrix in plain
torch and multiplies in f32; `float` decodes words in registers and multiplies in f32; `native` takes integer dots;
`steps` and `chunks` are two forms of the gated delta rule. All kernels are compiled before the first line.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types, report, reset_report
from dasllama_torch.ops.causal_conv1d import causal_conv1d_update
from dasllama_torch.ops.delta_gates import delta_gates
from dasllama_torch.ops.embedding import embedding
from dasllama_torch.ops.expert_linear import expert_linear
from dasllama_torch.ops.gated_act import GELU_TANH, SILU, SWIGLU_OAI, gated_act, gated_act_backward
from dasllama_torch.ops.gated_delta_rule import gated_delta_update
from dasllama_torch.ops.kv_codecs import KV_CODECS, KVCodec
from dasllama_torch.ops.kv_write import kv_write
from dasllama_torch.ops.moe_combine import moe_combine
from dasllama_torch.ops.moe_router import SOFTMAX, moe_router
from dasllama_torch.ops.paged_attention import paged_attention
from dasllama_torch.ops.quant_linear import quant_linear
from dasllama_torch.ops.registry import Cost, cost_of, preparing
from dasllama_torch.ops.rms_norm import rms_norm, rms_norm_backward
from dasllama_torch.ops.rope import rope
from dasllama_torch.ops.rope_tables import long_rope_tables, rope_tables
from dasllama_torch.ops.sample_token import sample_token
from dasllama_torch.ops.softcap import softcap, softcap_backward
from dasllama_torch.triton_kernels import combine_round, dequantize, fused_round, gated_delta_rule, quantize_activation
from dasllama_torch.triton_kernels.paged_attention import Shared
from dasllama_torch.triton_kernels.rope_write import rope_write


class Shape(NamedTuple):
    """Of a model: C embedding, H query and G kv heads of D, V vocab, F columns of an FFN or of an expert's; of E
    experts k are used. merged: an expert's gate and up are one matrix. act: of the FFN. window: of half of the layers,
    which have sinks."""

    C: int
    H: int
    G: int
    D: int
    V: int
    F: int
    E: int = 0
    k: int = 0
    merged: bool = False
    act: int = SILU
    window: int = 0

    def matrices(self) -> list[tuple[int, int]]:
        """N, K of those that all tokens meet, each once."""
        ffn = [] if self.E else [(self.F, self.C), (self.C, self.F)]
        all_of_them = [(self.H * self.D, self.C), (self.G * self.D, self.C), (self.C, self.H * self.D)]
        return list(dict.fromkeys([*all_of_them, *ffn, (self.V, self.C)]))

    def experts(self) -> list[tuple[int, int]]:
        return [(2 * self.F if self.merged else self.F, self.C), (self.C, self.F)]


MODELS = {
    "1B": Shape(2048, 32, 8, 64, 128256, 8192),
    "8B": Shape(4096, 32, 8, 128, 128256, 14336),
    "30B-A3B": Shape(2048, 32, 4, 128, 151936, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 64, 8, 64, 201088, 2880, 32, 4, True, SWIGLU_OAI, 128),
}
ROWS_OF_PAGE = 64
CACHE = 4 * 60 * 2**20  # bytes: several times the card's L2
REPLAYS = 7


class Call(NamedTuple):
    """op: an op of the registry, unless the cost says what it has to do."""

    op: Callable
    args: tuple
    cost: Cost | None = None

    def __call__(self):
        return self.op(*self.args)


class Line(NamedTuple):
    """name: of the op, and of the version if there are several. rows: of x, or tokens. make: a call with arguments of
    its own."""

    name: str
    model: str
    shape: str
    rows: int
    make: Callable[[], Call]


def seconds(calls: list[Callable[[], object]]) -> float:
    """Mean time of one of the calls, which are captured as one graph; the median over replays."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


def ceilings() -> tuple[float, float]:
    """Bytes per second that a copy reads and writes; products per second of the library in bf16."""
    a = torch.zeros(2**30, device="cuda")
    b = torch.empty_like(a)
    copied = 2 * a.nbytes / seconds([lambda: torch.neg(a, out=b)] * 4)
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * 8192**3 / seconds([lambda: x @ y] * 3)


def measure(line: Line, copied: float, product: float) -> None:
    first = line.make()
    cost = first.cost or cost_of(first.op, first.args, {}, first())
    count = max(2, min(64, -(-CACHE // cost.nbytes)))
    calls = [first, *(line.make() for _ in range(count - 1))]
    op = line.name.split()[0]
    reset_report()
    spent = seconds(calls)
    kernel = next(iter(report().get(op, {first.op.__name__: 0})))  # a reference, or of no op
    rate = cost.nbytes / spent
    done = cost.operations / spent
    products = f"{done / 1e12:8.1f} {done / product:5.0%}" if done else " " * 14
    print(
        f"{line.name:26} {line.model:11} {line.shape:26} {line.rows:5} {spent * 1e6:9.1f} {rate / 1e9:6.0f} "
        f"{rate / copied:5.0%} {products}  {kernel}",
        flush=True,
    )


# ---- what is measured, by group: lines, whose arguments are made when they are used and do not stay ------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def arange(*bounds: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(*bounds, device="cuda", dtype=dtype)


def packed(qtype: int, *shape: int) -> Tensor:
    """Matrices of random bytes."""
    size = ggml_types.row_bytes(qtype, shape[-1])
    return torch.randint(0, 256, (*shape[:-1], size), dtype=torch.uint8, device="cuda")


def name_of(qtype: int) -> str:
    return ggml_types.GGML_TYPES[qtype].name


def fitting(types: list[int], K: int) -> list[int]:
    return [qtype for qtype in types if K % ggml_types.GGML_TYPES[qtype].block == 0]


def of(op: Callable, *given: object, nbytes: int = 0) -> Callable[[], Call]:
    """Makes a call. given: shapes of tensors of normal f32 numbers, functions that make an argument, and arguments.
    nbytes: what it has to read and write, for launches that are no op's own."""

    def argument(each: object) -> object:
        return randn(*each) if isinstance(each, tuple) else each() if callable(each) else each

    return lambda: Call(op, tuple(map(argument, given)), Cost(nbytes, 0, "") if nbytes else None)


def products(options, rows: list[int]) -> Iterator[Line]:
    """quant_linear at matrices of the models, those of two models once."""
    seen = set()
    for model, s in options.models.items():
        for N, K in s.matrices():
            for qtype in fitting(options.types, K) if (N, K) not in seen else ():
                for M in rows if N < s.V else [M for M in rows if M <= 16]:  # of a prompt few logits are wanted
                    make = functools.partial(_product, quant_linear, qtype, N, K, M, True)
                    yield Line("quant_linear", model, f"{name_of(qtype)} {N} x {K}", M, make)
                if (N, K) == (4096, 4096) and 1 in rows:
                    for name, op in (("float", quant_linear), ("reference", quant_linear.reference)):
                        make = functools.partial(_product, op, qtype, N, K, 1, False)
                        yield Line(f"quant_linear {name}", model, f"{name_of(qtype)} {N} x {K}", 1, make)
            seen.add((N, K))


def _product(op: Callable, qtype: int, N: int, K: int, M: int, native: bool) -> Call:
    args = (randn(M, K), packed(qtype, N, K), qtype, None, native)
    return Call(op, args, quant_linear.cost(*args))


def few(options) -> Iterator[Line]:
    yield from products(options, options.few)


def many(options) -> Iterator[Line]:
    yield from products(options, options.many)


def experts(options) -> Iterator[Line]:
    """expert_linear, each token with experts of its own, and what stands around it."""
    for model, s in options.models.items():
        for N, K in s.experts() if s.E else ():
            for qtype in fitting(options.types, K):
                for T in (1, 4, 16, 64, 512, 2048):
                    make = functools.partial(_experts, s, qtype, N, K, T)
                    yield Line("expert_linear", model, f"{name_of(qtype)} {s.k} of {s.E}, {N} x {K}", T, make)
        for T in (1, 2048) if s.E else ():
            make = of(moe_router, (T, s.E), None, s.k, SOFTMAX, True, 1.0)
            yield Line("moe_router", model, f"{s.k} of {s.E}", T, make)
            yield Line("moe_combine", model, f"{s.k} of {s.C}", T, of(moe_combine, (T, s.k, s.C), (T, s.k)))


def _experts(s: Shape, qtype: int, N: int, K: int, T: int) -> Call:
    ids = rand(T, s.E).topk(s.k).indices
    return Call(expert_linear, (randn(T, K), packed(qtype, s.E, N, K), qtype, ids, None, True))


def attention(options) -> Iterator[Line]:
    """A layer's attention over its cache, of S sequences of so many keys, and what writes keys and values."""
    for model, s in options.models.items():
        codecs = KV_CODECS if model == "8B" else ["f16"]
        for S, new, keys in ((1, 1, 512), (1, 1, 8192), (16, 1, 512), (16, 1, 8192), (1, 512, 512), (1, 2048, 2048)):
            for codec in codecs if (S, new, keys) == (1, 1, 8192) else ["f16"]:
                make = functools.partial(_attend, s, KV_CODECS[codec], S, new, keys, 0)
                yield Line("paged_attention", model, f"{codec}, {S} of {keys} keys", S * new, make)
            if s.window and S == 1:
                make = functools.partial(_attend, s, KV_CODECS["f16"], S, new, keys, s.window)
                yield Line("paged_attention", model, f"f16, {s.window} of {keys} keys", S * new, make)
        for T in (1, 2048):
            for codec in codecs:
                make = functools.partial(_write, s, KV_CODECS[codec], T)
                yield Line("kv_write", model, f"{codec}, {s.G} of {s.D}", T, make)
            make = functools.partial(_rotate_and_write, s, T)
            yield Line("rope + kv_write", model, f"f16, {s.H} and {s.G} of {s.D}", T, make)
        yield Line("combine + round", model, f"16 parts of {s.H} x {s.D}", 1, functools.partial(_combine, s, 16))


def _caches(s: Shape, codec: KVCodec, rows: int) -> list[Tensor]:
    shape = (-(-rows // ROWS_OF_PAGE), s.G, ROWS_OF_PAGE, codec.row(s.D))
    if codec.block_bytes:
        return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return [randn(*shape, dtype=codec.dtype) for _ in range(2)]


def _attend(s: Shape, codec: KVCodec, S: int, new: int, keys: int, window: int) -> Call:
    caches = _caches(s, codec, S * keys)
    table = torch.randperm(len(caches[0]), device="cuda", dtype=torch.int32).view(S, -1)
    seq, pos = arange(S).repeat_interleave(new), arange(keys - new, keys).repeat(S)
    q, sinks = randn(S * new, s.H, s.D), randn(s.H) if s.window else None
    rest = (s.D**-0.5, window, 0.0, sinks, codec.id, codec.id, s.D)
    return Call(paged_attention, (q, *caches, table, seq, pos, pos + 1, *rest))


def _write(s: Shape, codec: KVCodec, T: int) -> Call:
    rows = randn(2, T, s.G, s.D)
    return Call(kv_write, (*rows, *_caches(s, codec, T), arange(T, dtype=torch.int64), codec.id, codec.id))


def _rotate_and_write(s: Shape, T: int) -> Call:
    q, k, v = (randn(T, heads, s.D) for heads in (s.H, s.G, s.G))
    cos, sin = randn(2, T, s.D // 2)
    caches, slots = _caches(s, KV_CODECS["f16"], T), arange(T, dtype=torch.int64)
    args = (torch.empty_like(q), q, torch.empty_like(k), k, cos, sin, v, *caches, slots)
    nbytes = 2 * (q.nbytes + k.nbytes) + v.nbytes + cos.nbytes + sin.nbytes + (k.nbytes + v.nbytes) // 2
    return Call(rope_write, args, Cost(nbytes, 0, ""))


def _combine(s: Shape, splits: int) -> Call:
    sums = randn(splits, 1, s.H, s.D)
    shared = Shared(torch.empty(1, s.H, s.D, device="cuda"), sums, *rand(2, splits, 1, s.H), None)
    nbytes = sums.nbytes + 2 * shared.tops.nbytes + shared.out.nbytes + shared.out.numel()
    return Call(combine_round.combine_rounded, (shared, ggml_types.Q8_0), Cost(nbytes, 0, ""))


def small(options) -> Iterator[Line]:
    """What lies between the products: norms, activations, rotations, roundings; and their gradients."""
    for model, s in options.models.items():
        C, F = s.C, s.F * (s.k or 1)  # F: of all experts of a token
        lattice, lattice_f = (ggml_types.Q8_0 if width % 256 else ggml_types.Q8_K for width in (C, F))
        for T in (1, 2048):
            x, wide, table = (T, C), (T, F), (T, s.D // 2)
            yield Line("rms_norm", model, f"{C}", T, of(rms_norm, x, (C,), 1e-5))
            make = of(fused_round.norm_rounded, x, x, (C,), 1e-5, lattice, nbytes=9 * T * C)
            yield Line("norm + round", model, f"{C}", T, make)
            yield Line("gated_act", model, f"{F}", T, of(gated_act, wide, wide, s.act))
            make = of(fused_round.act_rounded, wide, wide, wide, s.act, lattice_f, nbytes=13 * T * F)
            yield Line("act + round", model, f"{F}", T, make)
            make = of(quantize_activation.rounded, x, lattice, nbytes=5 * T * C)
            yield Line("quantize_activation", model, f"{C}", T, make)
            yield Line("rope", model, f"{s.H} of {s.D}", T, of(rope, (T, s.H, s.D), table, table))
            make = of(rope_tables, functools.partial(arange, T), table[1:], 1.0)
            yield Line("rope_tables", model, f"{s.D // 2}", T, make)
            ids = functools.partial(torch.randint, s.V, (T,), device="cuda")
            for qtype in fitting(options.types, C)[:1]:
                make = of(embedding, ids, functools.partial(packed, qtype, s.V, C), qtype, 1.0)
                yield Line("embedding", model, f"{name_of(qtype)} {C}", T, make)
    T, C, F, V = 2048, 4096, 14336, 256000
    x, wide, positions = (T, C), (T, F), functools.partial(arange, T)
    yield Line("gated_act", "", f"GELU {F}", T, of(gated_act, wide, wide, GELU_TANH))
    yield Line("gated_act_backward", "", f"{F}", T, of(gated_act_backward, wide, wide, wide, SILU))
    yield Line("rms_norm_backward", "", f"{C}", T, of(rms_norm_backward, x, x, (C,), 1e-5))
    yield Line("long_rope_tables", "", "48", T, of(long_rope_tables, positions, positions, (48,), (48,), 4096, 1.0))
    for T in (1, 16):
        yield Line("softcap", "", f"{V}", T, of(softcap, (T, V), 30.0))
        yield Line("softcap_backward", "", f"{V}", T, of(softcap_backward, (T, V), (T, V), 30.0))
    for qtype in options.types:
        w, nbytes = functools.partial(packed, qtype, F, C), F * (ggml_types.row_bytes(qtype, C) + 2 * C)
        make = of(dequantize.unpack, w, qtype, torch.bfloat16, nbytes=nbytes)
        yield Line("unpack", "", f"{name_of(qtype)} {F} x {C}", F, make)


def sampling(options) -> Iterator[Line]:
    """A draw: of the likeliest, with a temperature, top-k or top-p, with everything and tokens that are penalized."""
    settings = {  # temp, top_k, top_p, min_p
        "the likeliest": (0.0, 0, 1.0, 0.0),
        "temperature": (0.8, 0, 1.0, 0.0),
        "top_k": (0.8, 40, 1.0, 0.0),
        "top_p": (0.8, 0, 0.95, 0.0),
        "all, 64 penalties": (0.8, 40, 0.95, 0.05),
    }
    for model, s in options.models.items():
        for name, setting in settings.items():
            seen, penalties = (64, (1.1, 0.1, 0.1)) if "penalties" in name else (0, (1.0, 0.0, 0.0))
            ids = functools.partial(arange, seen, dtype=torch.int64)
            make = of(sample_token, (s.V,), ids, *penalties, *setting, 0.4)
            yield Line("sample_token", model, f"{s.V}, {name}", 1, make)


def delta(options) -> Iterator[Line]:
    """A layer of Qwen3-Next's: its rule row by row and, of prompts, in chunks; its convolution and its gates."""
    G, H, D = 16, 32, 128
    for S, new in ((1, 1), (16, 1), (1, 32), (1, 64), (1, 128), (1, 512), (1, 2048), (4, 512)):
        for name, steps in {"steps": S * new, "chunks": 0}.items() if new > 1 else [("steps", S)]:
            make = functools.partial(_delta, S, new, G, H, D, steps)
            yield Line(f"gated_delta_update {name}", "qwen3-next", f"{S} sequences, {H} of {D}", S * new, make)
    C = 2 * G * D + H * D
    for T in (1, 2048):
        slots = functools.partial(torch.zeros, T, dtype=torch.int32, device="cuda")
        make = of(causal_conv1d_update, (T, C), (C, 4), (1, 3, C), slots)
        yield Line("causal_conv1d_update", "qwen3-next", f"{C}, 4 taps", T, make)
        yield Line("delta_gates", "qwen3-next", f"{H} heads", T, of(delta_gates, (T, H), (T, H), (H,), (H,)))


def _delta(S: int, new: int, G: int, H: int, D: int, steps: int) -> Call:
    T, state = S * new, torch.zeros(S, H, D, D, device="cuda")
    slots = arange(S).repeat_interleave(new)
    q, k, v = (randn(T, heads, D) for heads in (G, G, H))
    args = (q, k, v, -rand(T, H), rand(T, H), state, slots)

    def op(*args):
        with mock.patch.object(gated_delta_rule, "STEPS", steps):
            return gated_delta_update(*args)

    return Call(op, args, cost_of(gated_delta_update, args, {}, v)._replace(operations=6 * T * H * D * D))


GROUPS = {each.__name__: each for each in (few, many, experts, attention, small, sampling, delta)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", default=",".join(GROUPS), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--types", default="Q4_K,Q6_K,Q8_0,MXFP4", help="default: %(default)s")
    parser.add_argument("--few", default="1,4,16", help="rows of x (default: %(default)s)")
    parser.add_argument("--many", default="128,2048", help="rows of x (default: %(default)s)")
    options = parser.parse_args()
    options.types = [ggml_types.by_name(name).id for name in options.types.split(",")]
    options.models = {name: MODELS[name] for name in options.models.split(",")}
    options.few, options.many = ([int(m) for m in rows.split(",")] for rows in (options.few, options.many))
    groups = [GROUPS[name] for name in options.what.split(",")]
    with torch.inference_mode():
        copied, product = ceilings()
        print(
            f"{torch.cuda.get_device_name()}: copy {copied / 1e9:.0f} GB/s, bf16 product {product / 1e12:.0f} TFLOP/s"
        )

        def once() -> None:
            for group in groups:
                for line in group(options):
                    line.make()()

        with preparing(torch.device("cuda"), once):
            next(groups[0](options)).make()()
        for group in groups:
            print(f"\n{'':26} {'model':11} {'':26} {'rows':>5} {'us':>9} {'GB/s':>6} {'copy':>5} {'TFLOP/s':>8} "
                  f"{'bf16':>5}  kernel")  # fmt: skip
            for line in group(options):
                measure(line, copied, product)


if __name__ == "__main__":
    main()
