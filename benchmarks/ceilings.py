"""What this machine can do at most: memory read bandwidth, f32 FMA and int8 dot rates. Kernels are judged by these.

    python benchmarks/ceilings.py [--rounds 9] [--threads 1,2] [--json]

The loops are those of `dasllama_torch.bench.Ceilings`, for each instruction set but scalar; for comparison torch's own
matrix product. Each row of the table is the median over the rounds with the spread (max - min) / median, and the best
round.
"""

import argparse
import json
import statistics
import sys
import time

import torch

from dasllama_torch.bench import Ceilings
from dasllama_torch.ops import registry


def measure(rounds: int, threads: int) -> dict[str, list[float]]:
    """{name: one rate per round}: GB/s for reads, Gop/s (multiply and add counted apart) for the others."""
    a, b = torch.randn(512, 2048), torch.randn(2048, 2048)
    torch.set_num_threads(threads)
    rates: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first round warms up and is dropped
        for isa in registry.isas()[1:]:
            registry.set_isa(isa)
            found = Ceilings.measure(threads, rounds=1)
            rates.setdefault(f"read {isa} [GB/s]", []).append(found.read)
            rates.setdefault(f"f32 fma {isa} [Gop/s]", []).append(found.fma)
            rates.setdefault(f"int8 dot {isa} [Gop/s]", []).append(found.dot)
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds = time.perf_counter() - start
        rates.setdefault("f32 torch linear 512x2048x2048 [Gop/s]", []).append(2 * 512 * 2048 * 2048 / seconds / 1e9)
    registry.set_isa(None)
    return {name: values[1:] for name, values in rates.items()}


def main() -> None:
    """Prints the table, or with --json `{threads: {name: {median, best, spread}}}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {}
    for threads in map(int, options.threads.split(",")):
        report[threads] = {
            name: {
                "median": statistics.median(values),
                "best": max(values),
                "spread": (max(values) - min(values)) / statistics.median(values),
            }
            for name, values in measure(options.rounds, threads).items()
        }
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        return
    print(f"{'ceiling':42} {'threads':>7} {'median':>9} {'best':>9} {'spread':>7}")
    for threads, rows in report.items():
        for name, row in rows.items():
            print(f"{name:42} {threads:7} {row['median']:9.1f} {row['best']:9.1f} {row['spread']:7.0%}")


if __name__ == "__main__":
    main()
