"""The benchmark's arithmetic, and its watch over the engine that waits. No timing gates: speed is measured by hand."""

import io
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from vocabularies import bpe

import dasllama_torch as dl
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def folder():
    """The scripts find their neighbours by their own folder."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def bench():
    import vs_llama_cpp

    return vs_llama_cpp


@pytest.fixture(scope="module")
def turns():
    import turns

    return turns


@pytest.fixture(scope="module")
def report():
    import report

    return report


# An engine in the worker's protocol: a command sleeps for `nap` seconds; after the reply the process spins until it has
# used `spin` seconds of CPU, as thread pools do. It chooses the same tokens always, or with `fickle` never.
STAND_IN = """
import json, os, sys, time
about = {"versions": {"stand-in": "1"}, "kernels": "avx2", "build": "f00"}
print(json.dumps(about | {"memory": {"peak": 100}}), flush=True)
work = dict(weights=10, weight_bytes=5, head_weights=2, head_bytes=1, attention=[[4, 0]])
asked = 0
for line in sys.stdin:
    ask, asked = json.loads(line), asked + 1
    if ask["do"] == "fail":
        print(json.dumps({"error": "ValueError: no such row"}), flush=True)
        continue
    if ask["do"] == "quit":
        sys.exit(3)
    if ask["do"] == "ceilings":
        print(json.dumps({"ops": 4000.0, "bytes": 1000.0}), flush=True)
        continue
    time.sleep(ask.get("nap", 0))
    ids = [1, 2, asked if "fickle" in sys.argv else 3]
    print(json.dumps({"seconds": 0.25, "ids": ids, "work": work, "peak": 300}), flush=True)
    until = time.process_time() + ask.get("spin", 0)
    while time.process_time() < until: pass
"""


@pytest.fixture
def stand_in(turns):
    """Makes workers that run STAND_IN, and ends them."""
    workers = []

    def make(name: str, *arguments: str):
        workers.append(turns.Worker(name, [sys.executable, "-c", STAND_IN, *arguments]))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()
        worker.__exit__()


def test_spread_is_median_and_quartiles(report):
    spread = report.Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert report.Spread.of([7.0]) == report.Spread(7.0, 7.0, 7.0)


def test_ratio_is_against_the_peers_better_setting(report):
    peer = {"a": [50.0, 300.0, 40.0], "b": [80.0, 79.0, 81.0]}
    row = report.Row("m", "prefill", 1, "tok/s", ours=[90.0, 120.0, 100.0], peer=peer)
    assert row.best == "b"  # by the median: one lucky round decides nothing
    assert row.ratio == pytest.approx(100 / 80)


def test_ratio_of_times_is_above_one_where_ours_takes_less(report):
    row = report.Row("m", "first token", 1, "ms", ours=[20.0, 20.0], peer={"a": [50.0, 50.0], "b": [30.0, 30.0]})
    assert row.best == "b"
    assert row.ratio == pytest.approx(1.5)


def test_values_in_the_rows_units(bench):
    assert bench.TASKS["prefill"].value(0.25) == 512 / 0.25
    assert bench.TASKS["decode"].value(2.0) == 64 / 2.0
    assert bench.TASKS["decode2048"].value(2.0) == 64 / 2.0
    assert bench.TASKS["batch8"].value(2.0) == 8 * 32 / 2.0
    assert bench.TASKS["ttft16"].value(0.25) == 250.0


def test_a_setting_is_beaten_only_where_no_sample_reaches_the_others(report):
    assert report.clearly_worse([1.0, 2.0], [2.1, 9.0], "tok/s")
    assert not report.clearly_worse([1.0, 2.2], [2.1, 9.0], "tok/s")
    assert report.clearly_worse([2.1, 9.0], [1.0, 2.0], "ms")
    assert not report.clearly_worse([2.1, 9.0], [1.0, 2.2], "ms")


WORK = dict(weights=100, weight_bytes=50, head_weights=30, head_bytes=20, attention=[(4, 0), (4, 8)])


def test_work_of_a_prompt(report):
    bound = report.Work(**WORK).prefill(10)
    assert bound.ops == 2 * (100 * 10 + 30)  # the head is wanted once
    assert bound.bytes == 50 + 20 + 4 * 10 + 4 * 8  # one layer sees no more than 8 tokens


def test_work_of_steps(report):
    bound = report.Work(**WORK).decode(3, 6, 4)  # streams, prompt, steps
    assert bound.ops == 2 * 3 * 4 * (100 + 30)
    assert bound.bytes == 4 * (50 + 20) + 3 * (4 * (7 + 8 + 9 + 10) + 4 * (7 + 8 + 8 + 8))


@pytest.fixture
def engine(oracle):
    """Our engine of the benchmark over a tiny model, without the settings of its process."""
    import worker

    def over(name: str):
        engine = worker.DasllamaTorch.__new__(worker.DasllamaTorch)
        engine.load_model, engine.create_session, engine.eval_batch = dl.load_model, dl.create_session, dl.eval_batch
        engine._streams = {}
        engine.load(str(oracle / "tiny" / f"{name}.gguf"), n_ctx=256)
        return engine

    return over


@pytest.mark.parametrize("name", ["gemma3", "llama", "llama_tied"])
def test_work_is_read_off_a_model(engine, oracle, name):
    tensors = GGUFFile(oracle / "tiny" / f"{name}.gguf").tensors
    matrices = [t for t in tensors.values() if t.name.startswith("blk.") and len(t.shape) == 2]
    head = tensors["output.weight" if name == "llama" else "token_embd.weight"]
    over = engine(name)
    work = over.work()
    assert (work["weights"], work["weight_bytes"]) == (
        sum(math.prod(t.shape) for t in matrices),
        sum(t.nbytes for t in matrices),
    )
    assert (work["head_weights"], work["head_bytes"]) == (math.prod(head.shape), head.nbytes)
    config = over.model.config
    of_a_token = 2 * 2 * config.num_key_value_heads * config.head_dim  # f16 keys and values
    windows = [layer.window for layer in config.layers]
    assert work["attention"] == [[of_a_token, window] for window in windows]
    assert (name == "gemma3") == any(windows)


def test_work_of_a_mixture_of_experts_is_not_known(engine):
    assert engine("qwen3moe").work() is None


def test_an_engine_measures_the_ceilings(engine, report):
    import worker

    found = report.Ceiling(**worker.COMMANDS["ceilings"](engine("llama")))
    assert min(found.ops, found.bytes) > 1e8  # a second: what any processor does


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])  # all keys; a window that passes; a recurrent state
def test_streams_go_back_to_the_end_of_their_prompts(engine, name):
    import worker

    over, prompts = engine(name), [list(range(3, 43)), list(range(5, 45))]
    first = worker.decode(over, prompts, 40)
    assert worker.decode(over, prompts, 40)["ids"] == first["ids"]
    worker.prefill(over, prompts[::-1])  # the same streams: what they held is gone
    assert worker.decode(over, prompts, 40)["ids"] == first["ids"]
    assert worker.decode(engine(name), prompts, 40)["ids"] == first["ids"]
    assert len(set(first["ids"])) > 1


def test_shares_of_the_ceilings(report):
    row = report.Row("m", "prefill", 1, "tok/s", tokens=512, bound=report.Bound(ops=3000, bytes=100), ours=[256.0])
    assert row.shares == {}
    row.ceilings = [report.Ceiling(ops, 500.0) for ops in (1000.0, 9000.0, 2000.0)]
    assert row.shares == {"int8": 0.75, "read": 0.1}
    row.unit, row.ours, row.ceilings = "ms", [500.0], [report.Ceiling(ops=8000.0, bytes=500.0)]
    assert row.shares == {"int8": 0.75, "read": 0.4}
    row.bound = None
    assert row.shares == {}


def test_table_lines(report):
    row = report.Row("m", "prefill 512", 2, "tok/s", ours=[100.0], peer={"a": [80.0], "b": [90.0]}, agree=(3, 64))
    line = "| m | prefill 512 | 2 | tok/s | 100.0 (100.0 to 100.0) | 90.0 (90.0 to 90.0) | b | 1.11 |{} 3 of 64 |"
    assert report.speed_table([row]).splitlines()[-1] == line.format("  |")
    row.tokens, row.bound = 100, report.Bound(ops=50, bytes=10)  # in one second
    row.ceilings = [report.Ceiling(ops=100.0, bytes=100.0)]
    assert report.speed_table([row]).splitlines()[-1] == line.format(" 50% int8 |")


def test_summary_over_the_models(report):
    def row(model: str, ours: float, threads: int = 1):
        ceilings = [report.Ceiling(ops=100.0, bytes=100.0)] if threads == 1 else []
        return report.Row(model, "prefill", threads, "tok/s", 1, report.Bound(8, 1), [ours], {"a": [1.0]}, ceilings)

    rows = [row("m", 2.0), row("n", 8.0), row("m", 3.0, threads=2)]

    def lines(target):
        return report.summary_table(rows, {"prefill": target}).splitlines()[2:]

    share = "32% (16% to 64%; target 30%)"
    assert lines(report.Target(3.9, 2.0, int8=0.3)) == [
        f"| prefill | 1 | 2 | 4.00 | 3.9 | 2.00 (m) | 2.0 | {share} | yes |",
        "| prefill | 2 | 1 | 3.00 | 3.9 | 3.00 (m) | 2.0 |  | no |",
    ]
    for unmet in (report.Target(4.1, 2.0), report.Target(3.9, 2.1), report.Target(3.9, 2.0, int8=0.33)):
        assert lines(unmet)[0].endswith(" no |")


def test_footprint_lines(report):
    sizes = [90_000_000, 350_000_000, 310_000_000]
    print_ = report.Footprint("m", "e", 100_000_000, [0.75], [], sizes)
    assert print_.over_file == 210_000_000
    line = "| m | e | 0.75 (0.75 to 0.75) | {} | 310 | 100 | +210 | {} |"

    def last(load_s: float, over_file: int) -> str:
        return report.footprint_table([print_], load_s, over_file).splitlines()[-1]

    assert last(0.5, 0) == line.format("", "")
    print_.tokenizer_s = [0.5]
    assert last(0.3, 210_000_000) == line.format("0.50", "yes")
    assert last(0.25, 210_000_000) == line.format("0.50", "no")
    assert last(0.3, 209_999_999) == line.format("0.50", "no")


def test_prompts_begin_at_different_tokens_and_repeat_a_short_passage(bench):
    task = bench.Task("t", 7, None, steps=1, streams=3)
    prompts = bench.prompts_of(task, [0, 1, 2, 3, 4])
    assert prompts == [[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2], [2, 3, 4, 0, 1, 2, 3]]


def test_common_prefix(report):
    assert report.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert report.common_prefix([1, 2], [1, 2, 3]) == 2
    assert report.common_prefix([], [1]) == 0


def test_passage_is_long_enough_for_a_prefill_of_512():
    assert len((FOLDER / "passage.txt").read_text().split()) > 512  # words, and no tokenizer gives fewer tokens


def test_rest_waits_until_an_engine_stops_spinning(turns, stand_in):
    worker = stand_in("spinner")
    before = worker.cpu_s()
    worker.ask("decode", spin=0.3)
    turns.rest([worker])
    rested = worker.cpu_s()
    assert rested - before > 0.3
    time.sleep(0.05)
    assert worker.cpu_s() == rested
    assert not worker.runnable()


def test_an_engine_that_never_rests_is_named(turns, stand_in, monkeypatch):
    monkeypatch.setattr(turns, "REST_TIMEOUT_S", 0.1)
    worker = stand_in("spinner")
    worker.ask("decode", spin=1.0)
    with pytest.raises(turns.BenchmarkError, match="spinner: still uses the CPU"):
        turns.rest([worker])


def test_an_engine_that_works_while_it_should_wait_is_found_out(turns, stand_in, monkeypatch):
    monkeypatch.setattr(turns, "STALL_LIMIT", 1.0)  # the stand-in sleeps
    measured, waiting = stand_in("measured"), stand_in("waiting")
    quiet = turns.Quiet()
    assert turns.measure(measured, [waiting], 1.0, quiet, do="decode", nap=0.1)["ids"] == [1, 2, 3]
    assert quiet.idle_s == 0
    assert len(quiet.foreign) == 1
    monkeypatch.setattr(turns, "rest", lambda workers: None)
    waiting.ask("decode", spin=1.0)
    with pytest.raises(turns.BenchmarkError, match="waiting used .* while measured was measured"):
        turns.measure(measured, [waiting], 1.0, quiet, do="decode", nap=0.5)


@pytest.mark.parametrize(("foreign", "stalled"), [(-1.0, 1.0), (1.0, -1.0)])
def test_disturbed_measurements_are_repeated_and_counted(turns, stand_in, monkeypatch, foreign, stalled):
    monkeypatch.setattr(turns, "STALL_LIMIT", stalled)
    quiet = turns.Quiet()
    turns.measure(stand_in("measured"), [], foreign, quiet, do="decode")  # one of the limits is one that nothing meets
    assert quiet.repeated == turns.RETRIES - 1
    assert len(quiet.foreign) == len(quiet.stalled) == 1


def test_an_engine_that_sleeps_counts_as_stalled(turns, stand_in, monkeypatch):
    monkeypatch.setattr(turns, "STALL_LIMIT", 1.0)
    quiet = turns.Quiet()
    turns.measure(stand_in("measured"), [], 1.0, quiet, do="decode", nap=0.3)
    assert quiet.stalled[0] > 0.9


class Recorder:
    """An engine whose replies take the seconds that `pace` gives for its setting, and that can do what it can do."""

    def __init__(self, engine: str, turns: list, pace: dict):
        self.engine, self.turns, self.pace = engine, turns, pace

    def ask(self, do, **arguments):
        if do == "ceilings":
            return {"ops": 10.0 + len(self.turns), "bytes": 1.0}
        setting = arguments.get("flash", "")
        self.turns.append(f"{self.engine}{setting}")
        return {"seconds": self.pace[setting], "ids": [1], "asked": {"do": do} | arguments}


@pytest.fixture
def play(bench, monkeypatch):
    """Runs `compare` with engine a, and b in settings 1 and 2 of the given seconds; returns contenders and turns."""

    def recorded(worker, waiting, max_foreign, quiet, **arguments):
        assert [other.engine for other in waiting] == [name for name in "ab" if name != worker.engine]
        return worker.ask(**arguments)

    def run(task, rounds: int, one: float, two: float):
        order: list[str] = []
        a, b = Recorder("a", order, {"": 1.0}), Recorder("b", order, {1: one, 2: two})
        contenders = [bench.Contender(a), bench.Contender(b, "1", {"flash": 1}), bench.Contender(b, "2", {"flash": 2})]
        ceilings = bench.compare(task, contenders, [1, 2, 3], rounds, 1.0, bench.Quiet())
        assert len(ceilings) == rounds
        assert ceilings[0] == bench.Ceiling(16.0, 1.0)  # after a round that is not recorded and the first one
        return contenders, order

    monkeypatch.setattr(bench, "measure", recorded)
    monkeypatch.setattr(bench, "rest", lambda workers: None)
    return run


def test_turns_alternate_and_the_first_round_is_not_recorded(bench, play):
    contenders, order = play(bench.Task("t", 2, None), 3, 1.0, 1.0)
    assert [len(c.replies) for c in contenders] == [3, 3, 3]
    assert order == ["b2", "a", "b1", "a", "b1", "b2", "b1", "b2", "a", "b2", "a", "b1"]
    assert contenders[1].replies[0]["asked"] == {"do": "prefill", "prompts": [[1, 2]], "flash": 1}
    contenders, _ = play(bench.Task("t", 1, None, steps=5), 1, 1.0, 1.0)
    assert contenders[0].replies[0]["asked"] == {"do": "decode", "prompts": [[1]], "steps": 5}


@pytest.mark.parametrize(
    ("one", "two", "rounds"), [(2.0, 1.5, [6, 3, 6]), (1.5, 2.0, [6, 6, 3]), (2.0, 2.0, [6, 6, 6])]
)
@pytest.mark.parametrize("unit", ["tok/s", "ms"])
def test_the_peers_worse_setting_is_left_out_after_the_trial(bench, play, one, two, rounds, unit):
    contenders, order = play(bench.Task("t", 2, None, unit=unit), 6, one, two)  # ours is never left out
    assert [len(c.replies) for c in contenders] == rounds


def test_ours_must_choose_the_same_tokens_in_every_round(bench):
    ours = bench.Contender(None, replies=[{"ids": [1, 2, 3]}, {"ids": [1, 2, 3]}])
    peer = bench.Contender(None, replies=[{"ids": [9, 9, 9]}, {"ids": [1, 2, 4]}])  # its last round counts
    assert bench.agreement(ours, peer) == (2, 3)
    ours.replies[1]["ids"] = [1, 2, 4]
    with pytest.raises(bench.BenchmarkError, match="dasllama-torch: the rounds of a row chose different tokens"):
        bench.agreement(ours, peer)


def test_a_failed_command_and_a_lost_process_are_named(turns, stand_in):
    worker = stand_in("engine")
    with pytest.raises(turns.BenchmarkError, match="engine: ValueError: no such row"):
        worker.ask("fail")
    with pytest.raises(turns.BenchmarkError, match="engine: its process ended with status 3"):
        worker.ask("quit")


class Counter:
    """An engine in process whose streams choose the number of tokens that they hold, and note what is done to them."""

    def __init__(self):
        import worker

        class Counted(worker.Streams):
            done: list = []

            def clear(self):
                super().clear()
                self.past = 0

            def feed(self, ids):
                self.past += len(ids[0])
                self.done.append(("feed", len(ids), len(ids[0])))
                return [self.past for _ in ids]

            def mark(self):
                self.marked = self.past

            def rewind(self):
                self.done.append(("rewind", self.past - self.marked))
                self.past = self.marked

        self.made = Counted()

    def about(self):
        return {"versions": {"engine": "1"}, "kernels": "plain"}

    def streams(self, n, flash=False):
        self.flash = flash
        return self.made


def test_worker_answers_over_its_pipe():
    import worker

    replies, prompts = io.StringIO(), [[7, 7, 7], [8, 8, 8]]
    decode = {"do": "decode", "prompts": prompts, "steps": 2, "flash": True}
    asked = [{"do": "prefill", "prompts": prompts}, decode, decode, {"do": "load"}]
    engine = Counter()
    worker.serve(lambda: engine, map(json.dumps, asked), replies)
    hello, prefilled, first, again, failed = map(json.loads, replies.getvalue().splitlines())
    assert hello["kernels"] == "plain"
    assert hello["memory"]["peak"] >= hello["memory"]["now"] > 0
    assert prefilled["ids"] == [3]  # the warm-up token is not part of the stream
    assert first["ids"] == again["ids"] == [3, 4, 5]
    assert min(reply["seconds"] for reply in (prefilled, first, again)) >= 0
    assert engine.flash
    warm_up, steps = [("feed", 2, 1), ("rewind", 1)], [("feed", 2, 1)] * 2
    assert engine.made.done == [
        *[("feed", 2, 1), ("feed", 2, 3)],
        *[("feed", 2, 3), *warm_up, *steps],
        *[("rewind", 2), *warm_up, *steps],  # the prompts are not evaluated again
    ]
    assert failed["error"].startswith("AttributeError")


def test_prompts_are_evaluated_again_after_other_ones():
    streams = Counter().made
    streams.after([[7, 7, 7]])
    streams.after([[8, 8]])
    streams.clear()
    streams.after([[8, 8]])
    assert streams.done == [("feed", 1, 3), ("feed", 1, 2), ("feed", 1, 2)]


@pytest.fixture
def whole(bench, turns, stand_in, monkeypatch, tmp_path):
    """Runs the script on a stand-in of a model and of both engines, and returns its status and what it wrote."""
    monkeypatch.setattr(bench, "start", lambda engine, options, threads: stand_in(engine))
    monkeypatch.setattr(bench, "FOOTPRINT_ROUNDS", 1)
    monkeypatch.setattr(turns, "STALL_LIMIT", 1.0)
    (tmp_path / "some.gguf").write_bytes(b"x" * 150)
    out = tmp_path / "results" / "run.json"

    def run(*arguments: str):
        model = ["--models", str(tmp_path / "some.gguf"), "--max-foreign", "1", "--out", str(out)]
        status = bench.main([*model, *arguments])
        return status, json.loads(out.read_text()), out.with_suffix(".md").read_text()

    return run


@pytest.mark.parametrize("rows", ["prefill,decode", "footprint", "prefill,footprint"])
def test_a_whole_run_is_printed_and_written(whole, capsys, rows):
    status, result, written = whole("--rows", rows, "--threads", "1", "--rounds", "1")
    assert status == 0
    assert capsys.readouterr().out == written
    assert result["engines"].keys() == {"dasllama-torch", "llama.cpp"}
    assert len(result["rows"]) == len(set(rows.split(",")) & {"prefill", "decode"})
    for row in result["rows"]:
        assert row["ours"] == row["peer"]["flash attention"] == row["peer"]["no flash attention"]
        assert f"| some | {row['name']} | 1 | tok/s |" in written
        assert f"| {row['name']} | 1 | 1 | 1.00 |" in written
    if "prefill" in rows:  # 2 * (10 weights * 512 tokens + 2 of the head) in 0.25 s, of 4000 a second
        assert "| 1024% int8 |" in written
    assert ("| some | llama.cpp | 0.25 (0.25 to 0.25) |  | 0 | 0 | +0 |  |" in written) == ("footprint" in rows)
    assert [f["grown"] for f in result["footprints"]] == [[200]] * (2 if "footprint" in rows else 0)


def test_the_report_names_no_folder_of_the_machine(whole, tmp_path):
    _, result, written = whole("--rows", "prefill", "--threads", "1", "--rounds", "1")
    assert "--models some.gguf" in result["commands"][0]["command"]
    assert str(tmp_path) not in written + json.dumps(result)


def test_a_run_goes_on_where_it_was_broken_off(whole, bench, monkeypatch):
    asked = []
    real = bench.compare

    def counted(task, *arguments):
        asked.append(task.name)
        return real(task, *arguments)

    monkeypatch.setattr(bench, "compare", counted)
    whole("--rows", "prefill", "--threads", "1", "--rounds", "1")
    status, result, _ = whole("--rows", "prefill,decode,footprint", "--threads", "1,2", "--rounds", "1,2", "--resume")
    assert status == 0
    assert asked == ["prefill 512", "decode 64, empty context", "prefill 512", "decode 64, empty context"]
    assert [(row["threads"], len(row["ours"])) for row in result["rows"]] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert len(result["commands"]) == 2
    assert len(result["quiet"]["foreign"]) == 3 * sum(len(row["ours"]) for row in result["rows"])
    whole("--rows", "prefill,footprint", "--threads", "1", "--rounds", "3", "--resume")
    _, result, _ = whole("--rows", "prefill,footprint", "--threads", "1", "--rounds", "2", "--resume")
    assert asked[4:] == ["prefill 512"]  # with more rounds than before; with fewer not
    assert [len(row["ours"]) for row in result["rows"]] == [1, 2, 2, 3]
    assert len(result["footprints"]) == 2


def test_another_setup_or_file_is_not_put_into_the_same_table(whole, capsys, tmp_path):
    rows = ("--rows", "prefill", "--threads", "1", "--rounds", "1")
    whole(*rows)
    status, result, _ = whole(*rows, "--resume", "--peer-plain")
    assert status == 1
    assert "peer_plain was False, and is True now" in capsys.readouterr().err
    (tmp_path / "some.gguf").write_bytes(b"y" * 150)
    assert whole(*rows, "--resume")[0] == 1
    assert "some was another file" in capsys.readouterr().err


def test_another_engine_is_not_put_into_the_same_table(bench, turns):
    class Engine:
        engine = "e"

        def __init__(self, kernels: str, build: str = "f00"):
            self.about = {"versions": {"e": "1"}, "kernels": kernels, "build": build, "memory": {}}

    run = bench.Run(None, {}, {})
    run.note_engines(Engine("avx2"), Engine("avx2"))
    with pytest.raises(turns.BenchmarkError, match="and is .*'kernels': 'avx512vnni'.* now"):
        run.note_engines(Engine("avx512vnni"))
    with pytest.raises(turns.BenchmarkError, match="'build': 'f00'}, and is .*'build': 'ba2'} now"):
        run.note_engines(Engine("avx2", "ba2"))


def test_a_build_is_known_by_its_code(tmp_path):
    import types

    import worker

    module = types.SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "lib" / "kernels.so").write_bytes(b"1")
    before = worker.build(module)
    (tmp_path / "notes.txt").write_text("no code")
    assert worker.build(module) == before
    (tmp_path / "lib" / "kernels.so").write_bytes(b"2")
    assert worker.build(module) != before


def test_wrong_arguments_are_refused(bench, capsys, tmp_path):
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            bench.parse(list(arguments))
        return capsys.readouterr().err

    some = tmp_path / "some.gguf"
    assert "no such file" in refused("--models", str(some))
    some.touch()
    assert "unknown row 'sprint'" in refused("--models", str(some), "--rows", "prefill,sprint")
    assert "2 numbers of rounds for 1 thread counts" in refused(
        "--models", str(some), "--rounds", "3,4", "--threads", "1"
    )
    assert "must be 1 or more" in refused("--models", str(some), "--rounds", "0")
    assert "--resume needs --out" in refused("--models", str(some), "--resume")
    options = bench.parse(["--models", str(some), str(some), "--threads", "1,2", "--rounds", "11,5"])
    assert (options.rounds, len(options.models)) == ({1: 11, 2: 5}, 2)


@pytest.fixture
def random_llama(monkeypatch, tmp_path):
    """A small one, and the metadata of the file that gave it its vocabulary."""
    import random_llama

    for name, value in dict(C=128, LAYERS=2, H=2, G=1, D=64, FF=256).items():
        monkeypatch.setattr(random_llama, name, value)
    words = bpe("smollm")
    write_gguf(tmp_path / "words.gguf", "llama", words, {})
    random_llama.write_f32(tmp_path / "made.gguf", tmp_path / "words.gguf", seed=0)
    return tmp_path / "made.gguf", words


def test_the_random_llama_loads_and_has_the_vocabulary_of_the_file(random_llama):
    path, words = random_llama
    model = dl.load_model(path)
    assert list(model.tokenizer.encode("a line")) == list(Tokenizer.from_metadata(Metadata(words)).encode("a line"))
    logits = dl.create_session(model).eval([1, 2, 3])
    assert logits.shape == (len(words["tokenizer.ggml.tokens"]),)
    assert 0.5 < logits.std() < 2  # the activations of a trained model, in size


def test_the_cost_of_prefixes_is_measured(random_llama, capsys):
    import prefix_cache

    before = torch.get_num_threads()
    try:
        prefix_cache.main([str(random_llama[0]), "--tokens", "300", "--rounds", "2", "--others", "1"])
    finally:
        torch.set_num_threads(before)
    printed = capsys.readouterr().out
    assert "attach   256 tokens" in printed
    assert "same session" in printed
    assert "new session" in printed
    assert "20 tokens evaluated" in printed
    assert "64 tokens evaluated" in printed  # of 320, all but four pages


def test_the_overhead_of_a_step_is_measured(random_llama, capsys):
    import step_overhead

    before = torch.get_num_threads()
    try:
        step_overhead.main([str(random_llama[0]), "--steps", "5"])
    finally:
        torch.set_num_threads(before)
    assert "outside of its programs" in capsys.readouterr().out
