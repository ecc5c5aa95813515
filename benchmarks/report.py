"""The arithmetic and the table of a comparison. Speeds are kept as the samples that they came from, one a round."""

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples (the inclusive method: the quartiles of three samples lie between them)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass
class Row:
    """One line of the table: what was measured, and both engines' samples.

    unit: "tok/s", where more is better, or "ms", where less is. peer: samples by the peer's setting.
    agree: how many leading tokens of the greedy continuations were equal, and of how many; None where none was decoded.
    """

    model: str
    name: str
    threads: int
    unit: str
    ours: list[float] = field(default_factory=list)
    peer: dict[str, list[float]] = field(default_factory=dict)
    agree: tuple[int, int] | None = None

    @property
    def best(self) -> str:
        """The setting whose median is the peer's better one."""
        pick = max if self.unit == "tok/s" else min
        return pick(self.peer, key=lambda setting: Spread.of(self.peer[setting]).median)

    @property
    def ratio(self) -> float:
        """Speed of ours over that of the peer in its better setting: a ratio of medians, above 1 where ours leads."""
        ours, peer = Spread.of(self.ours).median, Spread.of(self.peer[self.best]).median
        return ours / peer if self.unit == "tok/s" else peer / ours


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def speed_table(rows: list[Row]) -> str:
    lines = [
        "| model | row | threads | unit | dasllama-torch | llama.cpp | its setting | ratio | equal tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        agree = "" if row.agree is None else f"{row.agree[0]} of {row.agree[1]}"
        cells = (row.model, row.name, row.threads, row.unit, Spread.of(row.ours).text(1))
        peer = Spread.of(row.peer[row.best]).text(1)
        lines.append("| " + " | ".join(map(str, (*cells, peer, row.best, f"{row.ratio:.2f}", agree))) + " |")
    return "\n".join(lines)


@dataclass
class Footprint:
    """Loading and memory of one engine in fresh processes.

    load_s: seconds, after the imports. grown: bytes of VmHWM after load, prefill and decode, less VmHWM after imports.
    """

    model: str
    engine: str
    file_bytes: int
    load_s: list[float] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)

    @property
    def over_file(self) -> float:
        """Median bytes by which the growth exceeds the file."""
        return statistics.median(self.grown) - self.file_bytes


def footprint_table(footprints: list[Footprint]) -> str:
    lines = [
        "| model | engine | load, s | peak memory, MB | file, MB | over the file, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in footprints:
        grown, file_size, over = statistics.median(f.grown) / 1e6, f.file_bytes / 1e6, f.over_file / 1e6
        load = Spread.of(f.load_s).text(2)
        lines.append(f"| {f.model} | {f.engine} | {load} | {grown:.0f} | {file_size:.0f} | {over:+.0f} |")
    return "\n".join(lines)
