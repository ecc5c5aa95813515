"""What a comparison has measured, kept as JSON and as a report."""

import dataclasses
import json
from pathlib import Path

import turns
from report import Bound, Ceiling, Footprint, Row, Spread, footprint_table, speed_table, summary_table
from tasks import LOAD_S, OVER_FILE, TARGETS, Task
from turns import BenchmarkError, Quiet, Worker

OURS, PEER = "dasllama-torch", "llama.cpp"


class Run:
    """What has been measured, kept as JSON at `out` and as a report beside it, so that a run broken off can go on."""

    def __init__(self, out: Path | None, setup: dict, models: dict):
        """setup: what must be the same for measurements to stand in one table. models: {name: {bytes, sha256}}."""
        self.out, self.setup, self.models = out, setup, models
        self.commands: list[dict] = []  # command, date
        self.engines: dict[str, dict] = {}  # what each says about itself
        self.served: dict[str, dict] = {}
        self.quiet = Quiet()
        self.rows: list[Row] = []
        self.footprints: list[Footprint] = []

    def resume(self) -> None:
        """Take in what `out` holds. Raises BenchmarkError if it was measured with another setup or other files."""
        saved = json.loads(self.out.read_text())
        for key, value in self.setup.items():
            if saved["setup"].get(key) != value:
                raise BenchmarkError(f"{self.out}: {key} was {saved['setup'].get(key)}, and is {value} now")
        for name in self.models.keys() & saved["models"].keys():
            if self.models[name] != saved["models"][name]:
                raise BenchmarkError(f"{self.out}: {name} was another file")
        self.models = saved["models"] | self.models
        for key in ("commands", "engines", "served"):
            setattr(self, key, saved[key])
        self.quiet = Quiet(**saved["quiet"])
        for row in saved["rows"]:
            bound, ceilings = row.pop("bound"), [Ceiling(**each) for each in row.pop("ceilings")]
            self.rows.append(Row(**row, bound=bound and Bound(**bound), ceilings=ceilings))
        self.footprints = [Footprint(**footprint) for footprint in saved["footprints"]]

    def has_row(self, model: str, task: Task, threads: int, rounds: int) -> bool:
        """Whether the row was measured with as many rounds. One of fewer is measured again."""
        key = model, task.name, threads
        return any((row.model, row.name, row.threads) == key and len(row.ours) >= rounds for row in self.rows)

    def add_row(self, row: Row) -> None:
        key = row.model, row.name, row.threads
        self.rows = [old for old in self.rows if (old.model, old.name, old.threads) != key] + [row]
        self.write()

    def has_footprint(self, model: str) -> bool:
        return any(footprint.model == model for footprint in self.footprints)

    def note_engines(self, *workers: Worker) -> None:
        for worker in workers:
            about = {key: worker.about[key] for key in ("versions", "kernels", "build")}
            if self.engines.setdefault(worker.engine, about) != about:
                raise BenchmarkError(f"{worker.engine} was {self.engines[worker.engine]}, and is {about} now")

    def write(self) -> None:
        if self.out is None:
            return
        full = {
            "commands": self.commands,
            "setup": self.setup,
            "models": self.models,
            "engines": self.engines,
            "served": self.served,
            "quiet": dataclasses.asdict(self.quiet),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(full, indent=1) + "\n")
        self.out.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        host = self.setup["machine"]
        parts = [f"`{command['command']}`, {command['date']}" for command in self.commands]
        parts.append(
            f"Machine: {host['cpu']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.1f} GiB, {host['system']}."
        )
        for engine, about in self.engines.items():
            versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
            parts.append(f"{engine}: {versions}; kernels: {about['kernels']}; build {about['build']}.")
        if self.rows:
            parts += self._speed()
        if self.footprints:
            parts.append(footprint_table(self.footprints, LOAD_S, OVER_FILE))
            parts.append(
                f"Bars: loading without the tokenizer under {LOAD_S} s, at most {OVER_FILE / 1e6:.0f} MB over the file."
            )
        return "\n\n".join(parts) + "\n"

    def _speed(self) -> list[str]:
        """The table of rows, what it was measured with, and the summary."""
        threads = sorted({row.threads for row in self.rows})
        rounds = {n: {len(row.ours) for row in self.rows if row.threads == n} for n in threads}
        counted = ", ".join(f"{'/'.join(map(str, sorted(rounds[n])))} ({threads_text(n)})" for n in threads)
        parts = [
            f"Rounds: {counted}. Median (quartiles); ratio of medians, above 1.00 where dasllama-torch is faster.",
            speed_table(self.rows),
        ]
        for n in threads:
            ceilings = [ceiling for row in self.rows if row.threads == n for ceiling in row.ceilings]
            ops = Spread.of([ceiling.ops / 1e9 for ceiling in ceilings])
            read = Spread.of([ceiling.bytes / 1e9 for ceiling in ceilings])
            parts.append(
                f"Ceilings with {threads_text(n)}, measured in every round: {ops.text(0)} int8 Gop/s, {read.text(1)} "
                "GB/s read. A row's share is of the median of its own rounds."
            )
        if self.quiet.foreign:
            share = Spread.of(self.quiet.foreign)
            parts.append(
                f"During a measurement the waiting engine used at most {1000 * self.quiet.idle_s:.3f} ms of CPU, and "
                f"other processes {share.median:.1%} of the machine (quartiles {share.low:.1%} to {share.high:.1%}, at "
                f"most {max(self.quiet.foreign):.1%}); the measured engine had no core for at most "
                f"{max(self.quiet.stalled):.1%} of the time. {self.quiet.repeated} measurements above the limits "
                f"(--max-foreign and {turns.STALL_LIMIT:.0%}) were repeated."
            )
        return [*parts, summary_table(self.rows, TARGETS)]


def threads_text(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
