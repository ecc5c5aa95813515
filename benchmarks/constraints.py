"""What a constraint costs: a step of generation with it against one without.

    python benchmarks/constraints.py smollm2.gguf

Two sessions generate --tokens tokens each at temperature 1, one with the constraint and one without, a step each by
turns, --rounds times on one thread. step: median milliseconds of a step. ratio: with by without. mask: median
microseconds of computing a mask, part of a step. begin: milliseconds from the constraint to its first mask, once per
text.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

import dasllama_torch as dl
from dasllama_torch.constraints import Matcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema, people": lambda: dl.Constraint.json_schema({"type": "array", "items": PERSON, "minItems": 1000}),
    "schema, anything": lambda: dl.Constraint.json_schema({"type": "array", "minItems": 1000}),
    "regex, words": lambda: dl.Constraint.regex(r"([a-z]{1,12} ){1000,}"),
    "regex, any text": lambda: dl.Constraint.regex(r"(?s:.*)"),
}


def in_turn(streams: list[Iterator]) -> list[list[float]]:
    """Milliseconds of each step of each stream; the first, with the prompt, is left out."""
    times: list[list[float]] = [[] for _ in streams]
    while True:
        for stream, spent in zip(streams, times, strict=True):
            start = time.perf_counter()
            if next(stream, None) is None:
                return [spent[1:] for spent in times]
            spent.append(1e3 * (time.perf_counter() - start))


def masks(constraint: dl.Constraint, model, ids: list[int]) -> Iterator[float]:
    """Microseconds of each mask along a text, the first with all that comes before it."""
    start = time.perf_counter()
    matcher: Matcher = constraint.matcher(model.tokenizer)
    for token in ids:
        matcher.allowed()
        yield 1e6 * (time.perf_counter() - start)
        matcher.accept(token)
        start = time.perf_counter()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = dl.load_model(options.model)
    prompt = model.encode("A list of people who were at the harbour that night, one after another:\n\n")
    free = dl.SamplingParams(temp=1.0, logit_bias=dict.fromkeys(model.tokenizer.eog_ids, -torch.inf))
    sessions = [dl.create_session(model) for _ in range(2)]
    for session in sessions:
        list(session.generate(prompt, free, options.tokens))  # records the steps and warms up
    print(f"{'constraint':20} {'step ms':>8} {'without':>8} {'ratio':>6} {'mask us':>8} {'begin ms':>8}")
    for name, make in CONSTRAINTS.items():
        constraint = make()
        held = dl.SamplingParams(temp=1.0, logit_bias=dict(free.logit_bias), constraint=constraint)
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            streams = [
                session.generate(prompt, params, options.tokens, whole=True)
                for session, params in zip(sessions, (held, free), strict=True)
            ]
            for spent, more in zip(times, in_turn(streams), strict=True):
                spent += more
        spent, plain = map(statistics.median, times)
        ids = sessions[0].tokens[len(prompt) :]
        runs = [list(masks(constraint, model, ids)) for _ in range(options.rounds)]
        mask = statistics.median([each for run in runs for each in run[1:]])
        begin = statistics.median([run[0] for run in runs]) / 1e3
        print(f"{name:20} {spent:8.2f} {plain:8.2f} {spent / plain:6.3f} {mask:8.0f} {begin:8.1f}")


if __name__ == "__main__":
    main()
