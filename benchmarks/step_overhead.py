"""What a recorded step of one stream takes around its programs: Python, checks, the step's inputs.

    python benchmarks/step_overhead.py smollm2.gguf [--threads 1] [--isa avx2] [--steps 300]

Times every `Session.eval` of one token, and within it the native calls that run the recorded programs. What is left is
the overhead: between two steps all weights pass through the caches, so most of it is memory that Python has to fetch
again. Printed are medians with quartiles, and the overhead's share of the step.
"""

import argparse
import statistics
import time
from types import SimpleNamespace

import torch

import dasllama_torch as dl
from dasllama_torch import ops
from dasllama_torch.engine import graphs
from dasllama_torch.ops import program

WARM_UP = 8  # steps before those that count: the first is recorded, and each of the two heads


class TimedLibrary(SimpleNamespace):
    """The native library as `ops.program` sees it, but that seconds spent in programs are kept."""

    def __init__(self, library):
        super().__init__(**{name: call for name, call in vars(library).items() if name.startswith("dasllama_")})
        self.seconds: list[float] = []
        run = library.dasllama_program_run

        def timed(*arguments):
            start = time.perf_counter()
            error = run(*arguments)
            self.seconds.append(time.perf_counter() - start)
            return error

        self.dasllama_program_run = timed


def measure(path: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of it those outside of the programs."""
    whole, outside = [], []
    model, library = dl.load_model(path), program._library
    program._library = timed = TimedLibrary(library)
    try:
        with dl.create_session(model, n_ctx=steps + 64) as session:
            session.eval(model.encode("The capital of France is"))
            for _ in range(WARM_UP + steps):
                timed.seconds.clear()
                token = int(session.logits.argmax())
                start = time.perf_counter()
                session.eval([token])
                whole.append(time.perf_counter() - start)
                outside.append(whole[-1] - sum(timed.seconds))
    finally:
        program._library = library
    if why := graphs.why_not(model):
        raise SystemExit(f"the steps were not recorded: {why}")
    return whole[WARM_UP:], outside[WARM_UP:]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="instruction set of our kernels, such as avx2 (default: the best)")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    ops.set_isa(options.isa)
    whole, outside = measure(options.model, options.steps)
    for name, seconds in (("step", whole), ("outside of its programs", outside)):
        low, median, high = (1e6 * s for s in statistics.quantiles(seconds, n=4))
        print(f"{name}: {median:.0f} us ({low:.0f} to {high:.0f})")
    print(f"overhead: {statistics.median(outside) / statistics.median(whole):.1%}")


if __name__ == "__main__":
    main()
