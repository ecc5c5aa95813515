"""The arithmetic and the tables of a comparison. Speeds are kept as the samples that they came from, one a round."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

MB = 1e6


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


@dataclass(frozen=True)
class Work:
    """What a model has to do for a token: multiply by every weight of its layers, and of its head where a next token is
    wanted; and read the keys and values of the tokens before it.

    weights, weight_bytes: of the layers' matrices; head_weights, head_bytes: of the head. attention: for each layer the
    bytes of a token's keys and values, and the number of tokens seen (0: all).
    """

    weights: int
    weight_bytes: int
    head_weights: int
    head_bytes: int
    attention: list[tuple[int, int]]

    def prefill(self, tokens: int) -> "Bound":
        """One stream's prompt: each weight and each key is read at least once."""
        return Bound(2 * (self.weights * tokens + self.head_weights), self._weight_bytes + self._seen(tokens))

    def decode(self, streams: int, prompt: int, steps: int) -> "Bound":
        """Steps of one token for each stream, the first of them behind a prompt: a step reads each weight once."""
        seen = sum(self._seen(prompt + step) for step in range(1, steps + 1))
        ops = 2 * streams * steps * (self.weights + self.head_weights)
        return Bound(ops, steps * self._weight_bytes + streams * seen)

    @property
    def _weight_bytes(self) -> int:
        return self.weight_bytes + self.head_bytes

    def _seen(self, keys: int) -> int:
        return sum(each * (min(keys, window) if window else keys) for each, window in self.attention)


@dataclass(frozen=True)
class Bound:
    """The least that a measurement has to do. ops: multiplications and additions of int8 numbers; bytes: read once."""

    ops: int
    bytes: int


@dataclass(frozen=True)
class Ceiling:
    """What the machine can do at most with a row's threads and our instruction set: int8 operations and bytes read, per
    second."""

    ops: float
    bytes: float


@dataclass
class Row:
    """One line of the table: what was measured, and both engines' samples.

    unit: "tok/s", where more is better, or "ms", where less is. tokens: how many a measurement counts. bound: its work;
    None where that is unknown. peer: samples by the peer's setting. ceilings: what the machine could do, one a round.
    agree: how many leading tokens of the greedy continuations were equal, and of how many; None where none was decoded.
    """

    model: str
    name: str
    threads: int
    unit: str
    tokens: int = 1
    bound: Bound | None = None
    ours: list[float] = field(default_factory=list)
    peer: dict[str, list[float]] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)
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

    @property
    def seconds(self) -> float:
        """Of our median measurement."""
        median = Spread.of(self.ours).median
        return self.tokens / median if self.unit == "tok/s" else median / 1000

    @property
    def shares(self) -> dict[str, float]:
        """Our share of the int8 ceiling and of the read bandwidth, both as the median round had them; empty where work
        or ceilings are unknown."""
        if self.bound is None or not self.ceilings:
            return {}
        ops, read = (statistics.median(getattr(c, name) for c in self.ceilings) for name in ("ops", "bytes"))
        return {"int8": self.bound.ops / self.seconds / ops, "read": self.bound.bytes / self.seconds / read}


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def clearly_worse(samples: list[float], others: list[float], unit: str) -> bool:
    """Whether the best of samples is worse than the worst of others."""
    return max(samples) < min(others) if unit == "tok/s" else min(samples) > max(others)


def table(heads: Iterable, lines: Iterable[Iterable]) -> str:
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def speed_table(rows: list[Row]) -> str:
    """A row names the ceiling that it is nearer to."""
    heads = ["model", "row", "threads", "unit", "dasllama-torch", "llama.cpp", "its setting", "ratio", "of ceiling"]
    lines = []
    for row in rows:
        shares = row.shares
        nearest = max(shares, key=shares.get, default="")
        lines.append(
            [
                *(row.model, row.name, row.threads, row.unit, Spread.of(row.ours).text(1)),
                *(Spread.of(row.peer[row.best]).text(1), row.best, f"{row.ratio:.2f}"),
                f"{shares[nearest]:.0%} {nearest}" if nearest else "",
                "" if row.agree is None else f"{row.agree[0]} of {row.agree[1]}",
            ]
        )
    return table([*heads, "equal tokens"], lines)


@dataclass(frozen=True)
class Target:
    """What a kind of row is to reach over all models. mean: geometric mean of the ratios; least: the smallest of them;
    int8: mean share of the int8 ceiling, or None."""

    mean: float
    least: float
    int8: float | None = None


def summary_table(rows: list[Row], targets: dict[str, Target]) -> str:
    """A line for each kind of row (by its name) and number of threads, over all models."""
    heads = ["row", "threads", "models", "geometric mean", "target", "smallest ratio", "target", "of int8 ceiling"]
    lines = []
    for name, threads in dict.fromkeys((row.name, row.threads) for row in rows):
        group, target = [row for row in rows if (row.name, row.threads) == (name, threads)], targets[name]
        mean, least = statistics.geometric_mean(row.ratio for row in group), min(group, key=lambda row: row.ratio)
        shares = [row.shares.get("int8") for row in group]
        int8 = None if target.int8 is None or None in shares else statistics.geometric_mean(shares)
        met = (
            mean >= target.mean and least.ratio >= target.least and (target.int8 is None or (int8 or 0) >= target.int8)
        )
        lines.append(
            [
                *(name, threads, len(group), f"{mean:.2f}", target.mean),
                *(f"{least.ratio:.2f} ({least.model})", target.least),
                ""
                if int8 is None
                else f"{int8:.0%} ({min(shares):.0%} to {max(shares):.0%}; target {target.int8:.0%})",
                "yes" if met else "no",
            ]
        )
    return table([*heads, "met"], lines)


@dataclass
class Footprint:
    """Loading and memory of one engine in fresh processes.

    load_s: seconds, after the imports; tokenizer_s: those of the tokenizer in it, empty where that is not known. grown:
    bytes of VmHWM after load, prefill and decode, less VmHWM after imports.
    """

    model: str
    engine: str
    file_bytes: int
    load_s: list[float] = field(default_factory=list)
    tokenizer_s: list[float] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)

    @property
    def over_file(self) -> float:
        """Median bytes by which the growth exceeds the file."""
        return statistics.median(self.grown) - self.file_bytes

    def within(self, load_s: float, over_file: int) -> bool:
        """Whether loading without the tokenizer takes less than load_s and memory at most over_file more than the
        file."""
        rest = statistics.median(self.load_s) - statistics.median(self.tokenizer_s)
        return rest < load_s and self.over_file <= over_file


def footprint_table(footprints: list[Footprint], load_s: float, over_file: int) -> str:
    """load_s, over_file: the bars of `Footprint.within`, for the engine whose tokenizer's time is known."""
    heads = [
        "model",
        "engine",
        "load, s",
        "of it tokenizer, s",
        "peak memory, MB",
        "file, MB",
        "over the file, MB",
        "met",
    ]
    lines = []
    for f in footprints:
        tokenizer, met = "", ""
        if f.tokenizer_s:
            tokenizer, met = f"{statistics.median(f.tokenizer_s):.2f}", "yes" if f.within(load_s, over_file) else "no"
        grown = f"{statistics.median(f.grown) / MB:.0f}"
        size, over = f"{f.file_bytes / MB:.0f}", f"{f.over_file / MB:+.0f}"
        lines.append([f.model, f.engine, Spread.of(f.load_s).text(2), tokenizer, grown, size, over, met])
    return table(heads, lines)
