"""Kernels for CUDA one by one, against what the card can do: bytes per second for few rows, products for many.

    python benchmarks/cuda.py [--what few,many,attention,experts,delta] [--types Q4_K,Q6_K] [--shapes 8B]

Each line is a call of an op at a shape of a model. Calls take enough copies of the weights in turn that they come from
memory and not from the cache, and all of them are one replayed graph, so that the host has no part; a call's activation
is quantized within it. Times are medians over replays. The ladder of versions stays: `reference` decodes the matrix in
plain torch and multiplies in f32; `float` decodes words in registers and multiplies in f32; `native` takes integer
dots; `steps` and `chunks` are two forms of the gated delta rule. GB/s count the packed weights, or the keys and values,
or the states, once, and are shares of what a copy of memory moves; TFLOP/s count 2 M N K, or the products of the rule's
formula, and are shares of the library's product of two bf16 matrices.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from unittest import mock

import torch

from dasllama_torch.ops import ggml_types, report, reset_report
from dasllama_torch.ops.expert_linear import expert_linear
from dasllama_torch.ops.gated_delta_rule import gated_delta_update
from dasllama_torch.ops.paged_attention import paged_attention
from dasllama_torch.ops.quant_linear import quant_linear
from dasllama_torch.triton_kernels import gated_delta_rule

SHAPES = {  # N, K
    "1B": [(2048, 2048), (8192, 2048), (2048, 8192), (128256, 2048)],
    "8B": [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)],
}
EXPERTS = {  # E, used, N, K: gate (or up) and down
    "30B-A3B": [(128, 8, 768, 2048), (128, 8, 2048, 768)],
    "gpt-oss-20b": [(32, 4, 5760, 2880), (32, 4, 2880, 2880)],
}
CACHE = 4 * 60 * 2**20  # bytes: several times the card's L2
REPLAYS = 7


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


def copies(qtype: int, N: int, K: int) -> list[torch.Tensor]:
    """Packed matrices of random bytes, in all several times the cache."""
    size = ggml_types.row_bytes(qtype, K)
    count = max(2, min(64, -(-CACHE // (N * size))))
    return list(torch.randint(0, 256, (count, N, size), dtype=torch.uint8, device="cuda"))


def few(types: list[int], shapes: list[tuple[int, int]], rows: list[int], copied: float) -> None:
    print(f"\n{'type':8} {'N':>7} {'K':>6} {'M':>4} {'version':10} {'us':>8} {'GB/s':>7} {'of copy':>8}  kernel")
    for qtype in types:
        for N, K in shapes:
            if K % ggml_types.GGML_TYPES[qtype].block:
                continue
            weights = copies(qtype, N, K)
            for M in rows:
                x = torch.randn(M, K, device="cuda")
                versions = {"native": functools.partial(quant_linear, native=True)}
                if M == 1 and (N, K) == (4096, 4096):
                    versions["float"] = functools.partial(quant_linear, native=False)
                    versions["reference"] = functools.partial(quant_linear.reference, native=False)
                for name, call in versions.items():
                    used = weights if name != "reference" else weights[:2]
                    reset_report()
                    spent = seconds([functools.partial(call, x, w, qtype, None) for w in used])
                    rate = weights[0].nbytes / spent
                    kernel = next(iter(report().get("quant_linear", {"reference": 0})))
                    print(
                        f"{ggml_types.GGML_TYPES[qtype].name:8} {N:7} {K:6} {M:4} {name:10} {spent * 1e6:8.1f} "
                        f"{rate / 1e9:7.0f} {rate / copied:8.0%}  {kernel}",
                        flush=True,
                    )


def many(types: list[int], shapes: list[tuple[int, int]], rows: list[int], product: float) -> None:
    print(f"\n{'type':8} {'N':>7} {'K':>6} {'M':>4} {'us':>8} {'TFLOP/s':>8} {'of bf16':>8}  kernel")
    for qtype in types:
        for N, K in shapes:
            weights = copies(qtype, N, K)
            for M in rows:
                x = torch.randn(M, K, device="cuda")
                reset_report()
                spent = seconds([functools.partial(quant_linear, x, w, qtype, None, True) for w in weights[:4]])
                rate = 2 * M * N * K / spent
                kernel = next(iter(report()["quant_linear"]))
                print(
                    f"{ggml_types.GGML_TYPES[qtype].name:8} {N:7} {K:6} {M:4} {spent * 1e6:8.1f} {rate / 1e12:8.1f} "
                    f"{rate / product:8.0%}  {kernel}",
                    flush=True,
                )


def attention(copied: float, product: float) -> None:
    """One layer of the 8B model (32 heads over 8 kv heads of 128, an f16 cache): decode, and prompts."""
    H, G, D, R = 32, 8, 128, 64
    head = f"{'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} {'of bf16':>8}  kernel"
    print(f"\n{'sequences':>9} {'rows':>5} {'keys':>6} {'us':>8} {head}")
    for S, new, context in ((1, 1, 512), (1, 1, 8192), (16, 1, 512), (16, 1, 8192), (1, 512, 512), (1, 2048, 2048)):
        pages = -(-context // R)
        cache = torch.randn(2, S * pages, G, R, D, device="cuda", dtype=torch.float16)
        table = torch.randperm(S * pages, device="cuda", dtype=torch.int32).view(S, pages)
        seq = torch.arange(S, device="cuda", dtype=torch.int32).repeat_interleave(new)
        pos = torch.arange(context - new, context, device="cuda", dtype=torch.int32).repeat(S)
        q = torch.randn(S * new, H, D, device="cuda")
        args = (q, cache[0], cache[1], table, seq, pos, pos + 1, D**-0.5, 0, 0.0, None, 1, 1, D)
        reset_report()
        spent = seconds([functools.partial(paged_attention, *args)] * 8)
        pairs = int((pos + 1).sum())
        rate, products = cache.nbytes / spent, 4 * pairs * H * D / spent
        kernel = next(iter(report()["paged_attention"]))
        print(
            f"{S:9} {len(seq):5} {context:6} {spent * 1e6:8.1f} {rate / 1e9:7.0f} {rate / copied:8.0%} "
            f"{products / 1e12:8.1f} {products / product:8.0%}  {kernel}",
            flush=True,
        )


def experts(types: list[int], copied: float, product: float) -> None:
    """Stacks of experts, each token with experts of its own. GB/s count the matrices that are used once."""
    print(f"\n{'type':8} {'experts':>8} {'N':>6} {'K':>6} {'tokens':>6} {'us':>8} {'GB/s':>7} {'of copy':>8} "
          f"{'TFLOP/s':>8} {'of bf16':>8}  kernel")  # fmt: skip
    for qtype in types:
        for E, k, N, K in (shape for shapes in EXPERTS.values() for shape in shapes):
            if K % ggml_types.GGML_TYPES[qtype].block:
                continue
            weights = [w.view(E, N, -1) for w in copies(qtype, E * N, K)]
            for T in (1, 4, 16, 64, 512, 2048):
                x, ids = torch.randn(T, K, device="cuda"), torch.rand(T, E, device="cuda").topk(k).indices
                reset_report()
                spent = seconds([functools.partial(expert_linear, x, w, qtype, ids, None, True) for w in weights])
                rate = weights[0].nbytes // E * ids.unique().numel() / spent
                products = 2 * T * k * N * K / spent
                kernel = next(iter(report()["expert_linear"]))
                print(
                    f"{ggml_types.GGML_TYPES[qtype].name:8} {E:4} / {k} {N:6} {K:6} {T:6} {spent * 1e6:8.1f} "
                    f"{rate / 1e9:7.0f} {rate / copied:8.0%} {products / 1e12:8.1f} {products / product:8.0%}  "
                    f"{kernel}",
                    flush=True,
                )


def delta(copied: float, product: float) -> None:
    """A layer of Qwen3-Next's (16 key heads, 32 value heads of 128), row by row and, of prompts, in chunks."""
    G, H, D = 16, 32, 128
    print(f"\n{'sequences':>9} {'rows':>5} {'us':>8} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} {'of bf16':>8}  kernel")
    for S, new in ((1, 1), (16, 1), (1, 16), (1, 32), (1, 64), (1, 128), (1, 512), (1, 2048), (4, 512)):
        T, state = S * new, torch.zeros(S, H, D, D, device="cuda")
        slots = torch.arange(S, device="cuda", dtype=torch.int32).repeat_interleave(new)
        q, k, v = (torch.randn(T, heads, D, device="cuda") for heads in (G, G, H))
        g, beta = -torch.rand(T, H, device="cuda"), torch.rand(T, H, device="cuda")
        for steps in (T, 0) if new > 1 else (T,):
            with mock.patch.object(gated_delta_rule, "STEPS", steps):
                reset_report()
                spent = seconds([functools.partial(gated_delta_update, q, k, v, g, beta, state, slots)] * 4)
            rate, products = 2 * state.nbytes / spent, 6 * T * H * D * D / spent
            kernel = next(iter(report()["gated_delta_update"]))
            print(
                f"{S:9} {T:5} {spent * 1e6:8.1f} {rate / 1e9:7.0f} {rate / copied:8.0%} {products / 1e12:8.1f} "
                f"{products / product:8.0%}  {kernel}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", default="few,many,attention,experts,delta")
    parser.add_argument("--types", default="Q4_K,Q6_K,Q8_0,Q4_0,IQ4_XS,MXFP4", help="default: %(default)s")
    parser.add_argument("--shapes", default="1B,8B", help="of models (default: %(default)s)")
    parser.add_argument("--few", default="1,4,16", help="rows of x (default: %(default)s)")
    parser.add_argument("--many", default="32,128,512,2048", help="rows of x (default: %(default)s)")
    options = parser.parse_args()
    types = [ggml_types.by_name(name).id for name in options.types.split(",")]
    shapes = [shape for name in options.shapes.split(",") for shape in SHAPES[name]]
    with torch.inference_mode():
        copied, product = ceilings()
        print(
            f"{torch.cuda.get_device_name()}: copy {copied / 1e9:.0f} GB/s, bf16 product {product / 1e12:.0f} TFLOP/s"
        )
        if "few" in options.what:
            few(types, shapes, [int(m) for m in options.few.split(",")], copied)
        if "many" in options.what:
            many(types, shapes, [int(m) for m in options.many.split(",")], product)
        if "attention" in options.what:
            attention(copied, product)
        if "experts" in options.what:
            experts(types, copied, product)
        if "delta" in options.what:
            delta(copied, product)


if __name__ == "__main__":
    main()
