"""Speed and memory against llama.cpp: same file, same threads, same token ids, f16 KV, each engine in its own process.

    python benchmarks/vs_llama_cpp.py --models a.gguf b.gguf --peer-python PATH --out benchmarks/results/NAME.json

The peer is llama-cpp-python, built natively. README.md says what each row means and why the numbers can be trusted.
Linux only, see turns.py.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import turns
from report import (
    Bound,
    Ceiling,
    Footprint,
    Row,
    Spread,
    Target,
    Work,
    clearly_worse,
    common_prefix,
    footprint_table,
    speed_table,
    summary_table,
)
from turns import BenchmarkError, Quiet, Worker, measure, rest

HERE = Path(__file__).resolve().parent
OURS, PEER = "dasllama-torch", "llama.cpp"
TRIAL = 3  # rounds after which the peer's worse setting may be left out
FOOTPRINT_ROUNDS = 3
FOOTPRINT_DECODE = 8
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
FOOTPRINT = "footprint"


# ---- rows -----------------------------------------------------------------------------------------------------------


def start(engine: str, options: argparse.Namespace, threads: int) -> Worker:
    python, isa = (
        (options.peer_python, []) if engine == PEER else (sys.executable, [options.isa] if options.isa else [])
    )
    return Worker(engine, [python, str(HERE / "worker.py"), engine, str(threads), *isa])


@dataclass
class Contender:
    """An engine in one of its settings, and its replies, one a round."""

    worker: Worker
    setting: str = ""
    arguments: dict = field(default_factory=dict)
    replies: list[dict] = field(default_factory=list)

    def samples(self, task: Task) -> list[float]:
        return [task.value(reply["seconds"]) for reply in self.replies]


def prompts_of(task: Task, ids: list[int]) -> list[list[int]]:
    """The streams' prompts: the passage, from a start of its own for each stream, repeated where it is too short."""
    long = ids * (2 + (task.prompt + task.streams) // len(ids))
    return [long[i : i + task.prompt] for i in range(task.streams)]


def compare(
    task: Task, contenders: list[Contender], ids: list[int], rounds: int, max_foreign: float, quiet: Quiet
) -> None:
    """Fill the contenders' replies, after one unrecorded round. Who begins changes from round to round.

    From round TRIAL on, a setting whose every sample is worse than every sample of the same engine's other setting is
    left out.
    """
    workers = list({id(c.worker): c.worker for c in contenders}.values())
    command = {**task.command, "prompts": prompts_of(task, ids)}
    left = list(contenders)
    for round_ in range(-1, rounds):
        for turn in range(len(left)):
            contender = left[(round_ + turn) % len(left)]
            arguments = command | contender.arguments
            if round_ < 0:
                rest(workers)
                contender.worker.ask(**arguments)
            else:
                waiting = [worker for worker in workers if worker is not contender.worker]
                contender.replies.append(measure(contender.worker, waiting, max_foreign, quiet, **arguments))
        if round_ + 1 >= TRIAL:
            left = [contender for contender in left if not beaten(contender, left, task)]


def beaten(contender: Contender, contenders: list[Contender], task: Task) -> bool:
    mine = contender.samples(task)
    others = [c for c in contenders if c.worker is contender.worker and c is not contender]
    return any(clearly_worse(mine, other.samples(task), task.unit) for other in others)


def context_size(task: Task) -> int:
    """Tokens that a stream of the task holds, rounded up to 256."""
    return -(-(task.prompt + task.steps + 1) // 256) * 256


def peer_load(path: Path, n_ctx: int, options: argparse.Namespace) -> dict:
    return {"path": str(path), "n_ctx": n_ctx, "repack": not options.peer_plain}


def speed_rows(path: Path, threads: int, tasks: list[Task], options: argparse.Namespace, run: "Run") -> None:
    """Measure the tasks that the run lacks, and write after each."""
    tasks = [task for task in tasks if not run.has_row(path.stem, task, threads, options.rounds[threads])]
    if not tasks:
        return
    n_ctx = max(map(context_size, tasks))
    with start(PEER, options, threads) as peer, start(OURS, options, threads) as ours:
        run.note_engines(peer, ours)
        peer.ask("load", **peer_load(path, n_ctx, options))
        rest([peer])
        ours.ask("load", path=str(path), n_ctx=n_ctx)
        ids = peer.ask("tokenize", text=(HERE / "passage.txt").read_text())["ids"]
        work = ours.ask("work")["work"]
        for task in tasks:
            mine = Contender(ours)
            peers = [
                Contender(peer, "flash attention", {"flash": True}),
                Contender(peer, "no flash attention", {"flash": False}),
            ]
            compare(task, [mine, *peers], ids, options.rounds[threads], options.max_foreign, run.quiet)
            row = Row(path.stem, task.name, threads, task.unit, task.tokens, task.bound(work and Work(**work)))
            row.ours, row.peer = mine.samples(task), {c.setting: c.samples(task) for c in peers}
            row.agree = agreement(mine, next(c for c in peers if c.setting == row.best))
            run.add_row(row)
            print(f"{row.model}, {row.name}, {threads} threads: ratio {row.ratio:.2f}", file=sys.stderr, flush=True)
        run.served[f"{path.stem}, {threads} threads"] = ours.ask("served")
        run.write()


def agreement(ours: Contender, peer: Contender) -> tuple[int, int]:
    """Leading tokens that the engines chose alike, and how many were chosen. Ours choose the same in every round."""
    chosen = ours.replies[0]["ids"]
    if any(reply["ids"] != chosen for reply in ours.replies):
        raise BenchmarkError(f"{OURS}: the rounds of a row chose different tokens")
    return common_prefix(chosen, peer.replies[-1]["ids"]), len(chosen)


def footprints(path: Path, threads: int, options: argparse.Namespace, run: "Run") -> None:
    """Both engines in fresh processes, by turns: load, prefill of 512, some steps."""
    if run.has_footprint(path.stem):
        return
    task = dataclasses.replace(TASKS["prefill"], steps=FOOTPRINT_DECODE)
    n_ctx, size = context_size(task), path.stat().st_size
    loads = {OURS: {"path": str(path), "n_ctx": n_ctx}, PEER: peer_load(path, n_ctx, options)}
    both = {engine: Footprint(path.stem, engine, size) for engine in loads}
    with start(PEER, options, threads) as peer:
        peer.ask("load", **loads[PEER])
        ids = peer.ask("tokenize", text=(HERE / "passage.txt").read_text())["ids"]
    for _ in range(FOOTPRINT_ROUNDS):
        for engine, footprint in both.items():
            with start(engine, options, threads) as worker:
                run.note_engines(worker)
                footprint.load_s.append(worker.ask("load", **loads[engine])["seconds"])
                worker.ask(**task.command, prompts=prompts_of(task, ids))
                footprint.grown.append(worker.ask("memory")["peak"] - worker.about["memory"]["peak"])
                if engine == OURS:
                    footprint.tokenizer_s.append(worker.ask("tokenizer")["seconds"])
    run.footprints += both.values()
    run.write()


# ---- the run --------------------------------------------------------------------------------------------------------


class Run:
    """What has been measured, kept as JSON at `out` and as a report beside it, so that a run broken off can go on."""

    def __init__(self, out: Path | None, setup: dict, models: dict):
        """setup: what must be the same for measurements to stand in one table. models: {name: {bytes, sha256}}."""
        self.out, self.setup, self.models = out, setup, models
        self.commands: list[dict] = []  # command, date
        self.engines: dict[str, dict] = {}  # what each says about itself
        self.ceilings: dict[str, dict] = {}  # by threads, as ceilings.py gives them
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
        for key in ("commands", "engines", "ceilings", "served"):
            setattr(self, key, saved[key])
        self.quiet = Quiet(**saved["quiet"])
        for row in saved["rows"]:
            bound = row.pop("bound")
            self.rows.append(Row(**row, bound=bound and Bound(**bound)))
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
            about = {key: worker.about[key] for key in ("versions", "kernels")}
            if self.engines.setdefault(worker.engine, about) != about:
                raise BenchmarkError(f"{worker.engine} was {self.engines[worker.engine]}, and is {about} now")

    def ceiling(self, threads: int) -> Ceiling | None:
        """Of the instruction set that our kernels use; None where it was not measured."""
        isa, rates = self.engines[OURS]["kernels"], self.ceilings.get(str(threads), {})
        ops, read = rates.get(f"int8 dot {isa} [Gop/s]"), rates.get(f"read {isa} [GB/s]")
        return Ceiling(1e9 * ops["median"], 1e9 * read["median"]) if ops and read else None

    def write(self) -> None:
        if self.out is None:
            return
        full = {
            "commands": self.commands,
            "setup": self.setup,
            "models": self.models,
            "engines": self.engines,
            "ceilings": self.ceilings,
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
            parts.append(f"{engine}: {versions}; kernels: {about['kernels']}.")
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
        ceilings = {n: ceiling for n in threads if (ceiling := self.ceiling(n))}
        counted = ", ".join(f"{'/'.join(map(str, sorted(rounds[n])))} rounds with {n} threads" for n in threads)
        parts = [
            f"{counted}; median (quartiles); ratio of medians, above 1.00 where dasllama-torch is faster.",
            speed_table(self.rows, ceilings),
        ]
        parts += [
            f"Ceilings with {n} threads: {ceiling.ops / 1e9:.0f} int8 Gop/s, {ceiling.bytes / 1e9:.1f} GB/s read."
            for n, ceiling in ceilings.items()
        ]
        if self.quiet.foreign:
            share = Spread.of(self.quiet.foreign)
            parts.append(
                f"During a measurement the waiting engine used at most {1000 * self.quiet.idle_s:.3f} ms of CPU, and "
                f"other processes {share.median:.1%} of the machine (quartiles {share.low:.1%} to {share.high:.1%}, at "
                f"most {max(self.quiet.foreign):.1%}); the measured engine had no core for at most "
                f"{max(self.quiet.stalled):.1%} of the time. {self.quiet.repeated} measurements above the limits "
                f"(--max-foreign and {turns.STALL_LIMIT:.0%}) were repeated."
            )
        return [*parts, summary_table(self.rows, TARGETS, ceilings)]


def measure_ceilings(threads: int) -> dict:
    command = [sys.executable, str(HERE / "ceilings.py"), "--json", "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"ceilings.py ended with status {done.returncode}")
    return json.loads(done.stdout)


def machine() -> dict:
    with open("/proc/cpuinfo") as cpuinfo:
        model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "omp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
    }


def published(argument: str) -> str:
    """An argument as the report shows it: of an absolute path the last name."""
    return Path(argument).name if argument.startswith("/") else argument


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ",".join([*TASKS, FOOTPRINT])
    parser.add_argument("--models", required=True, nargs="+", type=Path, metavar="FILE", help="GGUF files")
    parser.add_argument("--rows", default=names, help="separated by commas (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--rounds", default="11", help="recorded rounds of each row, or one number for each of --threads (default: 11)"
    )
    parser.add_argument("--isa", help="instruction set of our kernels, such as avx2 (default: the best)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument(
        "--peer-plain",
        action="store_true",
        help="keep llama.cpp from repacking weights (AMX tiles, interleaved rows): it multiplies the file's own blocks",
    )
    parser.add_argument(
        "--max-foreign",
        type=float,
        default=0.1,
        help=f"share of the machine that other processes may use during a measurement before it is repeated, at most "
        f"{turns.RETRIES} times in all (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="write the samples as JSON here, and the report beside it as .md")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds, and measure what it lacks")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    threads, rounds = ([int(n) for n in text.split(",")] for text in (options.threads, options.rounds))
    for path in options.models:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    for row in options.rows:
        if row not in (*TASKS, FOOTPRINT):
            parser.error(f"unknown row {row!r}, wanted some of {names}")
    if len(rounds) not in (1, len(threads)):
        parser.error(f"{len(rounds)} numbers of rounds for {len(threads)} thread counts")
    if min(rounds + threads) < 1:
        parser.error("rounds and threads must be 1 or more")
    if options.resume and options.out is None:
        parser.error("--resume needs --out")
    options.rounds = dict(zip(threads, rounds * len(threads), strict=False))
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    arguments = sys.argv[1:] if argv is None else argv
    setup = {"machine": machine(), "isa": options.isa, "peer_plain": options.peer_plain}
    models = {path.stem: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in options.models}
    run = Run(options.out, setup, models)
    tasks = [TASKS[name] for name in options.rows if name in TASKS]
    try:
        if options.resume and options.out.exists():
            run.resume()
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        command = shlex.join(["python", "benchmarks/vs_llama_cpp.py", *map(published, arguments)])
        run.commands.append({"command": command, "date": date})
        for threads in options.rounds if tasks else ():
            if str(threads) not in run.ceilings:
                run.ceilings |= measure_ceilings(threads)
        for path in options.models:
            for threads in options.rounds:
                speed_rows(path, threads, tasks, options, run)
            if FOOTPRINT in options.rows:
                footprints(path, max(options.rounds), options, run)
    except BenchmarkError as error:
        print(f"vs_llama_cpp: {error}", file=sys.stderr)
        return 1
    print(run.markdown(), end="")
    return 0


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
