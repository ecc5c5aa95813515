"""Time to choose one token from logits: `sampling.sample` with all that Python does around the kernel, on one thread.

    python benchmarks/sampling.py

Logits are normally distributed: of standard deviation 1, where top-p keeps most of the vocabulary ("flat"), or of 3
with a few likely tokens, as a model's are ("peaked"). Microseconds; medians of 201 rounds, in each of which every
setting has its turn. For comparison torch's topk and softmax of the same logits.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dasllama_torch.ops import registry
from dasllama_torch.sampling import SamplingParams, sample

SIZES = (32_000, 152_000, 262_144)
ROUNDS = 201
SETTINGS = {
    "greedy": dict(),
    "temp": dict(temp=0.8),
    "top_k 40": dict(temp=0.8, top_k=40),
    "top_p 0.95": dict(temp=0.8, top_p=0.95),
    "min_p 0.05": dict(temp=0.8, min_p=0.05),
    "top_k 40, top_p 0.95, min_p 0.05": dict(temp=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top_p 0.95, min_p 0.05": dict(temp=0.8, top_p=0.95, min_p=0.05),
    "top_p 0.95, penalties of 64": dict(temp=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1),
    "greedy, penalties of 64": dict(repetition_penalty=1.1),
}


def flat(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def peaked(n: int) -> Tensor:
    logits = flat(n) * 3
    likely = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:20]
    logits[likely] = torch.linspace(12, 20, 20)
    return logits


def medians(calls: list[Callable[[], object]]) -> list[float]:
    """Microseconds of each call."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seen in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            seen.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=",".join(registry.isas()[1:]), help="all but scalar by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for isa in options.isa.split(","):
        registry.set_isa(isa)
        for make in (peaked, flat):
            print(f"\n{isa + ', ' + make.__name__ + ' logits':40}" + "".join(f"{n:>10}" for n in SIZES))
            columns = []
            for n in SIZES:
                logits, history = make(n), torch.randint(n, (64,), generator=generator).tolist()
                calls = [
                    partial(sample, logits, history, SamplingParams(**setting), generator)
                    for setting in SETTINGS.values()
                ]
                calls += [partial(torch.topk, logits, 40), partial(torch.softmax, logits, 0)]
                columns.append(medians(calls))
            for name, *times in zip([*SETTINGS, "torch: topk(40)", "torch: softmax"], *columns, strict=True):
                print(f"{name:40}" + "".join(f"{spent:10.1f}" for spent in times))


if __name__ == "__main__":
    main()
