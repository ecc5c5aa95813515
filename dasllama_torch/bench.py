"""Speed of a model on this machine: tokens per second, and where a forward's time goes, op by op, against what memory
and arithmetic could do.

    rows = dl.profile_decode(session, model.encode("a few tokens, one step each"))
    print(dl.profile_table(rows, dl.Ceilings.measure()))
"""

import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from dasllama_torch.api import create_session
from dasllama_torch.engine import graphs
from dasllama_torch.engine.session import Session, eval_batch
from dasllama_torch.errors import DasllamaError
from dasllama_torch.memory import huge_pages
from dasllama_torch.modules.causal_lm import CausalLM
from dasllama_torch.ops import program, registry
from dasllama_torch.ops.registry import Cost

SEED = 0  # of the token ids that are evaluated
READ_BYTES, LOOPS = 1 << 28, 1_000_000  # of one thread, for a ceiling

_library = registry.native_library
_library.dasllama_read_ceiling.argtypes = [ctypes.c_void_p, ctypes.c_int64]
for _loop in (_library.dasllama_fma_ceiling, _library.dasllama_dot_ceiling):
    _loop.argtypes, _loop.restype = [ctypes.c_int64], ctypes.c_int64


@dataclass(frozen=True)
class Ceilings:
    """What some cores can do together: memory read in GB/s; f32 and int8 products in Gop/s, a multiplication and an
    addition each."""

    threads: int
    read: float
    fma: float
    dot: float

    @classmethod
    def measure(cls, threads: int | None = None, rounds: int = 3) -> "Ceilings":
        """By loops of the instruction set in force (ops/csrc/kernels/ceilings.inl), on as many threads as torch has;
        the best round of each. Takes about 0.2 s a round."""
        threads = threads or torch.get_num_threads()
        buffers = [huge_pages(READ_BYTES) for _ in range(threads)]
        for buffer in buffers:
            buffer[::4096] = bytes(len(range(0, READ_BYTES, 4096)))  # memory of its own
        places = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
        with ThreadPoolExecutor(threads) as pool:

            def rate(loop: Callable, arguments: Iterable[tuple], work: float) -> float:
                """`work` of each thread per nanosecond."""
                start = time.perf_counter()
                for call in [pool.submit(loop, *each) for each in arguments]:
                    call.result()
                return threads * work / (time.perf_counter() - start) / 1e9

            def products(loop: Callable) -> float:
                return rate(loop, [(LOOPS,)] * threads, 2 * loop(1) * LOOPS)

            best = [
                (
                    rate(_library.dasllama_read_ceiling, [(place, READ_BYTES) for place in places], READ_BYTES),
                    products(_library.dasllama_fma_ceiling),
                    products(_library.dasllama_dot_ceiling),
                )
                for _ in range(rounds)
            ]
        return cls(threads, *map(max, zip(*best, strict=True)))


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a test ("pp512", "tg64", "tg64 @ 2048, 8 sessions"), a sample for each repetition."""

    test: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def measure_prefill(model: CausalLM, n: int, repetitions: int, kv_dtype: str = "f16") -> Speed:
    """A prompt of n tokens into an empty session, up to the logits of its last one. One run before is not counted."""
    ids = random_ids(model, n)

    def run() -> float:
        with create_session(model, kv_dtype, n_ctx=n) as session:
            return _seconds(partial(session.eval, ids))

    run()
    return Speed(f"pp{n}", tuple(n / run() for _ in range(repetitions)))


def measure_decode(
    model: CausalLM, n: int, repetitions: int, kv_dtype: str = "f16", depth: int = 0, batch: int = 1
) -> Speed:
    """n tokens, one at a time, after `depth` and one more that are not timed; batch: in each of so many sessions, all
    of whose tokens count."""
    ids = random_ids(model, depth + 1 + n)

    def run() -> float:
        sessions = [create_session(model, kv_dtype, n_ctx=len(ids)) for _ in range(batch)]
        try:
            if depth:
                eval_batch(sessions, [ids[:depth]] * batch, None)
            eval_batch(sessions, [[ids[depth]]] * batch)
            return _seconds(lambda: [eval_batch(sessions, [[token]] * batch) for token in ids[depth + 1 :]])
        finally:
            for session in sessions:
                session.close()

    run()
    test = f"tg{n}" + (f" @ {depth}" if depth else "") + (f", {batch} sessions" if batch > 1 else "")
    return Speed(test, tuple(batch * n / run() for _ in range(repetitions)))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def random_ids(model: CausalLM, n: int) -> list[int]:
    """n token ids of the model, the same each time. Speed does not depend on them, but for the choice of experts."""
    return torch.randint(model.config.n_vocab, (n,), generator=torch.Generator().manual_seed(SEED)).tolist()


# ---- op by op -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpRow:
    """Calls of one op on one shape. seconds, bytes and operations are of all of them; the latter are 0 where a recorded
    step did several ops as one."""

    op: str
    work: str
    calls: int
    seconds: float
    nbytes: int = 0
    operations: int = 0
    integer: bool = False

    def share_of(self, ceilings: Ceilings) -> float:
        """Speed as a share of the nearer ceiling: bytes read, or products."""
        products = ceilings.dot if self.integer else ceilings.fma
        return max(self.nbytes / ceilings.read, self.operations / products) / 1e9 / self.seconds


def profile_prefill(session: Session, ids: Sequence[int]) -> list[OpRow]:
    """Evaluate ids at the end of the session, and say what the ops of the forward took, the longest first.

    The modules themselves run, as for any prompt. Times are from call to return, with a few microseconds of Python; the
    first of several matmuls that take one activation also rounds it (`engine.graphs.sharing`).
    """
    with graphs.sharing(session.model), _Watch() as watch:
        session.eval(ids)
    return _rows(watch.calls)


def profile_decode(session: Session, ids: Sequence[int]) -> list[OpRow]:
    """Evaluate ids at the end of the session one at a time, and say what the ops of a recorded step took, the longest
    first: means over the steps after the second.

    The first step shows what each op has to do, the second is recorded (`engine.graphs`), so at least three are wanted.
    Raises DasllamaError for a model whose steps cannot be recorded, with the reason. What a recorded step does as one
    op though the modules do several has no cost.
    """
    if len(ids) < 3:
        raise ValueError(f"found {len(ids)} ids, wanted at least 3: one to watch, one to record, others to time")
    with _Watch() as watch:
        session.eval(ids[:1])
    session.eval(ids[1:2])
    with graphs.profiled() as steps:
        for token in ids[2:]:
            session.eval([token])
    if len(steps) != len(ids) - 2:
        raise DasllamaError(f"the steps of this model are not recorded: {graphs.why_not(session.model)}")
    names = [name for name, _ in steps[0]]
    seconds = [statistics.mean(times) for times in zip(*([s for _, s in step] for step in steps), strict=True)]
    costs: dict[str, list[Cost]] = {}
    for name, cost, _ in watch.calls:
        costs.setdefault(name, []).append(cost)
    counts = Counter(names)
    known = {name: iter(costs[name]) for name in counts if len(costs.get(name, ())) == counts[name]}
    return _rows(
        (name, next(known[name]) if name in known else Cost(0, 0, ""), spent)
        for name, spent in zip(names, seconds, strict=True)
    )


def profile(model: CausalLM, prompt: int, generate: int, depth: int, kv_dtype: str = "f16") -> dict[str, list[OpRow]]:
    """Both profiles by the name of their test, as `measure_prefill` and `measure_decode` would run it once, warm."""
    found = {}
    for _ in range(2):
        with create_session(model, kv_dtype, n_ctx=prompt) as session:
            found[f"pp{prompt}"] = profile_prefill(session, random_ids(model, prompt))
    ids = random_ids(model, depth + 2 + max(generate, 1))
    with create_session(model, kv_dtype, n_ctx=len(ids)) as session:
        if depth:
            session.eval(ids[:depth], None)
        rows = profile_decode(session, ids[depth:])
    found["a step" + (f" @ {depth}" if depth else "")] = rows
    return found


class _Watch(program.OpMode):
    """Notes name, cost and seconds of each op of this package, as recorded steps have them."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, Cost, float]] = []

    def call(self, func, args, kwargs):
        start = time.perf_counter()
        result = func(*args, **kwargs)
        spent = time.perf_counter() - start
        if func.namespace == "dasllama":
            cost = registry.cost_of(func, args, kwargs, result)
            self.calls.append((func._schema.name.removeprefix("dasllama::"), cost, spent))
        return result


def _rows(calls: Iterable[tuple[str, Cost, float]]) -> list[OpRow]:
    """Calls of one op on one shape together, the longest first."""
    groups: dict[tuple, list[tuple[Cost, float]]] = {}
    for name, cost, seconds in calls:
        groups.setdefault((name, cost.work, cost.integer), []).append((cost, seconds))
    rows = [
        OpRow(
            name,
            work,
            len(group),
            sum(seconds for _, seconds in group),
            sum(cost.nbytes for cost, _ in group),
            sum(cost.operations for cost, _ in group),
            integer,
        )
        for (name, work, integer), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def profile_table(rows: Sequence[OpRow], ceilings: Ceilings) -> str:
    """The rows as lines of text; the last column is the share of the nearer ceiling."""
    total = sum(row.seconds for row in rows)
    lines = [f"{'op':18} {'work':42} {'calls':>5} {'us':>9} {'share':>6} {'GB/s':>7} {'Gop/s':>8} {'of ceiling':>10}"]
    for row in rows:
        speed = f"{row.nbytes / row.seconds / 1e9:7.1f} {row.operations / row.seconds / 1e9:8.1f}"
        share, near = row.seconds / total, row.share_of(ceilings)
        lines.append(
            f"{row.op:18} {row.work:42} {row.calls:5} {row.seconds * 1e6:9.1f} {share:6.1%} {speed} {near:10.0%}"
        )
    nbytes, operations = sum(row.nbytes for row in rows), sum(row.operations for row in rows)
    speed = f"{nbytes / total / 1e9:7.1f} {operations / total / 1e9:8.1f}"
    lines.append(f"{'all':18} {'':42} {sum(row.calls for row in rows):5} {total * 1e6:9.1f} {'':6} {speed}")
    lines.append(
        f"ceilings of {ceilings.threads} threads: read {ceilings.read:.1f} GB/s, f32 {ceilings.fma:.0f} Gop/s, "
        f"int8 {ceilings.dot:.0f} Gop/s"
    )
    return "\n".join(lines)
