"""Paged attention alone: GFLOP/s of a prefill of 512 and GB/s of keys and values in decode, for each codec of them and
each instruction set.

    python benchmarks/attention.py --threads 1,2 --kv f16,q8_0

GFLOP/s counts 4 * D operations for each query head and visible key; GB/s counts the bytes of each key and value once,
as the query heads of one kv head share them. Medians of 9 rounds, in each of which the codecs follow each other; every
round repeats the call for at least 50 ms.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from dasllama_torch.ops import registry
from dasllama_torch.ops.kv_codecs import KV_CODECS, KVCodec
from dasllama_torch.ops.kv_write import kv_write
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


def arguments(shape: Shape, rows: int, keys: int, codec: KVCodec) -> tuple:
    """The last `rows` of `keys` positions of one sequence, causal, over a cache of shuffled pages."""
    pages = -(-keys // PAGE)
    caches = [torch.zeros(pages, shape.G, PAGE, codec.row(shape.D), dtype=codec.dtype) for _ in range(2)]
    k, v = (torch.randn(pages * PAGE, shape.G, shape.D) for _ in range(2))
    kv_write(k, v, *caches, torch.arange(pages * PAGE), codec.id, codec.id)
    position = torch.arange(keys - rows, keys, dtype=torch.int32)
    table = torch.randperm(pages, dtype=torch.int32)[None]
    q = torch.randn(rows, shape.H, shape.D)
    which = torch.zeros_like(position), position, position + 1
    return q, *caches, table, *which, shape.D**-0.5, 0, 0.0, None, codec.id, codec.id, shape.D


def seconds(args: tuple) -> float:
    """Time of one call."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS:
        paged_attention(*args)
        calls += 1
    return spent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=",".join(registry.isas()[1:]), help="all but scalar by default")
    parser.add_argument("--threads", default="1", help="1 by default")
    parser.add_argument("--kv", default=",".join(KV_CODECS), help="codecs of keys and values, all by default")
    options = parser.parse_args()
    codecs = [KV_CODECS[name] for name in options.kv.split(",")]
    print(f"{'layer':14} {'isa':10} threads  {'work':20} {'kv':5} {'us':>9} {'GFLOP/s':>8} {'GB/s':>6}")
    for isa, threads in itertools.product(options.isa.split(","), map(int, options.threads.split(","))):
        registry.set_isa(isa)
        torch.set_num_threads(threads)
        for shape, (work, rows, keys) in itertools.product(SHAPES, WORK):
            with torch.inference_mode():
                calls = [arguments(shape, rows, keys, codec) for codec in codecs]
                rounds = [[seconds(args) for args in calls] for _ in range(ROUNDS + 1)][1:]
            for codec, args, samples in zip(codecs, calls, zip(*rounds, strict=True), strict=True):
                spent = statistics.median(samples)
                flops = 4 * shape.D * shape.H * int(args[6].sum())
                kv_bytes = 2 * codec.row_bytes(shape.D) * shape.G * keys
                speed = f"{spent * 1e6:9.1f} {flops / spent / 1e9:8.1f}"
                bandwidth = f" {kv_bytes / spent / 1e9:6.1f}" if rows == 1 else ""
                print(f"{shape.name:14} {isa:10} {threads:7}  {work:20} {codec.name:5} {speed}{bandwidth}")


if __name__ == "__main__":
    main()
