"""What is recorded of a forward, by path and by alias: transformers' own values, formulas, and nothing that was not
asked for."""

import gc

import hf_twin
import pytest
import resident
import torch
from conftest import ROOT
from families import GRAPHS
from test_invariants import text
from tolerances import ATTENTION, FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.errors import UnknownName

IDS = text(21, 23)
TEXT = (ROOT / "benchmarks" / "passage.txt").read_text("utf-8")


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2"])
def twin(request, tmp_path_factory):
    return hf_twin.make(request.param, tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def model(twin):
    return dl.load_model(twin.path, mode="fp32")


def close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    return (found - wanted).abs().max() <= tolerance * wanted.std()


@torch.no_grad()
def test_values_are_those_of_transformers(twin, model):
    """Aliases of a layer against hooks in transformers' model, of which each is a module's input or output there."""
    x = torch.tensor([IDS, text(22, 23)])
    layer = twin.hf.model.layers[1]
    sandwiched = hasattr(layer, "pre_feedforward_layernorm")
    ln2 = layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm
    attention_out = layer.post_attention_layernorm if sandwiched else layer.self_attn
    mlp_out = layer.post_feedforward_layernorm if sandwiched else layer.mlp
    heads = layer.self_attn.head_dim
    seen = {}

    def output(name, module):
        yield module.register_forward_hook(
            lambda m, args, out: seen.update({name: out[0] if isinstance(out, tuple) else out})
        )

    def given(name, module):
        yield module.register_forward_hook(
            lambda m, args, kwargs, out: seen.update({name: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )

    hooks = [
        *given("hook_resid_pre", layer), *given("hook_resid_mid", ln2), *output("hook_resid_post", layer),
        *output("hook_attn_out", attention_out), *output("hook_mlp_out", mlp_out),
        *output("mlp.hook_pre", layer.mlp.gate_proj), *output("mlp.hook_pre_linear", layer.mlp.up_proj),
        *given("mlp.hook_post", layer.mlp.down_proj), *given("attn.hook_z", layer.self_attn.o_proj),
        *output("attn.hook_q", layer.self_attn.q_proj), *output("attn.hook_k", layer.self_attn.k_proj),
        *output("attn.hook_v", layer.self_attn.v_proj),
    ]  # fmt: skip
    wanted_logits = twin.hf(x).logits
    for hook in hooks:
        hook.remove()
    logits, cache = dl.run_with_cache(model, x, "blocks.1.**")
    assert close(logits, wanted_logits)
    assert len(seen) == 12
    for name, wanted in seen.items():
        found = cache[f"blocks.1.{name}"]
        assert close(found, wanted.unflatten(-1, (-1, heads)) if ".hook_" in name and found.dim() == 4 else wanted), (
            name
        )


@pytest.mark.parametrize("name", GRAPHS)
def test_every_name_of_every_family(name, load):
    """Each has a value, in a forward without a cache and in a session, and the aliases add up."""
    model = load(name)
    logits, cache = dl.run_with_cache(model, IDS, ["**", "**:in"])
    assert torch.equal(logits, model(torch.tensor([IDS])).logits)
    assert len(cache) > 40
    with dl.create_session(model, kv_dtype="f32") as session, dl.inspect.record(model, "blocks.**") as of_session:
        session.eval(IDS[:9])
        session.eval(IDS[9:])
    for name in cache:
        assert cache[name] is not None
    layers = range(len(model.config.layers))
    for i in layers:
        at = f"blocks.{i}."
        pre, mid, post = (cache[f"{at}hook_resid_{where}"] for where in ("pre", "mid", "post"))
        assert torch.equal(mid, pre + cache[f"{at}hook_attn_out"])
        if model.config.arch != "gemma4":  # there a scalar, and what each layer looks up for itself, come in between
            assert torch.equal(post, mid + cache[f"{at}hook_mlp_out"])
        assert torch.equal(pre, cache[f"blocks.{i - 1}.hook_resid_post"] if i else cache["hook_embed"])
        assert torch.allclose(cache[f"{at}ln1.hook_normalized"] * cache[f"{at}ln1.hook_scale"], pre, rtol=1e-6)
        if f"{at}attn.hook_v" in cache:
            assert_attends(cache, at)
            assert_attends(of_session, at)


def assert_attends(cache, at):
    """Values, weighed by the pattern, are what attention gives."""
    pattern, z, v = (cache[f"{at}attn.hook_{name}"].double() for name in ("pattern", "z", "v"))
    v = v.repeat_interleave(z.shape[2] // v.shape[2], 2)
    assert (torch.einsum("bhts,bshd->bthd", pattern, v) - z).abs().max() <= ATTENTION * v.abs().max()
    assert (pattern.sum(-1) <= 1 + 1e-6).all()


def test_paths_and_aliases_name_one_value(model):
    _, cache = dl.run_with_cache(model, IDS, ["model.layers.*", "blocks.0.hook_resid_post"])
    layers = len(model.config.layers)
    assert list(cache) == [f"model.layers.{i}" for i in range(layers)] + ["blocks.0.hook_resid_post"]
    assert torch.equal(cache["model.layers.0"], cache["blocks.0.hook_resid_post"])
    assert torch.equal(cache["blocks.2.hook_resid_post"], cache["model.layers.2"])  # by a name that was not asked for
    assert cache["model.layers.1"].shape == (1, len(IDS), model.config.n_embd)
    assert "model.layers.0.mlp" not in cache
    with pytest.raises(UnknownName, match=r"'model.layers.0.mlp' was not recorded; recorded: model.layers.0, "):
        cache["model.layers.0.mlp"]


def test_a_module_that_is_called_twice(model):
    """`rope` turns queries, then keys."""
    _, cache = dl.run_with_cache(model, IDS, ["model.layers.0.self_attn.rope", "blocks.0.attn.*"])
    q, k = cache["model.layers.0.self_attn.rope"]
    assert torch.equal(q, cache["blocks.0.attn.hook_rot_q"])
    assert torch.equal(k, cache["blocks.0.attn.hook_rot_k"])


def test_an_unknown_name(model):
    with pytest.raises(UnknownName, match=r"'model.layers.0.self_atn' names nothing in this model; close: .*self_attn"):
        dl.run_with_cache(model, IDS, "model.layers.0.self_atn")
    with pytest.raises(UnknownName, match=r"close: .*blocks.0.hook_resid_pre"):
        dl.run_with_cache(model, IDS, ["lm_head", "blocks.0.resid_pre"])
    with pytest.raises(UnknownName, match="'model.layers.*.experts' names nothing"):
        dl.run_with_cache(model, IDS, "model.layers.*.experts")
    with dl.create_session(model) as session:
        session.eval(IDS[:4])
        session.pending = [5]
        with pytest.raises(UnknownName):
            dl.run_with_cache(session, IDS, "nothing")
        assert (session.n_past, session.pending) == (4, [5])


def test_names(model):
    assert "blocks.1.hook_resid_mid" in dl.inspect.names(model)
    assert dl.inspect.names(model, "model.layers.*.mlp") == [
        f"model.layers.{i}.mlp" for i in range(len(model.config.layers))
    ]


def tensors():
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def test_nothing_else_is_kept(load):
    """Of all that a forward computes only the named tensors and the logits live on, without what they were cut from."""
    model = load("phi3")  # its values are cut from one matrix with queries and keys
    gc.collect()
    before = {id(each) for each in tensors()}
    logits, cache = dl.run_with_cache(model, text(23, 200), ["blocks.1.attn.hook_v", "blocks.1.hook_resid_post"])
    gc.collect()
    new = [each for each in tensors() if id(each) not in before]
    values = [cache[name] for name in cache]
    assert sum(each.untyped_storage().nbytes() for each in new if each.numel() > 1000) == sum(
        each.numel() * each.element_size() for each in (logits, *values)
    )


@resident.linux
def test_memory(demo_model):
    """What is not named is gone when its module is done: the peak is that of a plain forward, and what was named."""
    model = dl.load_model(demo_model)
    ids = torch.tensor([model.encode(TEXT)[:301]])
    assert ids.shape == (1, 301)
    caches = {}

    def run(names):
        caches[names] = dl.run_with_cache(model, ids, names)[1] if names else model(ids).logits

    with torch.no_grad():
        run("")  # what the first call of anything takes
        plain, few, all_layers = (
            resident.peak(lambda n=n: run(n)) for n in ("", "model.layers.15.mlp", "model.layers.**")
        )
    assert nbytes(caches["model.layers.**"]) > 300e6
    assert all_layers - plain > 0.8 * nbytes(caches["model.layers.**"])  # it would show
    assert few - plain < nbytes(caches["model.layers.15.mlp"]) + 32e6


def nbytes(cache):
    values = (value if isinstance(value, tuple) else (value,) for value in (cache[name] for name in cache))
    return sum(tensor.nbytes for value in values for tensor in value if tensor is not None)


def test_a_session_in_windows(model):
    """A prompt of several forwards, over keys that a session holds: rows follow each other, and keys grow."""
    ids = text(24, 700)
    with dl.create_session(model, kv_dtype="f32", n_ctx=800) as session:
        session.eval(ids[:40])
        logits, cache = dl.run_with_cache(session, ids[40:], ["blocks.1.hook_resid_post", "blocks.1.attn.hook_pattern"])
    wanted_logits, wanted = dl.run_with_cache(model, ids, list(cache))
    assert logits.shape == (1, 660, model.config.n_vocab)
    assert close(logits, wanted_logits[:, 40:])
    assert close(cache["blocks.1.hook_resid_post"], wanted["blocks.1.hook_resid_post"][:, 40:])
    found = cache["blocks.1.attn.hook_pattern"]
    assert found.shape == (1, model.config.layers[1].n_heads, 660, 700)
    assert (found - wanted["blocks.1.attn.hook_pattern"][:, :, 40:]).abs().max() < ATTENTION


def test_a_pending_token_has_no_rows(model):
    with dl.create_session(model) as session:
        for _ in session.generate(IDS[:4], max_tokens=1):
            pass
        assert session.pending
        logits, cache = dl.run_with_cache(session, IDS[4:7], "model.norm")
        assert logits.shape[1] == cache["model.norm"].shape[1] == 3
        assert session.n_past == 8


def test_record_in_generation_and_batches(model):
    """Row by row as tokens come, and of one session of a batch."""
    with dl.inspect.record(model, "blocks.0.hook_resid_post") as cache, dl.create_session(model, "f32") as session:
        ids = IDS[:5] + [token for token, _ in session.generate(IDS[:5], max_tokens=6)]
    found = cache["blocks.0.hook_resid_post"]
    assert found.shape[1] == 5 + 5  # the last token was yielded, and not evaluated
    _, wanted = dl.run_with_cache(model, ids[:10], "blocks.0.hook_resid_post")
    assert close(found, wanted["blocks.0.hook_resid_post"])
    sessions = [dl.create_session(model) for _ in range(3)]
    with dl.inspect.record(model, "model.layers.1", sessions=sessions[1]) as cache:
        dl.eval_batch(sessions, [IDS[:3], IDS[3:9], IDS[:7]])
        dl.eval_batch(sessions[::2], [IDS[:3], IDS[3:9]])
        dl.eval_batch(sessions, [[1], [2], [3]])
    with dl.create_session(model) as alone:
        _, wanted = dl.run_with_cache(alone, IDS[3:9] + [2], "model.layers.1")
    assert close(cache["model.layers.1"], wanted["model.layers.1"])


def test_text(demo_model):
    model = dl.load_model(demo_model)
    logits, cache = dl.run_with_cache(model, "The capital of France is", "model.layers.29")
    assert model.piece(int(logits[0, -1].argmax())) == " Paris"
    assert cache["model.layers.29"].shape[1] == logits.shape[1] == 5


def test_no_tokens(model):
    for nothing in ([], "", torch.zeros(1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            dl.run_with_cache(model, nothing if nothing != "" else [], "lm_head")
