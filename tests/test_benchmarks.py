"""The benchmark's arithmetic, and its watch over the engine that waits. No timing gates: speed is measured by hand."""

import json
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """benchmarks/vs_llama_cpp.py, which like any script finds its neighbours by its own folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        import vs_llama_cpp

        yield vs_llama_cpp
    finally:
        sys.path.remove(str(FOLDER))


# An engine in the worker's protocol: a measurement sleeps for `nap` seconds; after the reply the process spins until it
# has used `spin` seconds of CPU, as thread pools do.
STAND_IN = """
import json, sys, time
print(json.dumps({"versions": {"stand-in": "1"}, "kernels": "none", "memory": {"peak": 100}}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if ask["do"] == "fail":
        print(json.dumps({"error": "ValueError: no such row"}), flush=True)
        continue
    if ask["do"] == "quit":
        sys.exit(3)
    time.sleep(ask.get("nap", 0))
    print(json.dumps({"prefill_s": 0.25, "decode_s": 2.0, "ids": [1, 2, 3], "load_s": 0.5, "peak": 300}), flush=True)
    until = time.process_time() + ask.get("spin", 0)
    while time.process_time() < until: pass
"""


@pytest.fixture
def stand_in(bench):
    """Makes workers that run STAND_IN, and ends them."""
    workers = []

    def make(name: str):
        workers.append(bench.Worker(name, [sys.executable, "-c", STAND_IN]))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()
        worker.__exit__()


def test_spread_is_median_and_quartiles(bench):
    spread = bench.Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert bench.Spread.of([7.0]) == bench.Spread(7.0, 7.0, 7.0)


def test_ratio_is_against_the_peers_better_setting(bench):
    peer = {"a": [50.0, 300.0, 40.0], "b": [80.0, 79.0, 81.0]}
    row = bench.Row("m", "prefill", 1, "tok/s", [90.0, 120.0, 100.0], peer)
    assert row.best == "b"  # by the median: one lucky round decides nothing
    assert row.ratio == pytest.approx(100 / 80)


def test_ratio_of_times_is_above_one_where_ours_takes_less(bench):
    row = bench.Row("m", "first token", 1, "ms", [20.0, 20.0], {"a": [50.0, 50.0], "b": [30.0, 30.0]})
    assert row.best == "b"
    assert row.ratio == pytest.approx(1.5)


def test_values_in_the_rows_units(bench):
    reply = {"prefill_s": 0.25, "decode_s": 2.0}
    assert bench.TASKS["prefill"].value(reply) == 512 / 0.25
    assert bench.TASKS["decode"].value(reply) == 64 / 2.0
    assert bench.TASKS["batch8"].value(reply) == 8 * 64 / 2.0
    assert bench.TASKS["ttft16"].value(reply) == 250.0


def test_table_lines(bench):
    row = bench.Row("m", "prefill 512", 2, "tok/s", [100.0], {"a": [80.0], "b": [90.0]}, agree=(3, 64))
    line = bench.speed_table([row]).splitlines()[-1]
    assert line == (
        "| m | prefill 512 | 2 | tok/s | 100.0 (100.0 to 100.0) | 90.0 (90.0 to 90.0) | b | 1.11 | 3 of 64 |"
    )
    print_ = bench.Footprint("m", "e", 100_000_000, [0.5], [90_000_000, 350_000_000, 310_000_000])
    assert print_.over_file == 210_000_000
    assert bench.footprint_table([print_]).splitlines()[-1] == "| m | e | 0.50 (0.50 to 0.50) | 310 | 100 | +210 |"


def test_prompts_begin_at_different_tokens_and_repeat_a_short_passage(bench):
    task = bench.Task("t", prompt=7, decode=1, timed="decode_s", streams=3)
    prompts = bench.prompts_of(task, [0, 1, 2, 3, 4])
    assert prompts == [[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2], [2, 3, 4, 0, 1, 2, 3]]


def test_common_prefix(bench):
    assert bench.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert bench.common_prefix([1, 2], [1, 2, 3]) == 2
    assert bench.common_prefix([], [1]) == 0


def test_passage_is_long_enough_for_a_prefill_of_512(bench):
    assert len((FOLDER / "passage.txt").read_text().split()) > 512  # words, and no tokenizer gives fewer tokens


def test_rest_waits_until_an_engine_stops_spinning(bench, stand_in):
    worker = stand_in("spinner")
    before = worker.cpu_s()
    worker.ask("measure", spin=0.3)
    bench.rest([worker])
    rested = worker.cpu_s()
    assert rested - before > 0.3
    time.sleep(0.05)
    assert worker.cpu_s() == rested
    assert not worker.runnable()


def test_an_engine_that_never_rests_is_named(bench, stand_in, monkeypatch):
    monkeypatch.setattr(bench, "REST_TIMEOUT_S", 0.1)
    worker = stand_in("spinner")
    worker.ask("measure", spin=1.0)
    with pytest.raises(bench.BenchmarkError, match="spinner: still uses the CPU"):
        bench.rest([worker])


def test_an_engine_that_works_while_it_should_wait_is_found_out(bench, stand_in, monkeypatch):
    monkeypatch.setattr(bench, "STALL_LIMIT", 1.0)  # the stand-in sleeps
    measured, waiting = stand_in("measured"), stand_in("waiting")
    quiet = bench.Quiet()
    assert bench.measure(measured, [waiting], 1.0, quiet, nap=0.1)["ids"] == [1, 2, 3]
    assert quiet.idle_s == 0
    assert len(quiet.foreign) == 1
    monkeypatch.setattr(bench, "rest", lambda workers: None)
    waiting.ask("measure", spin=1.0)
    with pytest.raises(bench.BenchmarkError, match="waiting used .* while measured was measured"):
        bench.measure(measured, [waiting], 1.0, quiet, nap=0.5)


@pytest.mark.parametrize(("foreign", "stalled"), [(-1.0, 1.0), (1.0, -1.0)])
def test_disturbed_measurements_are_repeated_and_counted(bench, stand_in, monkeypatch, foreign, stalled):
    monkeypatch.setattr(bench, "STALL_LIMIT", stalled)
    quiet = bench.Quiet()
    bench.measure(stand_in("measured"), [], foreign, quiet)  # one of the limits is one that nothing meets
    assert quiet.repeated == bench.RETRIES - 1
    assert len(quiet.foreign) == len(quiet.stalled) == 1


def test_an_engine_that_sleeps_counts_as_stalled(bench, stand_in, monkeypatch):
    monkeypatch.setattr(bench, "STALL_LIMIT", 1.0)
    quiet = bench.Quiet()
    bench.measure(stand_in("measured"), [], 1.0, quiet, nap=0.3)
    assert quiet.stalled[0] > 0.9


def test_turns_alternate_and_the_first_round_is_not_recorded(bench, monkeypatch):
    class Recorder:
        def __init__(self, engine):
            self.engine = engine

        def ask(self, do, **arguments):
            turns.append(self.engine)

    def recorded(worker, waiting, max_foreign, quiet, **arguments):
        assert [other.engine for other in waiting] == [name for name in "ab" if name != worker.engine]
        worker.ask("measure")
        return dict(arguments, prefill_s=1.0)

    turns, a, b = [], Recorder("a"), Recorder("b")
    monkeypatch.setattr(bench, "measure", recorded)
    monkeypatch.setattr(bench, "rest", lambda workers: None)
    on, off = bench.Contender(b, "on", {"flash": True}), bench.Contender(b, "off", {"flash": False})
    contenders = [bench.Contender(a), on, off]
    task = bench.Task("t", prompt=2, decode=1, timed="prefill_s")
    replies = bench.compare(task, contenders, [1, 2, 3], 3, 1.0, bench.Quiet())
    assert [len(of_one) for of_one in replies] == [3, 3, 3]
    assert turns == ["b", "a", "b", "a", "b", "b", "b", "b", "a", "b", "a", "b"]
    assert replies[1][0] == {"prompts": [[1, 2]], "n_decode": 1, "flash": True, "prefill_s": 1.0}


def test_a_failed_command_and_a_lost_process_are_named(bench, stand_in):
    worker = stand_in("engine")
    with pytest.raises(bench.BenchmarkError, match="engine: ValueError: no such row"):
        worker.ask("fail")
    with pytest.raises(bench.BenchmarkError, match="engine: its process ended with status 3"):
        worker.ask("quit")


def test_worker_answers_over_its_pipe(bench):
    import io

    import worker

    class Engine:
        def __init__(self):
            self.past = 0

        def about(self):
            return {"versions": {"engine": "1"}, "kernels": "plain"}

        def reset(self, n_seq, flash=False):
            self.past, self.flash = 0, flash

        def feed(self, ids):
            self.past += len(ids[0])
            return [self.past for _ in ids]

    replies = io.StringIO()
    asked = [{"do": "measure", "prompts": [[7, 7, 7], [8, 8, 8]], "n_decode": 2, "flash": True}, {"do": "load"}]
    worker.serve(Engine, map(json.dumps, asked), replies)
    hello, measured, failed = map(json.loads, replies.getvalue().splitlines())
    assert hello["kernels"] == "plain"
    assert hello["memory"]["peak"] >= hello["memory"]["now"] > 0
    assert measured["ids"] == [3, 4, 5]  # the warm-up token is not part of the stream
    assert min(measured["prefill_s"], measured["decode_s"]) >= 0
    assert failed["error"].startswith("AttributeError")


@pytest.mark.parametrize("rows", ["prefill,decode", "footprint", "prefill,footprint"])
def test_a_whole_run_is_printed_and_written(bench, stand_in, monkeypatch, capsys, tmp_path, rows):
    monkeypatch.setattr(bench, "start", lambda engine, python, threads: stand_in(engine))
    monkeypatch.setattr(bench, "FOOTPRINT_ROUNDS", 1)
    monkeypatch.setattr(bench, "STALL_LIMIT", 1.0)
    (tmp_path / "some.gguf").write_bytes(b"x" * 150)
    out = tmp_path / "results" / "run.json"
    arguments = ["--models", str(tmp_path / "some.gguf"), "--rows", rows, "--threads", "1", "--rounds", "1"]
    assert bench.main([*arguments, "--max-foreign", "1", "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert out.with_suffix(".md").read_text() == printed
    assert result["engines"].keys() == {"dasllama-torch", "llama.cpp"}
    assert len(result["rows"]) == len(set(rows.split(",")) & {"prefill", "decode"})
    for row in result["rows"]:
        assert row["ratio"] == 1.0
        assert row["ours"] == row["peer"]["flash attention"] == row["peer"]["no flash attention"]
        assert f"| some | {row['name']} | 1 | tok/s |" in printed
    assert ("| some | llama.cpp | 0.50 (0.50 to 0.50) | 0 | 0 | +0 |" in printed) == ("footprint" in rows)
    assert [f["grown"] for f in result["footprints"]] == [[200]] * (2 if "footprint" in rows else 0)


def test_wrong_arguments_are_refused(bench, capsys, tmp_path):
    with pytest.raises(SystemExit):
        bench.parse(["--models", str(tmp_path / "none.gguf")])
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "some.gguf").touch()
    with pytest.raises(SystemExit):
        bench.parse(["--models", str(tmp_path / "some.gguf"), "--rows", "prefill,sprint"])
    assert "unknown row 'sprint'" in capsys.readouterr().err
