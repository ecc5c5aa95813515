"""The bench command and the profiles: rows, bytes and operations are those of the ops that ran."""

import json

import pytest
import torch

import dasllama_torch as dl
from dasllama_torch import bench, cli
from dasllama_torch.engine import graphs
from dasllama_torch.ops import registry
from dasllama_torch.ops.causal_conv1d import causal_conv1d_update
from dasllama_torch.ops.expert_linear import expert_linear
from dasllama_torch.ops.ggml_types import Q8_0, row_bytes
from dasllama_torch.ops.paged_attention import paged_attention

IDS = [3, 5, 7, 11, 13]


@pytest.fixture
def model(q8_0):
    return dl.load_model(q8_0("llama"))


def of(rows, op):
    return [row for row in rows if row.op == op]


def counted(call):
    registry.reset_report()
    result = call()
    return result, registry.report()


def test_a_prefill_profile_has_every_op(model):
    with dl.create_session(model) as session:
        rows, report = counted(lambda: dl.profile_prefill(session, IDS))
        assert session.tokens == IDS
    for op in ("quant_linear", "paged_attention", "kv_write", "rms_norm", "embedding"):
        assert sum(row.calls for row in of(rows, op)) == sum(report[op].values())
    assert all(row.seconds > 0 and row.calls > 0 for row in rows)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)


def test_bytes_and_operations_of_matrices(model):
    with dl.create_session(model) as session:
        rows = of(dl.profile_prefill(session, IDS), "quant_linear")
    layers = [m for m in model.modules() if type(m).__name__ == "Linear"]
    head = next(m for m in layers if m.gguf_name in ("output", "token_embd"))
    products = sum(m.in_features * m.out_features for m in layers if m is not head) * len(IDS)
    products += head.in_features * head.out_features  # of the last row only
    assert sum(row.operations for row in rows) == 2 * products
    moved = sum((m.in_features + m.out_features) * 4 for m in layers if m is not head) * len(IDS)
    moved += (head.in_features + head.out_features) * 4
    assert sum(row.nbytes for row in rows) == moved + sum(m.qweight.nbytes for m in layers)
    assert all(row.integer for row in rows if "Q8_0" in row.work)


def test_a_decode_profile_is_of_recorded_steps(model):
    with dl.create_session(model) as session, dl.create_session(model) as other:
        session.eval(IDS)
        other.eval(IDS)
        before = [other.eval([token]) for token in IDS]
        rows, report = counted(lambda: dl.profile_decode(session, IDS))
        assert report["step"]["recorded"] >= len(IDS) - 2
        assert session.tokens == other.tokens
        assert torch.equal(session.logits, before[-1])
    step = next(iter(graphs._models[model].steps.values()))
    assert sum(row.calls for row in rows) == len(step.body) + len(step.heads[0].program)
    weights = sum(m.qweight.nbytes for m in model.modules() if type(m).__name__ == "Linear")
    assert sum(row.nbytes for row in of(rows, "quant_linear")) > weights


def test_a_profile_of_steps_that_are_not_recorded_is_refused(model):
    with dl.create_session(model) as session:
        with pytest.raises(ValueError, match="at least 3"):
            dl.profile_decode(session, IDS[:2])
        hook = model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(dl.DasllamaError, match="a hook of model.layers.0"):
            dl.profile_decode(session, IDS)
        hook.remove()


def test_costs_of_experts_attention_and_states():
    x, ids = torch.zeros(3, 32), torch.tensor([[0, 2], [2, 0], [2, 2]])
    stack = torch.zeros(4, 5, row_bytes(Q8_0, 32), dtype=torch.uint8)
    args = x, stack, Q8_0, ids, None, True
    cost = registry.cost_of(expert_linear, args, {}, expert_linear(*args))
    nbytes = 2 * stack[0].nbytes + x.nbytes + 6 * 5 * 4
    assert cost == (nbytes, 2 * 6 * 32 * 5, "6 x 32 -> 5 Q8_0, 2 of 4 experts", True)

    cache = torch.zeros(2, 1, 16, 8)
    rows = torch.tensor([9, 10], dtype=torch.int32)
    arguments = torch.zeros(2, 4, 8), cache, cache, torch.tensor([[0, 1]]).int(), torch.zeros(2).int(), rows, rows + 1
    for window, keys, pairs in ((0, 11, 21), (4, 5, 8)):
        args = *arguments, 1.0, window, 0.0, None, 0, 0, 8
        cost = registry.cost_of(paged_attention, args, {}, paged_attention(*args))
        assert cost.nbytes == keys * 2 * 8 * 4 + 2 * 2 * 4 * 8 * 4
        assert cost.operations == pairs * 4 * (8 + 8) * 2

    x, weight, state = torch.zeros(3, 6), torch.zeros(6, 4), torch.zeros(9, 3, 6)
    args = x, weight, state, torch.tensor([4, 4, -1]).int()
    cost = registry.cost_of(causal_conv1d_update, args, {}, causal_conv1d_update(*args))
    assert cost.nbytes == 2 * x.nbytes + weight.nbytes + 3 * 4 + 2 * state[0].nbytes  # one slot, read and written


def test_ceilings_count_what_they_do(isa):
    ceilings = bench.Ceilings.measure(threads=1, rounds=1)
    assert min(ceilings.read, ceilings.fma, ceilings.dot) > 0
    for loop in (registry.native_library.dasllama_fma_ceiling, registry.native_library.dasllama_dot_ceiling):
        assert loop(5) == 5 * loop(1) > 0


def test_the_table_has_every_row():
    row = bench.OpRow("quant_linear", "1 x 64 -> 64 Q8_0", 7, 2e-6, 4_000, 8_000, True)
    ceilings = bench.Ceilings(threads=2, read=4.0, fma=1.0, dot=10.0)
    assert row.share_of(ceilings) == pytest.approx(0.5)
    first, last = (" ".join(line.split()) for line in bench.profile_table([row], ceilings).splitlines()[1:3])
    assert first == "quant_linear 1 x 64 -> 64 Q8_0 7 2.0 100.0% 2.0 4.0 50%"
    assert last == "all 7 2.0 2.0 4.0"


@pytest.mark.parametrize("extra", [[], ["--depth", "9", "--batch", "2", "--mode", "fp32"]])
def test_the_bench_command(q8_0, tmp_path, capsys, threads, extra):
    threads(torch.get_num_threads())
    out = tmp_path / "bench.json"
    arguments = ["--prompt", "20", "--generate", "4", "--repetitions", "2", "--threads", "1", "--profile", *extra]
    assert cli.main(["bench", str(q8_0("llama")), *arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    facts = json.loads(out.read_text())
    test = "tg4 @ 9, 2 sessions" if extra else "tg4"
    assert [speed["test"] for speed in facts["speeds"]] == ["pp20", test]
    assert all(len(speed["samples"]) == 2 and speed["median"] > 0 for speed in facts["speeds"])
    assert facts["threads"] == facts["ceilings"]["threads"] == 1
    assert list(facts["profiles"]) == ["pp20", "a step @ 9" if extra else "a step"]
    for line in ("1 threads", "pp20", test, "ceilings of 1 threads", "quant_linear"):
        assert line in printed
