"""Two engines, each in a process of its own, that work by turns: while one is measured, the other sleeps on its pipe.

Before a measurement all must have come to rest, and by its CPU clock the one that waits must have done nothing
meanwhile. Linux only (/proc, process CPU clocks).
"""

import ctypes
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

REST_S = 0.02  # an engine is at rest when its CPU clock has not moved for this long
REST_TIMEOUT_S = 10.0
IDLE_LIMIT_S = 0.001  # CPU time that the waiting engine may use during a measurement: none, but for the clock's grain
STALL_LIMIT = 0.05  # share of a measurement during which the measured engine may have no core at all
RETRIES = 8


class BenchmarkError(Exception):
    """The comparison cannot be made, or would not be fair."""


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


def measure(worker: Worker, waiting: list[Worker], max_foreign: float, quiet: Quiet, do: str, **arguments) -> dict:
    """A command's reply while the others wait; it is given again if strangers disturb it, up to RETRIES times, of which
    the last is kept."""
    for left in reversed(range(RETRIES)):
        rest([worker, *waiting])
        idle = [other.cpu_s() for other in waiting]
        own, busy, begin = worker.cpu_s(), machine_busy_s(), time.monotonic()
        reply = worker.ask(do, **arguments)
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
