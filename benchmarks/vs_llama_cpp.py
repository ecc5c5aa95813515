"""Speed and memory against llama.cpp: same file, same threads, same token ids, f16 KV, each engine in its own process.

    python benchmarks/vs_llama_cpp.py --models a.gguf,b.gguf --peer-python PATH --out benchmarks/results/NAME.json

The peer is llama-cpp-python, built natively. The engines work by turns: before each measurement both must have come to
rest, and by its CPU clock the one that waits must have done nothing meanwhile. README.md says what each row means.
Linux only (/proc, process CPU clocks).
"""

import argparse
import ctypes
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from report import Footprint, Row, Spread, common_prefix, footprint_table, speed_table

HERE = Path(__file__).resolve().parent
OURS, PEER = "dasllama-torch", "llama.cpp"
REST_S = 0.02  # an engine is at rest when its CPU clock has not moved for this long
REST_TIMEOUT_S = 10.0
IDLE_LIMIT_S = 0.001  # CPU time that the waiting engine may use during a measurement: none, but for the clock's grain
STALL_LIMIT = 0.05  # share of a measurement during which the measured engine may have no core at all
RETRIES = 8
DECODE = 64
FOOTPRINT_ROUNDS = 3


@dataclass(frozen=True)
class Task:
    """One row's work: `streams` prompts of `prompt` tokens in one batch, then `decode` greedy steps.

    timed: which part of a measurement counts, prefill_s or decode_s. unit: as of `Row`.
    """

    label: str
    prompt: int
    decode: int
    timed: str
    streams: int = 1
    unit: str = "tok/s"

    def value(self, reply: dict) -> float:
        """A measurement in the row's unit."""
        if self.unit == "ms":
            return 1000 * reply[self.timed]
        return self.streams * (self.prompt if self.timed == "prefill_s" else self.decode) / reply[self.timed]


TASKS = {
    "prefill": Task("prefill 512", prompt=512, decode=0, timed="prefill_s"),
    "decode": Task("decode 64, empty context", prompt=1, decode=DECODE, timed="decode_s"),
    "decode2048": Task("decode 64, context 2048", prompt=2048, decode=DECODE, timed="decode_s"),
    "batch8": Task("decode 64, batch of 8", prompt=1, decode=DECODE, timed="decode_s", streams=8),
    "ttft16": Task("first token, prompt of 16", prompt=16, decode=0, timed="prefill_s", unit="ms"),
}
FOOTPRINT = "footprint"


class BenchmarkError(Exception):
    """The comparison cannot be made, or would not be fair."""


# ---- processes ------------------------------------------------------------------------------------------------------


class Worker:
    """An engine's process. It sleeps on its pipe unless `ask` waits for it."""

    def __init__(self, engine: str, command: list[str]):
        self.engine = engine
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        clock = ctypes.c_int()
        status = ctypes.CDLL(None).clock_getcpuclockid(self.process.pid, ctypes.byref(clock))
        if status != 0:
            raise BenchmarkError(f"{engine}: no CPU clock for its process: {os.strerror(status)}")
        self._clock = clock.value
        self.about = self._reply()

    def ask(self, do: str, **arguments) -> dict:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.engine}: its process ended with status {self.process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"{self.engine}: {reply['error']}")
        return reply

    def cpu_s(self) -> float:
        """CPU seconds of all threads of the process so far, exact to well below a millisecond (POSIX process clock)."""
        return time.clock_gettime(self._clock)

    def runnable(self) -> bool:
        """Whether a thread of the process runs or would run if it were given a core."""
        for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            try:
                state = stat.read_text().rpartition(")")[2].split()[0]  # follows the name, which may hold anything
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
            if state == "R":
                return True
        return False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def start(engine: str, python: str, threads: int) -> Worker:
    return Worker(engine, [python, str(HERE / "worker.py"), engine, str(threads)])


def rest(workers: list[Worker]) -> None:
    """Wait until no worker uses the CPU or asks for it: thread pools spin for a while after their work."""
    deadline = time.monotonic() + REST_TIMEOUT_S
    while True:
        before = [worker.cpu_s() for worker in workers]
        time.sleep(REST_S)
        busy = [w.engine for w, cpu_s in zip(workers, before, strict=True) if w.cpu_s() != cpu_s or w.runnable()]
        if not busy:
            return
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{', '.join(busy)}: still uses the CPU {REST_TIMEOUT_S:.0f} s after its work")


# ---- one measurement ------------------------------------------------------------------------------------------------


def machine_busy_s() -> float:
    """CPU seconds that this machine has spent on anything, stolen time included."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Quiet:
    """What else went on during the measurements that were kept.

    idle_s: most CPU seconds that a waiting engine used. For each measurement, foreign: the share of the machine that
    other processes used; stalled: the share of the time in which the engine had no core (at least, since it is what CPU
    seconds fall short of seconds). repeated: measurements thrown away because one of the two was above its limit.
    """

    idle_s: float = 0.0
    foreign: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    repeated: int = 0


def measure(worker: Worker, waiting: list[Worker], max_foreign: float, quiet: Quiet, **arguments) -> dict:
    """One measurement while the others wait; made again if strangers disturb it, but the last of RETRIES is kept."""
    for left in reversed(range(RETRIES)):
        rest([worker, *waiting])
        idle = [other.cpu_s() for other in waiting]
        own, busy, begin = worker.cpu_s(), machine_busy_s(), time.monotonic()
        reply = worker.ask("measure", **arguments)
        wall, busy, own = time.monotonic() - begin, machine_busy_s() - busy, worker.cpu_s() - own
        for other, before in zip(waiting, idle, strict=True):
            used = other.cpu_s() - before
            quiet.idle_s = max(quiet.idle_s, used)
            if used > IDLE_LIMIT_S:
                raise BenchmarkError(f"{other.engine} used {used:.3f} s of CPU while {worker.engine} was measured")
        foreign = max(0.0, busy - own) / (wall * os.cpu_count())
        stalled = max(0.0, 1 - own / wall)
        if (foreign <= max_foreign and stalled <= STALL_LIMIT) or left == 0:
            quiet.foreign.append(foreign)
            quiet.stalled.append(stalled)
            return reply
        quiet.repeated += 1


@dataclass(frozen=True)
class Contender:
    """An engine in one of its settings."""

    worker: Worker
    setting: str = ""
    arguments: dict = field(default_factory=dict)


def prompts_of(task: Task, ids: list[int]) -> list[list[int]]:
    """The streams' prompts: the passage, from a start of its own for each stream, repeated where it is too short."""
    long = ids * (2 + (task.prompt + task.streams) // len(ids))
    return [long[i : i + task.prompt] for i in range(task.streams)]


def compare(
    task: Task, contenders: list[Contender], ids: list[int], rounds: int, max_foreign: float, quiet: Quiet
) -> list[list[dict]]:
    """Replies of each contender, one a round, after one unrecorded round. Who begins changes from round to round."""
    replies: list[list[dict]] = [[] for _ in contenders]
    workers = list({id(c.worker): c.worker for c in contenders}.values())
    prompts = prompts_of(task, ids)
    for round_ in range(-1, rounds):
        for turn in range(len(contenders)):
            which = (round_ + turn) % len(contenders)
            contender = contenders[which]
            waiting = [worker for worker in workers if worker is not contender.worker]
            arguments = {"prompts": prompts, "n_decode": task.decode, **contender.arguments}
            if round_ < 0:
                rest(workers)
                contender.worker.ask("measure", **arguments)
            else:
                replies[which].append(measure(contender.worker, waiting, max_foreign, quiet, **arguments))
    return replies


# ---- rows -----------------------------------------------------------------------------------------------------------


def context_size(tasks: list[Task]) -> int:
    """Tokens that a stream of the longest task holds, rounded up to 256."""
    return -(-max(task.prompt + task.decode for task in tasks) // 256) * 256


def peer_load(path: Path, n_ctx: int, options: argparse.Namespace) -> dict:
    return {"path": str(path), "n_ctx": n_ctx, "repack": not options.peer_plain}


def speed_rows(path: Path, threads: int, tasks: list[Task], options: argparse.Namespace, result: dict) -> list[Row]:
    n_ctx, rows = context_size(tasks), []
    quiet: Quiet = result["quiet"]
    with start(PEER, options.peer_python, threads) as peer, start(OURS, sys.executable, threads) as ours:
        peer.ask("load", **peer_load(path, n_ctx, options))
        rest([peer])
        ours.ask("load", path=str(path), n_ctx=n_ctx)
        ids = peer.ask("tokenize", text=(HERE / "passage.txt").read_text())["ids"]
        contenders = [
            Contender(ours),
            Contender(peer, "flash attention", {"flash": True}),
            Contender(peer, "no flash attention", {"flash": False}),
        ]
        for task in tasks:
            replies = compare(task, contenders, ids, options.rounds, options.max_foreign, quiet)
            row = Row(path.stem, task.label, threads, task.unit)
            row.ours = [task.value(reply) for reply in replies[0]]
            of_peer = {c.setting: rs for c, rs in zip(contenders[1:], replies[1:], strict=True)}
            row.peer = {setting: [task.value(reply) for reply in rs] for setting, rs in of_peer.items()}
            chosen, peers = replies[0][0]["ids"], of_peer[row.best][0]["ids"]
            row.agree = (common_prefix(chosen, peers), len(chosen))
            rows.append(row)
            print(f"{row.model}, {row.name}, {threads} threads: ratio {row.ratio:.2f}", file=sys.stderr, flush=True)
        result["engines"] = {worker.engine: worker.about for worker in (ours, peer)}
        result["served"][f"{path.stem}, {threads} threads"] = ours.ask("served")
    return rows


def footprints(path: Path, threads: int, options: argparse.Namespace, result: dict) -> list[Footprint]:
    """Both engines in fresh processes, by turns: load, prefill of 512, decode of 64."""
    task = Task("footprint", prompt=512, decode=DECODE, timed="prefill_s")
    n_ctx, size = context_size([task]), path.stat().st_size
    both = {engine: Footprint(path.stem, engine, size) for engine in (OURS, PEER)}
    with start(PEER, options.peer_python, threads) as peer:
        peer.ask("load", **peer_load(path, n_ctx, options))
        ids = peer.ask("tokenize", text=(HERE / "passage.txt").read_text())["ids"]
    for _ in range(FOOTPRINT_ROUNDS):
        for engine, python in ((OURS, sys.executable), (PEER, options.peer_python)):
            with start(engine, python, threads) as worker:
                load = {"path": str(path), "n_ctx": n_ctx} if engine == OURS else peer_load(path, n_ctx, options)
                both[engine].load_s.append(worker.ask("load", **load)["load_s"])
                worker.ask("measure", prompts=prompts_of(task, ids), n_decode=task.decode)
                both[engine].grown.append(worker.ask("memory")["peak"] - worker.about["memory"]["peak"])
                result["engines"][engine] = worker.about
    return list(both.values())


# ---- report ---------------------------------------------------------------------------------------------------------


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


def markdown(result: dict, rows: list[Row], prints: list[Footprint]) -> str:
    quiet, host = result["quiet"], result["machine"]
    parts = [
        f"`{result['command']}`, {result['date']}",
        f"Machine: {host['cpu']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.1f} GiB, {host['system']}. "
        f"{result['rounds']} rounds; median (quartiles); ratio of medians, above 1.00 where dasllama-torch is faster.",
    ]
    for engine, about in result["engines"].items():
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        parts.append(f"{engine}: {versions}; kernels: {about['kernels']}.")
    if rows:
        parts.append(speed_table(rows))
        if quiet.foreign:
            share = Spread.of(quiet.foreign)
            parts.append(
                f"During a measurement the waiting engine used at most {1000 * quiet.idle_s:.3f} ms of CPU, and other "
                f"processes {share.median:.1%} of the machine (quartiles {share.low:.1%} to {share.high:.1%}, at most "
                f"{max(quiet.foreign):.1%}); the measured engine had no core for at most {max(quiet.stalled):.1%} of "
                f"the time. {quiet.repeated} measurements with more than {result['max_foreign']:.0%} or "
                f"{STALL_LIMIT:.0%} were repeated."
            )
    if prints:
        parts.append(footprint_table(prints))
    return "\n\n".join(parts) + "\n"


def write(out: Path | None, result: dict, rows: list[Row], prints: list[Footprint]) -> None:
    """What has been measured so far, as JSON and as a report: a run that is broken off keeps its finished rows."""
    if out is None:
        return
    full = result | {
        "quiet": dataclasses.asdict(result["quiet"]),
        "rows": [dataclasses.asdict(row) | {"best": row.best, "ratio": row.ratio} for row in rows],
        "footprints": [dataclasses.asdict(footprint) for footprint in prints],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(full, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(result, rows, prints))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ",".join([*TASKS, FOOTPRINT])
    parser.add_argument("--models", required=True, help="GGUF files, separated by commas")
    parser.add_argument("--rows", default=f"prefill,decode,{FOOTPRINT}", help=f"of {names} (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="recorded rounds of each row (default: %(default)s)")
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
        f"{RETRIES} times in all (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="write the samples as JSON here, and the report beside it as .md")
    options = parser.parse_args(argv)
    options.models = [Path(name) for name in options.models.split(",")]
    options.rows = options.rows.split(",")
    options.threads = [int(n) for n in options.threads.split(",")]
    for path in options.models:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    for row in options.rows:
        if row not in (*TASKS, FOOTPRINT):
            parser.error(f"unknown row {row!r}, wanted some of {names}")
    if options.rounds < 1 or min(options.threads) < 1:
        parser.error("rounds and threads must be 1 or more")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    arguments = sys.argv[1:] if argv is None else argv
    result = {
        "command": shlex.join(["python", "benchmarks/vs_llama_cpp.py", *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "rounds": options.rounds,
        "max_foreign": options.max_foreign,
        "models": {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in options.models},
        "engines": {},
        "served": {},
        "quiet": Quiet(),
    }
    tasks = [TASKS[name] for name in options.rows if name in TASKS]
    rows: list[Row] = []
    prints: list[Footprint] = []
    try:
        for path in options.models:
            for threads in options.threads if tasks else []:
                rows += speed_rows(path, threads, tasks, options, result)
                write(options.out, result, rows, prints)
            if FOOTPRINT in options.rows:
                prints += footprints(path, max(options.threads), options, result)
                write(options.out, result, rows, prints)
    except BenchmarkError as error:
        print(f"vs_llama_cpp: {error}", file=sys.stderr)
        return 1
    print(markdown(result, rows, prints), end="")
    return 0


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
