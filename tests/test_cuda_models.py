"""Models on a GPU: the golden cases, sessions, memory. Skipped without one; `make test-cuda` runs them."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import absent_gpu
from families import TINY
from test_invariants import in_chunks, ragged, text, whole
from test_oracle_quant import TYPES
from test_oracle_tiny import N_CTX, lengths
from tolerances import (
    CUDA_CODES,
    CUDA_FUSED,
    CUDA_HALF,
    CUDA_LOGITS,
    CUDA_LOGPROB,
    GRADIENT,
    GREEDY_MARGIN,
    NATIVE_LOGPROB,
)

import dasllama_torch as dl
from dasllama_torch import device_memory, sampling
from dasllama_torch.device_memory import HostNumbers
from dasllama_torch.engine import graphs, lookahead, placement, runner
from dasllama_torch.ops import registry, report, reset_report

absent_gpu()


@pytest.fixture(params=TINY)
def case(request, oracle):
    path = oracle / "tiny" / f"{request.param}.gguf"
    return request.param, dl.load_model(path, mode="fp32", device="cuda"), np.load(path.with_suffix(".npz"))


def assert_near(name, found, wanted):
    worst = float(np.abs(found.cpu().numpy() - wanted).max() / wanted.std())
    assert worst <= CUDA_LOGITS * TINY[name], worst


def test_forward_without_a_cache(case):
    name, model, data = case
    for n in lengths(data):
        ids = torch.from_numpy(data[f"ids_s{n}"]).long().cuda()
        with torch.no_grad(), registry.strict():
            logits = model(ids[None]).logits[0]
        assert_near(name, logits[data[f"rows_s{n}"]], data[f"logits_hf_s{n}"])


def test_session(case):
    """All rows at once and one by one, no op by its reference; the weights lie on the GPU."""
    name, model, data = case
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    for n in lengths(data):
        ids = data[f"ids_s{n}"].tolist()
        n_ctx = N_CTX if n <= N_CTX else 2 * N_CTX
        with registry.strict(), dl.create_session(model, kv_dtype="f32", n_ctx=n_ctx) as session:
            assert_near(name, session.eval(ids, logits="all")[data[f"rows_s{n}"]], data[f"logits_hf_s{n}"])
        if n <= 40:
            with registry.strict(), dl.create_session(model, kv_dtype="f32", n_ctx=n_ctx) as session:
                logits = torch.stack([session.eval([token]) for token in ids])
            assert_near(name, logits[data[f"rows_s{n}"]], data[f"logits_hf_s{n}"])


def test_greedy(case):
    _, model, data = case
    for n in (7, 40):
        margins = data[f"greedy_margin_hf_s{n}"]
        with dl.create_session(model, kv_dtype="f32", n_ctx=N_CTX) as session:
            ids = [token for token, _ in session.generate(data[f"ids_s{n}"].tolist(), max_tokens=24)]
        clear = int(np.argmax([*(margins <= GREEDY_MARGIN), True]))
        same = int(np.argmax([*(np.array(ids) != data[f"greedy_hf_s{n}"]), True]))
        assert same >= clear, f"differs at step {same}, margin {margins[same]:.4f}"


@pytest.mark.parametrize(("mode", "dtype"), [("fp32", "bf16"), ("native", "bf16"), ("native", "f16")])
@pytest.mark.parametrize("name", [*(f"llama-{name}" for name in TYPES), "qwen3moe-q4_k_m"])
def test_every_type(name, mode, dtype, oracle):
    path = oracle / "quant" / f"{name}.gguf"
    data = np.load(path.with_suffix(".npz"))
    model = dl.load_model(path, mode=mode, device="cuda", dtype=dtype)
    ids, rows = data["ids"].tolist(), data["rows"]
    with registry.strict(), dl.create_session(model, kv_dtype="f32") as session:
        together = session.eval(ids, logits="all")[rows]
        session.truncate(0)
        single = torch.stack([session.eval([token]) for token in ids])[rows]
    if mode == "fp32":
        wanted = data["logits_dequant_fp32"]
        for logits in (together, single):
            assert np.abs(logits.numpy() - wanted).max() <= CUDA_LOGITS * wanted.std()
    else:  # single rows on ggml's lattices, as llama.cpp; many as close to the weights
        exact, native = (
            torch.from_numpy(data[f"logits_{key}"]).log_softmax(-1) for key in ("dequant_fp32", "lcpp_kv32")
        )
        distance = (together.log_softmax(-1) - exact).abs().mean(), (single.log_softmax(-1) - native).abs().mean()
        assert distance[0] <= CUDA_LOGPROB
        assert distance[1] <= NATIVE_LOGPROB


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0", "tq4", ("q8_0", "tq4")])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "qwen35"])
def test_codecs(name, kv_dtype, oracle):
    path = oracle / "tiny" / f"{name}.gguf"
    ids = np.load(path.with_suffix(".npz"))["ids_s100"].tolist()
    found, wanted = (
        whole(dl.load_model(path, mode="fp32", device=device), ids, kv_dtype).cpu() for device in ("cuda", "cpu")
    )
    assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean() <= CUDA_CODES


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "qwen35", "gpt-oss"])
def test_however_the_tokens_are_cut_and_whoever_else_is_in_the_batch(name, oracle):
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32", device="cuda")
    ids = text(9, 75)
    wanted = whole(model, ids, "f32")
    for size in (1, 3, 64):
        assert (in_chunks(model, ids, size, "f32") - wanted).abs().max() <= CUDA_LOGITS * TINY[name] * wanted.std()
    for found, alone in ragged(model):
        assert (found - alone).abs().max() <= 10 * CUDA_LOGITS * TINY[name] * alone.std()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "gpt-oss", "qwen35"])
def test_gradient(name, oracle):
    ids = torch.tensor([text(3, 20)])
    gradients = []
    for device in ("cuda", "cpu"):
        model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32", device=device)
        x = model.get_input_embeddings()(ids.to(device)).detach().requires_grad_()
        logits = model(inputs_embeds=x).logits
        logits.log_softmax(-1)[0, :-1].gather(1, ids.to(device)[0, 1:, None]).mean().backward()
        gradients.append(x.grad.cpu())
    assert (gradients[0] - gradients[1]).abs().max() <= 10 * GRADIENT * gradients[1].std()


def test_a_session_goes_on_on_the_other_device(oracle, tmp_path):
    path = oracle / "tiny" / "qwen35.gguf"
    here, there = (dl.load_model(path, mode="fp32", device=device) for device in ("cpu", "cuda"))
    with dl.create_session(here) as session:
        session.eval(text(1, 30))
        session.save(tmp_path / "session")
        wanted = session.eval([3, 4, 5])
    with dl.load_session(there, tmp_path / "session") as session:
        found = session.eval([3, 4, 5])
    assert (found - wanted).abs().max() <= 10 * CUDA_LOGITS * wanted.std()


def test_memory_comes_page_by_page_and_goes(oracle, monkeypatch):
    """As the driver is asked for it: how much of the device is free, other processes change as well."""
    gc.collect()  # what others have left
    asked, call = Counter(), device_memory._call

    def counted(name, *args):
        call(name, *args)
        asked[name] += args[1].value if name in ("MemCreate", "MemUnmap") else 0

    monkeypatch.setattr(device_memory, "_call", counted)

    def taken():
        return asked["MemCreate"] - asked["MemUnmap"]

    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    pool = dl.create_kv_pool(model, max_bytes=64 << 30)  # address space
    with dl.create_session(model, n_ctx=65536, pool=pool) as session:
        for _ in range(40):
            session.eval(text(5, 512), logits=None)
        assert pool.used_bytes <= taken() <= pool.used_bytes + (256 << 20)
        fork = session.fork()
        wanted = session.eval([7])
        assert torch.equal(fork.eval([7]), wanted)
        fork.close()
    pool.release()
    assert 0 <= taken() <= 256 << 20
    with dl.create_session(model, pool=pool) as session:  # what was given back comes again
        assert torch.isfinite(session.eval(text(5, 100))).all()


def test_a_pool_that_is_full_leaves_sessions_as_they_were(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", mode="fp32", device="cuda")
    pool = dl.create_kv_pool(model, max_bytes=1 << 20)
    with dl.create_session(model, pool=pool, n_ctx=65536) as session:
        session.eval(text(5, 100))
        with pytest.raises(dl.OutOfPages):
            session.eval(text(6, 8192))
        assert session.n_past == 100
        assert torch.isfinite(session.eval([1])).all()


def test_weights_that_do_not_fit_are_refused(oracle, monkeypatch):
    monkeypatch.setattr("dasllama_torch.device_memory.free_memory", lambda device: 1000)
    with pytest.raises(dl.OutOfMemory, match="the weights are .* bytes, and cuda has 1000 left"):
        dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")


def test_a_gpu_that_is_not_there_is_refused(oracle):
    with pytest.raises(dl.KernelError, match="'cuda:99' is not there"):
        dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda:99")


def test_tied_weights_stay_one(oracle):
    model = dl.load_model(oracle / "tiny" / "llama_tied.gguf", device="cuda")
    assert model.lm_head.qweight.data_ptr() == model.get_input_embeddings().qweight.data_ptr()


def decode(model, ids, sessions):
    """Logits of single rows, of sessions at different positions."""
    opened = [dl.create_session(model, n_ctx=256) for _ in range(sessions)]
    for i, session in enumerate(opened):
        session.eval(ids[: 3 * i + 2])
    steps = [torch.stack(dl.eval_batch(opened, [[ids[i + k]] for i in range(sessions)])) for k in range(30)]
    for session in opened:
        session.close()
    return torch.stack(steps)


@pytest.mark.parametrize("quantized", [False, True], ids=["f32", "q8_0"])
@pytest.mark.parametrize("name", TINY)
def test_captured_steps_are_the_modules(name, quantized, oracle, q8_0, monkeypatch):
    model = dl.load_model(q8_0(name) if quantized else oracle / "tiny" / f"{name}.gguf", device="cuda")
    ids = text(11, 100)
    for sessions in (1, 3):
        reset_report()
        with registry.strict():
            found = decode(model, ids, sessions)
        assert graphs.why_not(model) == ""
        assert report()["step"]["captured"] == 29
        monkeypatch.setattr(graphs, "enabled", False)
        wanted = decode(model, ids, sessions)
        monkeypatch.setattr(graphs, "enabled", True)
        difference = (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean()
        assert difference <= (CUDA_FUSED if quantized else 1e-5), difference


def test_captured_steps_of_several_rooms(oracle, monkeypatch):
    """How much a session holds decides which one it takes, whatever another one has taken before."""
    model = dl.load_model(oracle / "tiny" / "llama.gguf", mode="fp32", device="cuda")
    monkeypatch.setattr(graphs, "LEAST_ROOM", 1)

    def run(enabled: bool) -> torch.Tensor:
        monkeypatch.setattr(graphs, "enabled", enabled)
        reset_report()
        with dl.create_session(model, n_ctx=1000) as longer, dl.create_session(model, n_ctx=200) as other:
            longer.eval(text(5, 50))
            other.eval(text(6, 5))
            order = [*[longer] * 30, *[other] * 3, *[longer] * 2]
            return torch.stack([session.eval([7 + i]) for i, session in enumerate(order)])

    found = run(True)
    assert report()["step"] == {"eager": 4, "captured": 33}  # two prompts, and the first step of each room
    assert {blocks for _, _, blocks in graphs.steps_of(model).steps} == {1, 4}
    wanted = run(False)
    assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean() <= 1e-5


def test_a_hook_is_seen_and_a_changed_weight(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session:
        for token in (1, 2, 3):
            session.eval([token])
        hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 0)
        reset_report()
        muted = session.fork().eval([4])
        assert report()["step"] == {"eager": 1}
        hook.remove()
        plain = session.fork().eval([4])
        assert not torch.equal(muted, plain)
        model.model.norm.weight.mul_(2)
        assert torch.allclose(session.fork().eval([4]), 2 * plain, rtol=1e-3, atol=1e-3)
        model.model.norm.weight.data = model.model.norm.weight.data * 2  # no epoch tells
        assert torch.allclose(session.fork().eval([4]), 4 * plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
def test_weights_of_a_recurrent_model_that_lie_elsewhere(name, oracle, monkeypatch):
    """A captured step that began with what lay there before could not be taken back: the states have changed."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32", device="cuda")
    norm = model.model.layers[0].input_layernorm.weight

    def run(enabled: bool) -> torch.Tensor:
        monkeypatch.setattr(graphs, "enabled", enabled)
        reset_report()
        with dl.create_session(model) as session:
            rows = []
            for token in range(1, 12):
                if token in (5, 8):
                    norm.data = norm.data * (2 if token == 5 else 0.5)  # no epoch tells
                rows.append(session.eval([token]))
        return torch.stack(rows).log_softmax(-1)

    wanted = run(False)
    found = run(True)
    assert report()["step"] == {"eager": 3, "captured": 8}
    assert (found - wanted).abs().mean() <= 1e-5


def test_a_number_comes_to_the_host():
    there = HostNumbers(3)
    for numbers in ([0, 7, 8], [-1], [2**40 + 3, -5]):
        there.write(torch.tensor(numbers, device="cuda"))
        torch.cuda.synchronize()
        assert there.memory[: len(numbers)].tolist() == numbers
    assert there._seen is not None  # by a kernel


def test_weights_that_leave_are_let_go(oracle):
    """A captured step reads them where they lie, and holds on to them no longer."""
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session:
        for token in (1, 2, 3):
            session.eval([token])
        runner.run([session], [[4]], runner.ON_DEVICE)
        session.sample(dl.SamplingParams(temp=0), ahead=True)
        assert session.ahead  # as a stream leaves it that has ended
        places = [weakref.ref(each.untyped_storage()) for each in model.parameters()]
        model.cpu()
        gc.collect()
        assert not any(place() for place in places)


def test_logits_are_ones_own(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session:
        kept = [session.eval([token]) for token in range(12)]
        copies = [logits.clone() for logits in kept]
        for token in range(12):
            session.eval([token])
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
        kept[0].add_(1)  # may be changed


@pytest.mark.parametrize("name", TINY)
def test_the_16_bit_float_of_many_rows(name, q8_0):
    """Prompts in native mode, against the same weights multiplied in f32."""
    ids = text(11, 100)
    exact = whole(dl.load_model(q8_0(name), mode="fp32", device="cuda"), ids, "f32").log_softmax(-1)
    for dtype, most in CUDA_HALF.items():
        found = whole(dl.load_model(q8_0(name), device="cuda", dtype=dtype), ids, "f32").log_softmax(-1)
        distance = (found - exact).abs().mean()
        assert distance <= most * TINY[name], distance


PARAMS = dl.SamplingParams(temp=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={5: 1.0})


@pytest.mark.parametrize("params", [dl.SamplingParams(), PARAMS])
def test_tokens_are_drawn_where_the_logits_are(params, oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session, registry.strict():
        reset_report()
        ids = [token for token, _ in session.generate(text(5, 20), params, 24)]
        assert report()["sample_token"] == {"triton": len(ids)}
        # Each is the token that the CPU draws from these logits by the same number.
        generator = torch.Generator().manual_seed(0)
        logits = session.fork()
        logits.truncate(0)
        history = text(5, 20)
        for token in ids:
            at = logits.eval(history[logits.n_past :])
            assert sampling.sample(at, history, params, generator) == token
            history.append(token)


def test_what_the_host_has_to_see_it_draws_from(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session:
        session.eval(text(5, 20))
        reset_report()
        ids = [token for token, _ in session.generate((), dl.SamplingParams(logprobs=2), 5)]
        assert set(report()["sample_token"]) == {f"cpu/{registry.isas()[-1]}"}
        assert [each.token for each in session.stats.logprobs] == ids
        assert session.logits.device.type == "cpu"
    with dl.create_session(model) as session:
        both = session.generate_n(text(5, 20), PARAMS, 3, 12)
        assert len({tuple(each.tokens) for each in both}) > 1


def step_by_step(model, ids, n):
    with dl.create_session(model, kv_dtype="f32") as session:
        rows = [session.eval(ids)]
        for token in text(8, n):
            rows.append(session.eval([token]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4_e", "qwen3moe", "gpt-oss", "qwen35", "phi3"])
def test_a_model_on_two_devices(name, oracle):
    """Whatever part of it goes to the GPU, the results are those of the CPU."""
    path, ids = oracle / "tiny" / f"{name}.gguf", text(5, 30)
    wanted = step_by_step(dl.load_model(path, mode="fp32"), ids, 5)
    whole_model = dl.load_model(path, mode="fp32", device="auto", vram_mb=1000)
    assert {t.device.type for t in (*whole_model.parameters(), *whole_model.buffers())} == {"cuda"}
    sizes = placement.sizes_of(whole_model, 4096)
    dense = sizes.head + sum(sizes.layers)
    budgets = {0, sizes.head, (sizes.head + dense) // 2, dense, dense + sum(sizes.experts) // 2}
    for budget in sorted(budgets):
        model = dl.load_model(path, mode="fp32")
        found = placement.plan(sizes, budget)
        placed = None if found.empty else placement.Placed(model, found, torch.device("cuda", 0))
        assert placed is not None or budget < sizes.head
        reset_report()
        assert (step_by_step(model, ids, 5) - wanted).abs().max() <= 10 * CUDA_LOGITS * TINY[name] * wanted.std()
        if placed:
            assert "captured" not in report()["step"]
            with torch.no_grad():
                logits = model(torch.tensor([ids], device=model.device)).logits[0, -1]
            assert (logits.cpu() - wanted[0]).abs().max() <= 10 * CUDA_LOGITS * TINY[name] * wanted.std()


@pytest.mark.parametrize("name", ["llama", "qwen35", "gemma3"])
def test_a_model_leaves_the_card_and_comes_back(name, oracle):
    """With what its sessions hold, shared pages and checkpoints included."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32", device="auto")
    assert dl.gpu_tier_status().models[-1].placement.whole
    session = dl.create_session(model)
    session.eval(text(1, 70))
    session.checkpoint()
    fork, other = session.fork(), dl.create_session(model, kv_dtype="q8_0")
    other.eval(text(2, 9))
    wanted = [each.fork().eval([3, 4]) for each in (session, fork, other)]
    taken = torch.cuda.memory_allocated()
    dl.gpu_drop_model(model)
    assert torch.cuda.memory_allocated() < taken
    assert dl.gpu_tier_status().models[-1].device == "cpu"
    for each, logits in zip((session, fork, other), wanted, strict=True):
        found = each.fork().eval([3, 4])
        assert (found - logits).abs().max() <= 20 * CUDA_LOGITS * logits.std() + (each is other) * 0.1
    session.eval([3])
    session.truncate(70)
    dl.gpu_rearm_model(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    for each, logits in zip((session, fork, other), wanted, strict=True):
        assert torch.equal(each.fork().eval([3, 4]), logits)
        for token in (5, 6, 7):
            each.eval([token])
    assert graphs.why_not(model) == ""


def test_a_step_begun_ahead_does_not_show(oracle, monkeypatch):
    """Whatever is done between two tokens of a stream."""
    begin, begun = lookahead._begin, []

    def noted(*args):
        begun.append(begin(*args))
        return begun[-1]

    def run(ahead: bool):
        monkeypatch.setattr(lookahead, "_begin", noted if ahead else lambda *args: None)
        model = dl.load_model(oracle / "tiny" / "gemma3.gguf", device="cuda")
        session, other = dl.create_session(model, rewind=8), dl.create_session(model)
        other.eval(text(7, 9))
        seen, kept = [], []
        for i, (token, _) in enumerate(session.generate(text(5, 20), dl.SamplingParams(temp=2.0, seed=4), 60)):
            seen.append(token)
            if i == 10:
                fork = session.fork()
                kept.append(fork.eval([]))
            if i == 20:
                session.truncate(session.n_past - 3)
                session.eval([1, 2, 3])
            if i in (25, 26):
                kept.append(other.eval([i]))
            if i == 30:
                session.eval([7, 8])
            if i == 35:
                model.model.norm.weight.mul_(0.5)
            if i == 40:
                hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 0)
            if i == 45:
                hook.remove()
        kept.append(session.eval([1]))
        return seen, session.tokens, torch.stack(kept)

    found, wanted = run(True), run(False)
    assert found[:2] == wanted[:2]
    assert torch.equal(found[2], wanted[2])
    assert sum(each is not None for each in begun) > 30


def test_steps_that_are_begun_for_several_do_not_show(oracle, monkeypatch):
    """Streams of one call, which end one by one."""
    begin, begun = lookahead._begin, []
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")

    def noted(sessions, tokens):
        begun.append(len(sessions) if (found := begin(sessions, tokens)) else 0)
        return found

    def drawn(ahead: bool, **ends):
        monkeypatch.setattr(lookahead, "_begin", noted if ahead else lambda *args: None)
        with dl.create_session(model) as session:
            samples = session.generate_n(text(5, 20), dl.SamplingParams(temp=1.5, seed=4, **ends), 5, 100)
        rows = torch.stack([sample.session.eval([9]) for sample in samples])
        return [(each.tokens, each.stats.stop, each.session.tokens) for each in samples], rows

    (free, _) = drawn(False)
    ends = [free[1][0][7], free[3][0][50]]
    found, wanted = drawn(True, stop_ids=ends), drawn(False, stop_ids=ends)
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])
    assert len(set(begun) - {0}) > 1
    assert set(report()["sample_tokens"]) == {"triton"}


def test_what_is_begun_for_several_keeps_none_of_them(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    sessions = [dl.create_session(model) for _ in range(2)]
    for i in range(3):  # the first captures the step
        runner.run(sessions, [[i], [i + 5]], runner.ON_DEVICE)
    lookahead.draw(sessions, dl.SamplingParams(), ahead=True)
    first, other = sessions[0], weakref.ref(sessions[1])
    assert first.ahead
    del sessions
    gc.collect()
    assert other() is None


def test_a_stream_that_ends_has_evaluated_no_more_than_it_says(oracle):
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="cuda")
    with dl.create_session(model) as session:
        ids = [token for token, _ in session.generate(text(5, 20), dl.SamplingParams(temp=1.5), 20)]
    with dl.create_session(model) as session:
        again = session.generate(text(5, 20), dl.SamplingParams(temp=1.5, stop_ids=[ids[12]]), 20)
        assert [token for token, _ in again] == ids[: ids.index(ids[12])]
        assert session.tokens == [*text(5, 20), *ids[: ids.index(ids[12])]][: session.n_past]
        stopped = session.eval([3])
        held = session.tokens
    with dl.create_session(model) as session:
        session.eval(text(5, 20))
        for token in held[20:]:
            logits = session.eval([token])
        assert torch.equal(logits, stopped)
