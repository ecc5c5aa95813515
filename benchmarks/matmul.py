"""Matrix multiplication alone: each type of weights at 1 to 512 rows, by instruction set, against the ceilings.

    python benchmarks/matmul.py --types Q4_0,Q6_K --rows 1,8,512

Multiplies x [M, K] by random packed weights [N, K], activations quantized within the call. Gop/s counts 2 * M * N * K,
GB/s the packed weights once; the shares are of what ceilings.py measures for the same instruction set and threads.
Calls take COPIES of the matrix in turn, which lie in huge pages as a model's do, so that weights come from memory.
Medians of the rounds; in each round every line of a type has its turn, so that a busy spell falls on all alike.
"""

import argparse
import itertools
import statistics
import time

import torch
from ceilings import measure
from random_llama import TYPES
from torch import Tensor

from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.memory import huge_pages
from dasllama_torch.ops import ggml_types, registry
from dasllama_torch.ops.quant_linear import quant_linear

N, K, COPIES = 4096, 4096, 4
ROWS = "1,2,4,8,16,64,512"
SECONDS = 0.02  # of calls to a sample, at least


def weights(qtype: int) -> list[Tensor]:
    """COPIES of packed matrices, u8 [N, row_bytes] each."""
    packed = RandomSource(0, qtype).get("matrix.weight", N, K).data
    copies = torch.frombuffer(huge_pages(COPIES * packed.nbytes), dtype=torch.uint8).view(COPIES, *packed.shape)
    return list(copies.copy_(packed))


def seconds(x: Tensor, matrices: list[Tensor], qtype: int) -> float:
    """Mean time of a call, for SECONDS."""
    begin = time.perf_counter()
    for calls, matrix in enumerate(itertools.cycle(matrices), start=1):
        quant_linear(x, matrix, qtype, None, True)
        if (spent := time.perf_counter() - begin) >= SECONDS:
            return spent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=",".join(TYPES), help="of weights, by ggml's names (default: %(default)s)")
    parser.add_argument("--rows", default=ROWS, help="values of M (default: %(default)s)")
    parser.add_argument("--isa", default=",".join(registry.isas()[1:]), help="default: all but scalar, %(default)s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ids = {row.name: row.id for row in ggml_types.GGML_TYPES.values()}
    inputs = [torch.randn(int(m), K) for m in options.rows.split(",")]
    rates = measure(options.rounds, options.threads)
    ceilings = {name: statistics.median(samples) for name, samples in rates.items()}

    print(f"[{N}, {K}], {options.threads} threads, {options.rounds} rounds")
    print(f"{'type':8} {'isa':10} {'M':>4} {'us':>9} {'Gop/s':>7} {'of int8':>8} {'GB/s':>6} {'of read':>8}")
    for name in options.types.split(","):
        matrices = weights(ids[name])
        variants = list(itertools.product(options.isa.split(","), inputs))
        samples: list[list[float]] = [[] for _ in variants]
        with torch.inference_mode():
            for round_ in range(-1, options.rounds):  # the first round warms up and is dropped
                for (isa, x), of_variant in zip(variants, samples, strict=True):
                    registry.set_isa(isa)
                    spent = seconds(x, matrices, ids[name])
                    if round_ >= 0:
                        of_variant.append(spent)
        for (isa, x), of_variant in zip(variants, samples, strict=True):
            spent = statistics.median(of_variant)
            ops, read = 2 * len(x) * N * K / spent / 1e9, matrices[0].nbytes / spent / 1e9
            of_ops, of_read = ops / ceilings[f"int8 dot {isa} [Gop/s]"], read / ceilings[f"read {isa} [GB/s]"]
            speeds = f"{ops:7.1f} {of_ops:8.0%} {read:6.1f} {of_read:8.0%}"
            print(f"{name:8} {isa:10} {len(x):4} {spent * 1e6:9.1f} {speeds}", flush=True)


if __name__ == "__main__":
    main()
