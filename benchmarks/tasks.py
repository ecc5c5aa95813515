"""What the comparison measures, and what it is to reach."""

from dataclasses import dataclass

from report import Bound, Target, Work

LOAD_S, OVER_FILE = 0.5, 450_000_000  # bars for loading without the tokenizer, and for memory beyond the file


@dataclass(frozen=True)
class Task:
    """One kind of row: `streams` prompts of `prompt` tokens in one batch, then, if any, `steps` greedy steps.

    Without steps the prompts are timed, with steps the steps alone. unit: as of `Row`.
    """

    name: str
    prompt: int
    target: Target
    steps: int = 0
    streams: int = 1
    unit: str = "tok/s"

    @property
    def command(self) -> dict:
        """What the worker is asked, but for the prompts."""
        return {"do": "decode", "steps": self.steps} if self.steps else {"do": "prefill"}

    @property
    def tokens(self) -> int:
        """How many a measurement counts."""
        return self.streams * (self.steps or self.prompt)

    def value(self, seconds: float) -> float:
        """A measurement in the row's unit."""
        return 1000 * seconds if self.unit == "ms" else self.tokens / seconds

    def bound(self, work: Work | None) -> Bound | None:
        if work is None:
            return None
        return work.decode(self.streams, self.prompt, self.steps) if self.steps else work.prefill(self.prompt)


TASKS = {
    "prefill": Task("prefill 512", 512, Target(1.8, 1.3, int8=0.45)),
    "decode": Task("decode 64, empty context", 1, Target(1.4, 1.1), steps=64),
    "decode2048": Task("decode 64, context 2048", 2048, Target(1.4, 1.1), steps=64),
    "batch8": Task("decode 32, batch of 8", 1, Target(1.5, 1.2), steps=32, streams=8),
    "ttft16": Task("first token, prompt of 16", 16, Target(1.5, 1.0), unit="ms"),
}
TARGETS = {task.name: task.target for task in TASKS.values()}
