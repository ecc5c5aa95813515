"""Which parts of a model go to a GPU, and pools and sessions that move from one device to another. No GPU is needed:
the second device is the CPU under another name, where no weights have to be copied."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch import device_memory
from dasllama_torch.engine import gpu_tier, graphs
from dasllama_torch.engine.placement import Placed, Placement, Sizes, layer_devices, plan, sizes_of
from dasllama_torch.ops import report, reset_report
from dasllama_torch.ops.halves import half_of, multiplied_in

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)
SIZES = Sizes(head=10, layers=(20, 20, 30), experts=(0, 100, 100), rest=50)


@pytest.mark.parametrize(
    ("budget", "layers", "experts", "head", "rest", "nbytes"),
    [
        (9, "---", "---", False, False, 0),
        (10, "---", "---", True, False, 10),
        (59, "--1", "---", True, False, 40),
        (79, "-11", "---", True, False, 60),
        (80, "111", "1--", True, False, 80),
        (180, "111", "1-1", True, False, 180),
        (329, "111", "111", True, False, 280),
        (330, "111", "111", True, True, 330),
    ],
)
def test_layers_from_the_last_one_back_then_experts_then_the_rest(budget, layers, experts, head, rest, nbytes):
    wanted = (tuple(flag == "1" for flag in flags) for flags in (layers, experts))
    assert plan(SIZES, budget) == Placement(*wanted, head, rest, nbytes)


def test_what_a_placement_says():
    assert str(plan(SIZES, 9)) == "all on the CPU"
    assert str(plan(SIZES, 79)) == "head and 2 of 3 layers on the GPU, the experts of 2 of them on the CPU"
    assert str(plan(SIZES, 329)) == "head and 3 of 3 layers on the GPU"
    assert str(plan(SIZES, 330)) == "all on the GPU"


def test_layers_that_share_keys_go_together():
    sizes = Sizes(10, (20, 20, 30, 5), (0, 0, 0, 0), 50, together=((1, 2, 3),))
    assert plan(sizes, 64).layers == (False,) * 4
    assert plan(sizes, 65).layers == (False, True, True, True)


parts = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6)


@given(parts, st.integers(0, 50), st.integers(0, 50), st.integers(0, 800), st.integers(0, 50))
def test_no_plan_takes_more_than_its_budget_and_more_of_it_takes_no_less(layers, head, rest, budget, more):
    sizes = Sizes(head, *map(tuple, zip(*layers, strict=True)), rest)
    small, large = plan(sizes, budget), plan(sizes, budget + more)
    for found in (small, large):
        on = [n for n, there in zip(sizes.layers, found.layers, strict=True) if there]
        on += [n for n, there in zip(sizes.experts, found.experts, strict=True) if there]
        assert found.nbytes == sum(on) + head * found.head + rest * found.rest
    assert small.nbytes <= budget
    assert small.nbytes <= large.nbytes
    assert all(a <= b for a, b in zip(small.layers + small.experts, large.layers + large.experts, strict=True))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3moe", "qwen35", "gemma4_e"])
def test_sizes_are_those_of_all_tensors(name, load):
    model = load(name)
    tensors = {device_memory.place_of(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    empty, some = sizes_of(model, 0), sizes_of(model, 128)
    assert empty.head + sum(empty.layers) + sum(empty.experts) + empty.rest == sum(tensors.values()) + _states(model)
    with dl.create_session(model, n_ctx=128) as session:
        session.eval(text(1, 128), logits=None)
        kept = sum(some.layers) - sum(empty.layers) + _states(model)
        assert kept <= session.pool.used_bytes
        if name == "llama":
            assert kept == session.pool.used_bytes
    assert bool(sum(some.experts)) == (name == "qwen3moe")
    tied = model.lm_head.gguf_name == model.get_input_embeddings().gguf_name
    assert some.rest >= (0 if tied else model.get_input_embeddings().qweight.nbytes)


def _states(model):
    specs = [layer.cache for layer in model.config.layers if layer.delta]
    return sum(4 * spec.numel for spec in specs)


@pytest.fixture
def gpu(monkeypatch):
    """A card of 100 MB that is the CPU: nothing is copied, the rest is as it would be."""
    monkeypatch.setattr(device_memory, "upload", lambda modules, device: list(modules))
    monkeypatch.setattr(device_memory, "free_memory", lambda device: 100 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(gpu_tier, "wanted_device", lambda: OTHER)
    monkeypatch.setattr(gpu_tier, "HEADROOM", 0)
    monkeypatch.delenv(gpu_tier.VRAM_MB, raising=False)
    yield OTHER
    dl.set_gpu_tier_want(dl.GpuTierWant())


@pytest.mark.parametrize("name", ["llama", "gemma4_e", "qwen3moe", "qwen35"])
def test_a_model_in_two_parts_does_what_it_did(name, oracle, gpu):
    model, ids = dl.load_model(oracle / "tiny" / f"{name}.gguf"), text(3, 40)
    with dl.create_session(model) as session:
        wanted = [session.eval(ids), *(session.eval([token]) for token in (1, 2, 3))]
        wanted = [logits.clone() for logits in wanted]
    sizes = sizes_of(model, 4096)
    most = sum(sizes.layers) + max(sizes.experts) if any(sizes.experts) else sum(sizes.layers[1:])
    found = plan(sizes, sizes.head + most)
    assert not found.whole
    assert not found.empty
    placed = Placed(model, found, gpu)
    model.placement = found
    with dl.create_session(model) as session:
        reset_report()
        for logits, tokens in zip(wanted, (ids, [1], [2], [3]), strict=True):
            assert torch.equal(session.eval(tokens), logits)
        assert report()["step"] == {"eager": 4}
        assert graphs.why_not(model) == f"the model lies on two devices: {found}"
    placed.undo()
    model.placement = None
    with dl.create_session(model) as session:
        reset_report()
        for tokens in (ids, [1], [2]):
            session.eval(tokens)
        assert "recorded" in report()["step"]


def a_step_and_more(session):
    """Logits behind a single token, whose step may be recorded, and two more."""
    with session.fork() as fork:
        fork.eval([5])
        fork.eval([6])
        return fork.eval([3, 4]).clone()


@pytest.mark.parametrize("kv_dtype", ["f16", ("q8_0", "tq4")])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
def test_a_pool_moves_and_its_sessions_notice_nothing(name, kv_dtype, load):
    model = load(name)
    pool = dl.create_kv_pool(model, page_rows=16, kv_dtype=kv_dtype)
    cache = dl.create_prefix_cache(model, pool)
    session = dl.create_session(model, pool=pool, prefix_cache=cache)
    session.eval(text(1, 70))
    session.checkpoint()
    fork, gone = session.fork(), dl.create_session(model, pool=pool)
    gone.eval(text(2, 90))
    gone.close()
    fork.eval(text(4, 5))
    wanted = [a_step_and_more(each) for each in (session, fork)]
    used, held = pool.used_bytes, cache.held_groups()
    layers = len(model.config.layers)
    for where in (OTHER, [CPU, *[OTHER] * (layers - 1)], "cpu"):
        before = pool[0]
        pool.move(where)
        assert pool[0] is not before
        assert (pool.used_bytes, cache.held_groups()) == (used, held)
        for each, logits in zip((session, fork), wanted, strict=True):
            assert torch.equal(a_step_and_more(each), logits)
        with dl.create_session(model, pool=pool, prefix_cache=cache) as other:
            other.eval(text(1, 70))
        session.truncate(70)


def test_a_pool_on_two_devices_is_a_pool(load):
    model = load("gemma3")
    layers = len(model.config.layers)
    specs = [layer.cache for layer in model.config.layers]
    split = dl.KVPool(specs, "f16", 1 << 24, [CPU] * (layers // 2) + [OTHER] * (layers - layers // 2), 16)
    one = dl.create_kv_pool(model, page_rows=16)
    assert split.device == CPU
    assert any(len(memory) == 2 for memory in split._memory)
    for pool in (split, one):
        session = dl.create_session(model, pool=pool)
        session.eval(text(1, 40))
        fork = session.fork()  # whoever writes first copies a page
        results = [session.eval([5]).clone(), fork.eval([6]).clone()]
        if pool is split:
            wanted = results
    assert all(map(torch.equal, results, wanted))


def test_a_pool_that_cannot_move_stays(load, monkeypatch):
    model = load("llama")
    pool = dl.create_kv_pool(model)
    with dl.create_session(model, pool=pool) as session:
        session.eval(text(1, 20))
        wanted = session.fork().eval([1])

        def refuse(*args):
            raise dl.OutOfPages("no room")

        monkeypatch.setattr("dasllama_torch.cache.pool.reserve", refuse)
        with pytest.raises(dl.OutOfPages, match="no room"):
            pool.move(OTHER)
        assert torch.equal(session.fork().eval([1]), wanted)


def test_models_share_a_card(oracle, gpu):
    path = oracle / "tiny" / "llama.gguf"
    before = dl.gpu_tier_status()
    assert (before.device, before.vram_bytes - before.used_bytes, before.budget) == ("a card", 100 << 20, "free memory")
    first = dl.load_model(path, device="auto")
    nbytes = gpu_tier._tiers[first].placement.nbytes
    assert gpu_tier._tiers[first].placement.whole
    assert dl.gpu_tier_status().used_bytes == before.used_bytes + nbytes
    mb = (before.used_bytes + nbytes >> 20) + 1
    dl.set_gpu_tier_want(dl.GpuTierWant(vram_mb=mb))
    assert dl.gpu_weight_budget() == (mb << 20) - before.used_bytes - nbytes
    second = dl.load_model(path, device="auto", vram_mb=0)  # its own word counts more
    session = dl.create_session(second)
    session.eval(text(1, 20))
    wanted = session.fork().eval([7])
    assert gpu_tier._tiers[second].placement.empty
    assert str(dl.gpu_tier_status()).endswith(f"{path}: all on the CPU, 0 MiB of cpu")
    dl.gpu_drop_model(first)
    assert dl.gpu_tier_status().used_bytes == before.used_bytes
    assert dl.gpu_rearm_model(second).whole
    assert torch.equal(session.fork().eval([7]), wanted)
    del first, second, session
    gc.collect()
    assert len(dl.gpu_tier_status().models) == len(before.models)


def test_a_model_that_did_not_fit_after_all_is_on_the_host(oracle, gpu, monkeypatch):
    model = dl.load_model(oracle / "tiny" / "llama.gguf")
    sizes, calls = sizes_of(model, model.config.n_ctx), []
    session = dl.create_session(model)
    wanted = session.eval(text(1, 20)).clone()

    def upload(modules, device):
        calls.append(device)
        if len(calls) == 2:
            raise dl.OutOfMemory("others were faster")

    monkeypatch.setattr(device_memory, "upload", upload)
    monkeypatch.setattr(device_memory, "free_memory", lambda device: sizes.head + sizes.layers[-1])
    with pytest.raises(dl.OutOfMemory):
        dl.gpu_rearm_model(model)
    assert gpu_tier._tiers[model].placement.empty
    session.truncate(0)
    assert torch.equal(session.eval(text(1, 20)), wanted)
    session.eval([1])
    assert graphs.why_not(model) == ""


def test_a_part_of_a_model_comes_back(oracle, gpu, monkeypatch):
    path = oracle / "tiny" / "qwen3moe.gguf"
    sizes = sizes_of(model := dl.load_model(path), model.config.n_ctx)
    monkeypatch.setattr(device_memory, "free_memory", lambda device: sizes.head + sum(sizes.layers[1:]))
    model = dl.load_model(path, device="auto")
    assert str(model.placement).startswith(f"head and {len(sizes.layers) - 1} of {len(sizes.layers)} layers on the GPU")
    with dl.create_session(model) as session:
        assert session.pool.devices == [CPU] * len(sizes.layers)  # where the weights are, which nobody has moved here
        wanted = [session.eval([token]).clone() for token in (1, 2, 3)]
        dl.gpu_drop_model(model)
        assert model.placement is None
        session.truncate(0)
        reset_report()
        assert all(torch.equal(session.eval([token]), logits) for token, logits in zip((1, 2, 3), wanted, strict=True))
        assert report()["step"]["recorded"] > 0


def test_the_environment_has_the_last_word(oracle, gpu, monkeypatch):
    monkeypatch.setenv(gpu_tier.VRAM_MB, "0")
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="auto", vram_mb=50)
    assert gpu_tier._tiers[model].placement.empty
    assert dl.gpu_tier_status().budget == "environment"
    monkeypatch.setenv(gpu_tier.VRAM_MB, "much")
    with pytest.raises(ValueError, match="DASLLAMA_GPU_VRAM_MB is 'much', wanted a number of MiB"):
        dl.gpu_weight_budget()


def test_without_a_gpu_auto_is_the_cpu(oracle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = dl.load_model(oracle / "tiny" / "llama.gguf", device="auto")
    assert set(layer_devices(model)) == {CPU}
    status = dl.gpu_tier_status()
    assert (status.device, status.vram_bytes, dl.gpu_weight_budget()) == ("", 0, 0)
    assert dl.gpu_rearm_model(model).empty


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (dict(vram_mb=5), "wanted 0 or more and device='auto'"), (dict(device="auto", vram_mb=-1), "vram_mb is -1"),
        (dict(dtype="int8"), "dtype is int8, wanted one of bf16, f16"), (dict(dtype=torch.float32), "dtype is torch"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(how, named, oracle):
    with pytest.raises(ValueError, match=named):
        dl.load_model(oracle / "tiny" / "llama.gguf", **how)
    with pytest.raises(ValueError, match="vram_mb is -1, wanted 0 or more"):
        dl.set_gpu_tier_want(dl.GpuTierWant(vram_mb=-1))
    with pytest.raises(ValueError, match="device is 'cpu', wanted 'cuda'"):
        dl.set_gpu_tier_want(dl.GpuTierWant(device="cpu"))


@pytest.mark.parametrize(("dtype", "wanted"), [("f16", torch.float16), (torch.bfloat16, torch.bfloat16)])
def test_the_16_bit_float_is_the_models(dtype, wanted, oracle):
    """Whoever multiplies hears of it, and nobody after the model."""
    model = dl.load_model(oracle / "tiny" / "qwen3moe.gguf", dtype=dtype)
    heard = set()

    class Listener(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("dasllama::quant_linear", "dasllama::expert_linear"):
                heard.add((func._schema.name, half_of(args[0])))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Listener():
        model(torch.tensor([text(1, 5)]))
    # Routers multiply in f32, whatever is chosen.
    assert {half for name, half in heard if name.endswith("expert_linear")} == {wanted}
    assert wanted in {half for name, half in heard}
    assert half_of(torch.zeros(1)) == torch.bfloat16
    assert half_of(torch.zeros(1).half()) == torch.float16


def test_only_bf16_products_are_traced(monkeypatch):
    """What is traced runs outside of the context that says otherwise."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with multiplied_in(torch.bfloat16):
        pass
    with pytest.raises(RuntimeError, match="products in torch.bfloat16 only, found torch.float16"):
        multiplied_in(torch.float16).__enter__()
