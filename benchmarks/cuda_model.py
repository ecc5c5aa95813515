"""A model on a GPU as llama-bench measures one: pp (tokens of a prompt per second) and tg (single tokens per second,
each with its logits on the host, nothing sampled), what `generate` and `generate_n` reach with tokens that are drawn,
and several sessions that decode together.

    python benchmarks/cuda_model.py model.gguf [--depths 0,8192] [--prompt 2048] [--tokens 128] [--sessions 16]

Times are medians over --rounds; a round of tg is all of its tokens. The first lines say what starting takes: kernels
are compiled when they are first used, unless Triton's cache has them.
"""

import argparse
import random
import statistics
import time

import torch

import dasllama_torch as dl
from dasllama_torch.ops import report


def timed(f) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--depths", default="0,8192", help="tokens before those of tg (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of pp (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of tg (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=16, help="that decode together (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start = time.perf_counter()
    model = dl.load_model(options.model, device="cuda", progress=False)
    print(f"{options.model}: loaded in {time.perf_counter() - start:.2f} s", flush=True)
    pick = random.Random(0)

    def text(n: int) -> list[int]:
        return [pick.randrange(model.config.n_vocab) for _ in range(n)]

    def session(n_ctx: int) -> dl.Session:
        return dl.create_session(model, n_ctx=n_ctx)

    with session(options.prompt) as first:
        spent = timed(lambda: first.eval(text(8)))
        print(f"first token after a prompt of 8: {spent:.2f} s")
        print(f"first single token: {timed(lambda: first.eval(text(1))):.2f} s", flush=True)

    def pp() -> float:
        with session(options.prompt) as s:
            return options.prompt / timed(lambda: s.eval(text(options.prompt)))

    pp()
    print(f"pp{options.prompt}: {statistics.median(pp() for _ in range(options.rounds)):.0f} tok/s", flush=True)

    def decode(sessions: list[dl.Session]) -> float:
        """Tokens per second of each of the sessions."""
        columns = list(zip(*(text(options.tokens) for _ in sessions), strict=True))

        def run() -> None:
            for column in columns:  # whose logits nobody keeps: memory for more would have to be pinned
                dl.eval_batch(sessions, [[token] for token in column])

        return options.tokens / timed(run)

    for depth, n in [(int(depth), 1) for depth in options.depths.split(",")] + [(0, options.sessions)]:
        opened = [session(depth + 64 + options.tokens) for _ in range(n)]
        for s in opened:
            if depth:
                s.eval(text(depth), logits=None)
        rates = []
        for _ in range(options.rounds + 1):  # the first captures the step
            rates.append(decode(opened))
            for s in opened:
                s.truncate(depth)
        rate = statistics.median(rates[1:])
        name = f"tg{options.tokens}" + (f" at {depth}" if depth else "")
        whole = f"{n} sessions, {rate * n:.0f} tok/s together" if n > 1 else ""
        print(f"{name}: {rate:.1f} tok/s {whole}", flush=True)
        for s in opened:
            s.close()
    settings = {
        "the likeliest": {},
        "top_p 0.95": dict(temp=1.0, top_p=0.95),
        "all settings": dict(temp=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1),
    }

    def drawn(settings: dict) -> float:
        with session(64 + options.tokens) as s:
            stream = s.generate(text(8), dl.SamplingParams(**settings), options.tokens + 1)
            next(stream)
            start = time.perf_counter()
            return sum(1 for _ in stream) / (time.perf_counter() - start)

    for name, each in settings.items():
        rates = [drawn(each) for _ in range(options.rounds + 1)]
        print(f"tg{options.tokens}, drawn, {name}: {statistics.median(rates[1:]):.1f} tok/s", flush=True)
    with session(64 + options.tokens) as s:
        rates = []
        for _ in range(options.rounds + 1):
            samples = s.generate_n(
                text(8), dl.SamplingParams(temp=1.0), options.sessions, options.tokens + 1, whole=True
            )
            drawn_ids = sum(len(sample.tokens) - 1 for sample in samples)
            rates.append(drawn_ids / max(sample.stats.decode_s for sample in samples))
            for sample in samples:
                sample.session.close()
    rate = statistics.median(rates[1:])
    print(f"tg{options.tokens}, drawn, top_p 1, {options.sessions} samples of one prompt: {rate:.0f} tok/s together")
    counts = report()
    print({op: counts[op] for op in ("step", "quant_linear", "paged_attention", "rms_norm", "sample_token")})


if __name__ == "__main__":
    main()
