"""Paged attention alone: GFLOP/s of a prefill of 512 and GB/s of keys and values in decode, for each instruction set.

    python benchmarks/attention.py --threads 1,2

GFLOP/s counts 4 * D operations for each query head and visible key; GB/s counts each key and value once, as the query
heads of one kv head share them. Medians of 9 rounds; every round repeats the call for at least 50 ms.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from dasllama_torch.ops import registry
from dasllama_torch.ops.paged_attention import paged_attention

ROUNDS, SECONDS, PAGE = 9, 0.05, 64


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention layer: H query heads, G kv heads, D head dim."""

    name: str
    H: int
    G: int
    D: int


WORK = [("prefill 512", 512, 512), ("decode at 64", 1, 64), ("decode at 2048", 1, 2048)]  # name, rows, keys
SHAPES = [Shape("SmolLM2-135M", 9, 3, 64), Shape("gemma-3-270m", 4, 1, 256), Shape("Llama-3.1-8B", 32, 8, 128)]


def arguments(shape: Shape, rows: int, keys: int) -> tuple:
    """The last `rows` of `keys` positions of one sequence, causal, over an f16 cache of shuffled pages."""
    pages = -(-keys // PAGE)
    cache = [torch.randn(pages, shape.G, PAGE, shape.D).half() for _ in range(2)]
    position = torch.arange(keys - rows, keys, dtype=torch.int32)
    table = torch.randperm(pages, dtype=torch.int32)[None]
    q = torch.randn(rows, shape.H, shape.D)
    return q, *cache, table, torch.zeros_like(position), position, position + 1, shape.D**-0.5, 0, 0.0, None


def seconds(args: tuple) -> float:
    """Median time of one call."""
    paged_attention(*args)
    samples = []
    for _ in range(ROUNDS):
        calls, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < SECONDS:
            paged_attention(*args)
            calls += 1
        samples.append(spent / calls)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=",".join(registry.isas()[1:]), help="all but scalar by default")
    parser.add_argument("--threads", default="1", help="1 by default")
    options = parser.parse_args()
    print(f"{'layer':14} {'isa':10} threads  {'work':20} {'us':>9} {'GFLOP/s':>8} {'GB/s':>6}")
    for isa in options.isa.split(","):
        registry.set_isa(isa)
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for shape in SHAPES:
                for work, rows, keys in WORK:
                    args = arguments(shape, rows, keys)
                    with torch.inference_mode():
                        spent = seconds(args)
                    flops = 4 * shape.D * shape.H * int(args[6].sum())
                    kv_bytes = 2 * 2 * shape.D * shape.G * keys
                    speed = f"{spent * 1e6:9.1f} {flops / spent / 1e9:8.1f}"
                    bandwidth = f" {kv_bytes / spent / 1e9:6.1f}" if rows == 1 else ""
                    print(f"{shape.name:14} {isa:10} {threads:7}  {work:20} {speed}{bandwidth}")


if __name__ == "__main__":
    main()
