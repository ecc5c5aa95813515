"""Recorded steps: the modules' own results to the bit, and no longer than they are what the modules would do."""

import functools
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from conftest import ROOT
from families import TINY
from test_invariants import text
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dasllama_torch as dl
from dasllama_torch.engine import graphs
from dasllama_torch.errors import KernelError
from dasllama_torch.modules.norm import RMSNorm
from dasllama_torch.ops import elementwise, registry, report, reset_report
from dasllama_torch.ops.attention import attention
from dasllama_torch.ops.program import recording


@pytest.fixture
def model(oracle):
    return dl.load_model(oracle / "tiny" / "gemma3.gguf")


@pytest.fixture
def eager(monkeypatch):
    """Call f with the modules themselves serving every step."""

    def call(f):
        monkeypatch.setattr(graphs, "enabled", False)
        try:
            return f()
        finally:
            monkeypatch.setattr(graphs, "enabled", True)

    return call


def decode(model, ids, sessions=1, start=2):
    """Logits of single-token steps, sessions at different positions, each fed ids from another place."""
    opened = [dl.create_session(model, n_ctx=256) for _ in range(sessions)]
    for i, session in enumerate(opened):
        session.eval(ids[: 3 * i + start])
    steps = [torch.stack(dl.eval_batch(opened, [[ids[i + k]] for i in range(sessions)])) for k in range(len(ids) // 2)]
    for session in opened:
        session.close()
    return torch.stack(steps)


def counted(f):
    reset_report()
    result = f()
    return result, report().get("step", {})


@pytest.mark.parametrize("quantized", [False, True], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", TINY)
def test_every_family(name, quantized, oracle, q8_0, eager):
    model = dl.load_model(q8_0(name) if quantized else oracle / "tiny" / f"{name}.gguf")
    ids = text(11, 54)
    found, steps = counted(lambda: decode(model, ids[:20]))
    assert graphs.why_not(model) == ""
    assert steps["recorded"] == 9  # all but the first one
    assert torch.equal(found, eager(lambda: decode(model, ids[:20])))
    found, steps = counted(lambda: decode(model, ids, start=50))  # across pages, windows and original contexts
    assert steps["recorded"] >= 26
    assert torch.equal(found, eager(lambda: decode(model, ids, start=50)))


@pytest.mark.parametrize("sessions", [2, 3, 5, 8])
def test_batches(model, sessions, eager):
    ids = text(12, 60)
    found, steps = counted(lambda: decode(model, ids, sessions))
    assert steps["recorded"] == 29
    assert torch.equal(found, eager(lambda: decode(model, ids, sessions)))
    alone = decode(model, ids)  # rows of a batch are those of a session by itself
    assert torch.equal(found[:, 0], alone[:, 0])


def test_larger_batches_and_prompts_are_eager(model):
    _, steps = counted(lambda: decode(model, text(13, 40), 9))
    assert "recorded" not in steps
    with dl.create_session(model) as session:
        _, steps = counted(lambda: session.eval([1, 2, 3]))
    assert steps == {"eager": 1}


HOLD = {
    "the tensor": lambda logits: logits,
    "a view": lambda logits: logits[3:],
    "a detached view": lambda logits: logits.detach()[3:],
    "an array": lambda logits: logits.numpy(),
    "a buffer": lambda logits: memoryview(logits.numpy())[3:],
    "the storage": lambda logits: logits.untyped_storage(),
    "a view of other type": lambda logits: logits.view(torch.int32),
}


def _bytes(held) -> bytes:
    return bytes(held.numpy() if isinstance(held, torch.Tensor) else held)


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
def test_logits_that_are_kept_stay(model, hold):
    """Steps write logits into the memory of earlier ones, but not while anybody can see it."""
    ids = text(31, 40)
    with dl.create_session(model, n_ctx=64) as session:
        session.eval(ids[:5])
        wanted = [_bytes(hold(session.eval([token]))) for token in ids[5:30]]
        session.truncate(5)
        kept = [hold(session.eval([token])) for token in ids[5:30]]
        assert [_bytes(held) for held in kept] == wanted
        del kept
        addresses = {session.eval([token]).data_ptr() for token in ids[30:40]}
    assert len(addresses) <= 2  # one that the session holds, and one to write to


def test_logits_may_be_changed(model):
    with dl.create_session(model, n_ctx=64) as session:
        for token in (None, 5, 6, 7, 8):
            logits = session.eval(text(32, 5)) if token is None else session.eval([token])
            logits[session.sample()] = -torch.inf
            logits += 1  # of an ordinary tensor, which is the session's too
            best = logits.argmax().item()
            assert session.sample() == best


def test_threads(model, threads):
    ids = text(14, 40)
    results = []
    for n in (1, 2, 3, 2):
        threads(n)
        results.append(decode(model, ids, 2))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("names", [("gemma3", "llama"), ("gemma3", "gemma3")], ids=" ".join)
def test_two_threads_of_python(names, oracle):
    loaded = {name: dl.load_model(oracle / "tiny" / f"{name}.gguf") for name in set(names)}
    models = [loaded[name] for name in names]
    texts = text(15, 80), text(16, 80)
    wanted = [decode(model, ids) for model, ids in zip(models, texts, strict=True)]
    # A pool is not for two threads at once, but its sessions may be evaluated so.
    sessions = [dl.create_session(model, n_ctx=256) for model in models]
    for session, ids in zip(sessions, texts, strict=True):
        session.eval([*ids, *ids], logits=None)
        session.truncate(0)
        session.eval(ids[:2])
    found = [None, None]

    def work(i):
        found[i] = torch.stack([sessions[i].eval([token]) for token in texts[i][:40]])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b[:, 0]) for a, b in zip(found, wanted, strict=True))


def replace_submodule(model):
    old = model.model.layers[1].input_layernorm
    new = RMSNorm.__new__(RMSNorm)
    nn.Module.__init__(new)
    new.weight, new.eps = nn.Parameter(old.weight * 3, requires_grad=False), old.eps
    model.model.layers[1].input_layernorm = new


def replace_layer(model):
    model.model.layers[1] = model.model.layers[0]


def insert_layer(model):
    model.model.layers.insert(1, model.model.layers[0])


def replace_in_place(model):
    model.model.norm._parameters["weight"] = nn.Parameter(model.model.norm.weight * 2, requires_grad=False)


def replace_submodule_in_place(model):
    old = model.model.norm
    replace_submodule(model)
    model.model._modules.update(norm=model.model.layers[1].input_layernorm, other=old)


def replace_data(model):
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def scale_weight(model):
    model.model.norm.weight.mul_(2)


def load_weights(model):
    state = model.state_dict()
    state["model.norm.weight"] = state["model.norm.weight"] * 5
    model.load_state_dict(state)


def change_number(model):
    model.model.layers[0].self_attn.attn.scale *= 2


@pytest.mark.parametrize(
    "change",
    [
        replace_submodule, replace_layer, insert_layer, replace_in_place, replace_submodule_in_place,
        replace_data, scale_weight, load_weights, change_number,
    ],
)  # fmt: skip
def test_a_change_takes_effect_on_the_next_step(model, change, eager):
    ids = text(16, 12)
    with dl.create_session(model) as session:
        for token in ids:
            session.eval([token])
        change(model)
        # The keys and values are those of the model as it was, so what is expected goes on from the same ones.
        found = session.eval([7])
        session.truncate(len(ids))
        wanted = eager(lambda: session.eval([7]))
        assert torch.equal(found, wanted)
        _, steps = counted(lambda: session.eval([8]))
        assert steps == {"recorded": 1}


def test_other_code_in_the_place_of_a_method_runs(model, monkeypatch):
    calls = []
    rope = model.model.layers[0].self_attn.rope
    monkeypatch.setattr(rope, "forward", lambda *args, of=rope.forward: calls.append(1) or of(*args))
    compiled = []
    with dl.create_session(model) as session:
        for token in (1, 2, 3):
            session.eval([token])
        assert len(calls) == 6
        assert graphs.why_not(model) == "model.layers.0.self_attn.rope has a forward of its own"
        monkeypatch.undo()
        model.model.layers[0].mlp.compile(backend=lambda graph, inputs: compiled.append(1) or graph.forward)
        _, steps = counted(lambda: [session.eval([i]) for i in range(3)])
    assert steps == {"eager": 3}
    assert "compiled" in graphs.why_not(model)


def test_a_method_that_is_replaced_on_its_class_runs(model, monkeypatch):
    calls = []
    forward = RMSNorm.forward

    @functools.wraps(forward)
    def counting(self, x):
        calls.append(1)
        return forward(self, x)

    with dl.create_session(model) as session:
        for token in (1, 2, 3):
            session.eval([token])
        monkeypatch.setattr(RMSNorm, "forward", counting)
        _, steps = counted(lambda: [session.eval([i]) for i in range(3)])
        assert steps == {"eager": 3}
        assert calls
        assert "a forward that is not of this package" in graphs.why_not(model)
        monkeypatch.undo()
        _, steps = counted(lambda: [session.eval([i]) for i in range(3)])
    assert steps == {"eager": 1, "recorded": 2}


def test_a_hook_takes_effect_and_its_removal_too(model):
    ids = text(17, 20)
    with dl.create_session(model) as session:
        for token in ids:
            session.eval([token])
        seen = []
        hook = model.model.layers[2].mlp.register_forward_hook(lambda m, i, out: seen.append(out) or out * 0)
        hooked, steps = counted(lambda: session.eval([5]))
        assert steps == {"eager": 1}
        assert len(seen) == 1
        assert "a hook of model.layers.2.mlp" in graphs.why_not(model)
        hook.remove()
        session.eval([6])
        assert len(seen) == 1
        _, steps = counted(lambda: session.eval([6]))
        assert steps == {"recorded": 1}
    assert hooked.isfinite().all()


def test_modules_from_elsewhere_run_themselves(model):
    class Own(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    class OwnOfOurs(RMSNorm):
        calls = 0

        def forward(self, x):
            OwnOfOurs.calls += 1
            return super().forward(x)

    layer = model.model.layers[0]
    layer.post_feedforward_layernorm = Own()
    with dl.create_session(model) as session:
        _, steps = counted(lambda: [session.eval([i]) for i in range(1, 4)])
    assert steps == {"eager": 3}
    assert graphs.why_not(model) == "model.layers.0.post_feedforward_layernorm is a Own, which is not of this package"

    layer.post_feedforward_layernorm = layer.post_attention_layernorm
    layer.post_attention_layernorm.__class__ = OwnOfOurs
    with dl.create_session(model) as session:
        _, steps = counted(lambda: [session.eval([i]) for i in range(1, 4)])
    assert steps == {"eager": 3}
    assert OwnOfOurs.calls == 6


def test_what_cannot_be_recorded_is_named(model, monkeypatch):
    forward = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: torch.sin(forward(self, x)))
    monkeypatch.setattr(graphs, "_foreign_method", lambda cls: "")  # as if it were the package's own
    with dl.create_session(model) as session:
        _, steps = counted(lambda: [session.eval([i]) for i in range(1, 4)])
    assert steps == {"eager": 3}
    assert "aten.sin" in graphs.why_not(model)


def test_a_dropped_model_is_freed(oracle):
    model = dl.load_model(oracle / "tiny" / "gemma3.gguf")
    with dl.create_session(model) as session:
        session.eval([1])
        session.eval([2])
    model_gone, pool_gone = weakref.ref(model), weakref.ref(session.pool)
    del model, session
    gc.collect()
    assert model_gone() is None
    assert pool_gone() is None


def test_the_first_step_imports_nothing_heavy(oracle):
    code = (
        "import sys, dasllama_torch as dl\n"
        "from dasllama_torch.engine import graphs\n"
        "model = dl.load_model(sys.argv[1])\n"
        "session = dl.create_session(model)\n"
        "session.eval([1, 2, 3])\n"
        "before = set(sys.modules)\n"
        "session.eval([4])\n"
        "assert graphs.why_not(model) == ''\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    path = oracle / "tiny" / "llama.gguf"
    run = subprocess.run([sys.executable, "-c", code, path], check=True, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == []


def test_modes_see_every_op(model):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += func.namespace == "dasllama"
            return func(*args, **(kwargs or {}))

    with dl.create_session(model) as session:
        for token in (1, 2, 3):
            session.eval([token])
        with Count():
            _, steps = counted(lambda: session.eval([4]))
    assert steps == {"eager": 1}
    assert Count.calls > 50


def test_other_instruction_sets(model, isa):
    ids = text(18, 10)
    _, steps = counted(lambda: decode(model, ids))
    assert steps["recorded"] == 4
    assert set(report()["quant_linear"]) == {f"cpu/{isa}"}


# ---- programs -------------------------------------------------------------------------------------------------------


def test_a_program_refuses_what_its_ops_refuse(oracle):
    embed = dl.load_model(oracle / "tiny" / "llama.gguf").model.embed_tokens
    ids = torch.tensor([3, 4])
    with torch.inference_mode(), recording() as program:
        y = embed(ids)
    assert len(program) == 1
    ids[1] = 7
    program.run()
    assert torch.equal(y, embed(torch.tensor([3, 7])))
    ((op, seconds),) = program.profile()
    assert op == "embedding"
    assert seconds > 0
    ids[0] = 256
    with pytest.raises(KernelError, match="embedding: id 256 is outside the table of 256 rows"):
        program.run()


def test_programs_behind_each_other():
    """The second reads what the first has written; a void one stops both."""
    x = torch.tensor([1.0, 2.0])
    with recording() as first:
        y = elementwise.add(x, x)
    with recording() as second:
        z = elementwise.mul(y, y)
    with torch.inference_mode(), recording() as void:
        torch.exp(x)
    x[0] = 3
    first.run(second)
    assert z.tolist() == [36, 16]
    x[1] = 5
    with pytest.raises(KernelError, match=r"void: aten\.exp"):
        first.run(void)
    assert y.tolist() == [6, 4]


def test_programs_are_not_recorded_within_each_other():
    x = torch.ones(2)
    with recording() as program:
        with pytest.raises(KernelError, match="recorded already"), recording():
            pass
        elementwise.add(x, x)
    assert len(program) == 1
    program.run()


def test_void_programs():
    x = torch.randn(4, 6)
    with torch.inference_mode(), recording() as program:
        torch.exp(x)
    with pytest.raises(KernelError, match=r"void: aten\.exp"):
        program.run()
    with torch.inference_mode(), recording() as program:
        x.add_(1)
    assert "aten.add_" in program.refused
    with torch.inference_mode(), recording() as program:
        torch.narrow(x, 0, torch.tensor(1), 2)
    assert "narrow" in program.refused
    q = torch.randn(8, 3, 2).permute(1, 2, 0)
    rows = torch.zeros(3, dtype=torch.int32)
    with torch.inference_mode(), recording() as program:
        attention(q, q, q, rows, rows, rows + 1, rows, rows, 1.0, 0, 0.0, None)
    assert "attention" in program.refused
    norm = torch.ones(6)
    with torch.inference_mode(), recording() as program:
        torch.ops.dasllama.rms_norm(x.half(), norm, 1e-5)
    assert "dtype" in program.refused
    with registry.use_reference(), torch.inference_mode(), recording() as program:
        torch.ops.dasllama.rms_norm(x, norm, 1e-5)
    assert program.refused


SHAPES = [((), ()), ((5,), ()), ((3, 5), (5,)), ((3, 1, 5), (4, 1)), ((2, 3, 4, 5), (3, 1, 1)), ((0, 3), (3,))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_sums_products_and_copies_are_those_of_torch(shapes):
    a, b = (torch.randn(shape) for shape in shapes)
    for ours, theirs in ((elementwise.add, torch.add), (elementwise.mul, torch.mul)):
        assert torch.equal(ours(a, b), theirs(a, b))
        assert torch.equal(ours(b, a), theirs(b, a))
        torch.library.opcheck(ours, (a, b))
    if a.dim() > 1:
        assert torch.equal(elementwise.add(a.transpose(0, 1), a.transpose(0, 1)), (a + a).transpose(0, 1))
        assert elementwise.copy(a.transpose(0, 1)).is_contiguous()
        assert torch.equal(elementwise.copy(a.transpose(0, 1)), a.transpose(0, 1))
        torch.library.opcheck(elementwise.copy, (a.transpose(0, 1),))


def test_join():
    wide = torch.full((2, 3, 20), float("nan"))
    wide[..., 4:9] = torch.randn(2, 3, 5)
    a, b = wide[..., 4:9], torch.randn(2, 3, 7)
    assert torch.equal(elementwise.join(a, b), torch.cat([a, b], -1))
    assert elementwise.join(a[:0], b[:0]).shape == (0, 3, 12)
    torch.library.opcheck(elementwise.join, (a, b))
    with pytest.raises(RuntimeError, match=r"join: a .* and b .* differ before the last dim"):
        elementwise.join(a, b[:1])


def test_columns():
    x = torch.randn(2, 3, 7)
    for values, index in ((x, torch.tensor([6, 0, 0, 3])), (x[0, 0], torch.tensor([[6, 0], [0, 3]]))):
        assert torch.equal(elementwise.columns(values, index), values[..., index])
        torch.library.opcheck(elementwise.columns, (values, index))
    with pytest.raises(RuntimeError, match=r"index\[1\] is 7, wanted 0 to 6"):
        elementwise.columns(x, torch.tensor([0, 7]))


def test_elementwise_refusals():
    with pytest.raises(RuntimeError, match=r"do not go together"):
        elementwise.add(torch.zeros(3), torch.zeros(4))
    with pytest.raises(RuntimeError, match="must be f32"):
        elementwise.mul(torch.zeros(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(KernelError, match="use torch's own"):
        elementwise.copy(torch.zeros(3, requires_grad=True))


@pytest.mark.parametrize("name", TINY)
def test_prompts_share_activations(name, q8_0, eager):
    """One rounding of an activation for all weights that take it changes no bit."""
    model, ids = dl.load_model(q8_0(name)), text(17, 90)

    def prefill():
        with dl.create_session(model, n_ctx=256) as session:
            return session.eval(ids, logits="all")

    assert torch.equal(prefill(), eager(prefill))


def test_a_hook_may_write_to_what_others_take(q8_0, eager):
    model, ids = dl.load_model(q8_0("llama")), text(18, 20)

    def prefill():
        with dl.create_session(model) as session:
            return session.eval(ids)

    plain = prefill()
    attention = model.get_decoder().layers[0].self_attn

    def double_input(module, args, output):
        args[0].mul_(2)

    hook = attention.q_proj.register_forward_hook(double_input)
    doubled = prefill()
    assert not torch.equal(doubled, plain)
    assert torch.equal(doubled, eager(prefill))
    hook.remove()
    assert torch.equal(prefill(), plain)


@pytest.mark.parametrize(
    ("held", "most", "room"),
    [(0, 1, 8), (1, 300, 8), (8, 300, 8), (9, 300, 32), (32, 300, 32), (33, 300, 128), (129, 131, 131), (9, 10, 10)],
)
def test_room_of_a_captured_step(held, most, room):
    """One for all sessions that hold little; beyond, never more than they may come to hold."""
    assert graphs._room(held, most) == room
