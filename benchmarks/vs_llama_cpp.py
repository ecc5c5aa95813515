"""Speed and memory against llama.cpp: same file, same threads, same token ids, f16 KV, each engine in its own process.

    python benchmarks/vs_llama_cpp.py --models a.gguf b.gguf --peer-python PATH --out benchmarks/results/NAME.json

The peer is llama-cpp-python, built natively. README.md says what each row means and why the numbers can be trusted.
Linux only, see turns.py.
"""

import argparse
import dataclasses
import datetime
import hashlib
import os
import platform
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import turns
from record import OURS, PEER, Run
from report import Ceiling, Footprint, Row, Work, clearly_worse, common_prefix
from tasks import TASKS, Task
from turns import BenchmarkError, Quiet, Worker, measure, rest

HERE = Path(__file__).resolve().parent
TRIAL = 3  # rounds after which the peer's worse setting may be left out
FOOTPRINT = "footprint"  # the row that is none of TASKS
FOOTPRINT_ROUNDS = 3
FOOTPRINT_DECODE = 8


def start(engine: str, options: argparse.Namespace, threads: int) -> Worker:
    python = options.peer_python if engine == PEER else sys.executable
    isa = [options.isa] if options.isa and engine == OURS else []
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
) -> list[Ceiling]:
    """Fill the contenders' replies, after one unrecorded round. Who begins changes from round to round.

    Returns the ceilings, which the first contender's engine measures in every round.

    From round TRIAL on, a setting whose every sample is worse than every sample of the same engine's other setting is
    left out.
    """
    workers = list({id(c.worker): c.worker for c in contenders}.values())
    command = {**task.command, "prompts": prompts_of(task, ids)}
    left, ceilings = list(contenders), []
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
        if round_ >= 0:
            rest(workers)
            ceilings.append(Ceiling(**contenders[0].worker.ask("ceilings")))
        if round_ + 1 >= TRIAL:
            left = [contender for contender in left if not beaten(contender, left, task)]
    return ceilings


def beaten(contender: Contender, contenders: list[Contender], task: Task) -> bool:
    mine = contender.samples(task)
    others = [c for c in contenders if c.worker is contender.worker and c is not contender]
    return any(clearly_worse(mine, other.samples(task), task.unit) for other in others)


def context_size(task: Task) -> int:
    """Tokens that a stream of the task holds, rounded up to 256."""
    return -(-(task.prompt + task.steps + 1) // 256) * 256


def peer_load(path: Path, n_ctx: int, options: argparse.Namespace) -> dict:
    return {"path": str(path), "n_ctx": n_ctx, "repack": not options.peer_plain}


def speed_rows(path: Path, threads: int, tasks: list[Task], options: argparse.Namespace, run: Run) -> None:
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
            ceilings = compare(task, [mine, *peers], ids, options.rounds[threads], options.max_foreign, run.quiet)
            row = Row(path.stem, task.name, threads, task.unit, task.tokens, task.bound(work and Work(**work)))
            row.ceilings = ceilings
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


def footprints(path: Path, threads: int, options: argparse.Namespace, run: Run) -> None:
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
    # From here on by the number of threads.
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
