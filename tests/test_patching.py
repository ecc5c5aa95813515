"""Values replaced inside forwards, generation and batches: what a hook written by hand does, and nothing afterwards."""

import hf_twin
import pytest
import torch
from families import GRAPHS
from test_invariants import text
from tolerances import FP32_LOGITS, GREEDY_MARGIN

import dasllama_torch as dl
from dasllama_torch.errors import DasllamaError, UnknownName
from dasllama_torch.ops import report, reset_report

IDS, OTHER = text(31, 20), text(32, 20)
KINDS = ("llama", "gemma3")


@pytest.fixture(scope="module", params=KINDS)
def twin(request, tmp_path_factory):
    return hf_twin.make(request.param, tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def model(twin):
    return dl.load_model(twin.path)


@pytest.fixture(scope="module")
def vector(model):
    return torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(5))


def hooks_of(model):
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._forward_hooks_with_kwargs
    ]


def in_session(model, ids, cuts=()):
    """Logits of all ids, evaluated in pieces."""
    with dl.create_session(model, kv_dtype="f32", n_ctx=256) as session:
        edges = [0, *cuts, len(ids)]
        return torch.cat([session.eval(ids[a:b], "all") for a, b in zip(edges, edges[1:], strict=False)])


@torch.no_grad()
def forward(model, ids):
    return model(torch.tensor([ids])).logits[0]


def assert_close(found, wanted):
    assert (found - wanted).abs().max() <= FP32_LOGITS * wanted.std()


@pytest.mark.parametrize("name", GRAPHS)
def test_what_changes_nothing_changes_nothing(name, q8_0):
    """To the bit, at every place, in prompts and single steps."""
    model = dl.load_model(q8_0(name))
    wanted = in_session(model, IDS, (11, 12, 13))
    places = [
        name for name in dl.inspect.names(model) if not name.endswith(("hook_scale", "hook_normalized", "pattern"))
    ]
    tuples = (".gate", ".router", ".mlp") if model.config.layers[-1].moe else ()
    indices = [name for name in places if name.endswith("hook_expert_indices")]
    calls = []
    patches = {name: lambda x: calls.append(0) or x for name in _one_each(model, places, tuples) if name not in indices}
    with dl.patch(model, patches):
        found = in_session(model, IDS, (11, 12, 13))
    assert len(calls) >= 4 * 10
    assert torch.equal(found, wanted)


def _one_each(model, names, tuples):
    """Of names of one value the first; without those that give a tuple."""
    from dasllama_torch.inspect.sites import Names

    sites = Names(model).sites
    first = {}
    for name in names:
        module = model.get_submodule(sites[name].path)
        whole_tuple = sites[name].argument is None and sites[name].item is None and name.endswith(tuples)
        if not (whole_tuple and _gives_a_tuple(module)):
            first.setdefault(sites[name], name)
    return first.values()


def _gives_a_tuple(module):
    return hasattr(module, "spec") or hasattr(module, "router")


def test_steering_is_the_hook_that_one_would_write(twin, model, vector):
    """In generation: each token and all logits, as a manual loop with a hook of torch."""

    def loop(session, n):
        logits = [session.eval(IDS[:6])]
        for _ in range(n):
            logits.append(session.eval([int(logits[-1].argmax())]))
        return torch.stack(logits)

    def add(module, args, output):
        return output + 2.0 * vector

    with dl.create_session(model) as session:
        hook = model.model.layers[1].register_forward_hook(add)
        wanted = loop(session, 12)
        hook.remove()
    with dl.create_session(model) as session, dl.steer(model, 1, vector, 2.0):
        assert torch.equal(loop(session, 12), wanted)
    with dl.create_session(model) as session, dl.steer(model, "model.layers.1", vector, 2.0):
        found = [token for token, _ in session.generate(IDS[:6], max_tokens=12)]
        assert torch.equal(session.logits, wanted[-2])
    assert found == wanted[:12].argmax(-1).tolist()
    with dl.steer(model, 1, vector, 2.0):
        of_hf = model.generate(torch.tensor([IDS[:6]]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert of_hf[0, 6:].tolist() == found
    with dl.create_session(model) as session:
        assert not torch.equal(loop(session, 12), wanted)
    assert hooks_of(model) == []


def test_a_hook_in_generate_is_a_hook_in_a_loop(model, vector):
    """torch's own hook, drawn tokens: `generate` of a session and that of the model, which see each step alike."""
    params = dl.SamplingParams(temp=1.3, top_k=40, seed=7)
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output - vector)
    with dl.create_session(model) as session:
        session.set_seed(7)
        session.eval(IDS[:6])
        wanted = []
        for _ in range(12):
            wanted.append(session.sample(params))
            session.eval(wanted[-1:])
    with dl.create_session(model) as session:
        found = [token for token, _ in session.generate(IDS[:6], params, max_tokens=12)]
    hook.remove()
    with dl.create_session(model) as session:
        plain = [token for token, _ in session.generate(IDS[:6], params, max_tokens=12)]
    assert found == wanted
    assert found != plain


@torch.no_grad()
def test_steering_is_what_it_is_in_transformers(twin, vector):
    model = dl.load_model(twin.path, mode="fp32")
    x = torch.tensor([IDS, OTHER])

    def steered(module, args, output):
        return output + vector

    hook = twin.hf.model.layers[0].register_forward_hook(steered)
    wanted = twin.hf(x).logits
    hook.remove()
    with dl.steer(model, 0, vector):
        assert_close(model(x).logits, wanted)
    assert_close(model(x).logits, twin.hf(x).logits)
    how = dict(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    hook = twin.hf.model.layers[0].register_forward_hook(steered)
    generated = twin.hf.generate(x, **how, return_dict_in_generate=True, output_logits=True)
    hook.remove()
    best = torch.stack(generated.logits, 1).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > GREEDY_MARGIN  # no near tie
    with dl.steer(model, 0, vector):
        assert torch.equal(model.generate(x, **how), generated.sequences)


PLACES = (
    "hook_resid_pre",
    "hook_resid_mid",
    "attn.hook_z",
    "attn.hook_q",
    "attn.hook_rot_k",
    "attn.hook_v",
    "mlp.hook_post",
)


@pytest.mark.parametrize("place", PLACES)
def test_positions_are_the_sequence_s_own(model, place):
    """A value of another run at some positions: the same result however the tokens are cut into forwards, with a cache
    and without."""
    name = f"blocks.1.{place}"
    _, other = dl.run_with_cache(model, OTHER, name)
    plain = forward(model, IDS)
    with dl.patch(model, {name: other[name]}, positions=[4, 11]):
        wanted = forward(model, IDS)
        whole = in_session(model, IDS)
        for cuts in ((4,), (5, 11), (3, 4, 5, 10, 11, 12), range(1, 20)):
            assert torch.equal(in_session(model, IDS, cuts), whole)
    assert_close(whole, wanted)
    assert torch.equal(wanted[:4], plain[:4])
    assert (wanted[4] - plain[4]).abs().max() > 1e-3 or place in ("attn.hook_rot_k", "attn.hook_v", "attn.hook_q")
    assert (wanted[11:] - plain[11:]).abs().max() > 1e-3


def test_a_patch_by_hand(model):
    """Recorded under the patch, the values are the other run's where they should be, and nowhere else."""
    name, after = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"
    _, clean = dl.run_with_cache(model, IDS, [name, after])
    _, other = dl.run_with_cache(model, OTHER, name)
    with dl.patch(model, {name: other[name][0]}, positions=slice(3, 9, 2)):
        _, found = dl.run_with_cache(model, IDS, after)
    wanted = clean[name].clone()
    wanted[:, 3:9:2] = other[name][:, 3:9:2]
    assert torch.equal(found[after], wanted)


def test_the_last_layer_s_stream_decides_the_logits(model):
    """Patched with that of a clean run at the last position, a corrupted prompt says what the clean one does."""
    name = f"blocks.{len(model.config.layers) - 1}.hook_resid_post"
    logits, clean = dl.run_with_cache(model, IDS, name)
    with dl.patch(model, {name: clean[name]}, positions=len(IDS) - 1):
        assert torch.equal(forward(model, OTHER)[-1], logits[0, -1])


def test_rows_that_a_tensor_has_not(model):
    """A tensor of all positions of a shorter run: the rest goes on as it is, unless it is named."""
    name = "model.layers.0"
    _, clean = dl.run_with_cache(model, IDS, name)
    _, other = dl.run_with_cache(model, OTHER[:8], name)
    with dl.patch(model, {name: other[name]}):
        _, found = dl.run_with_cache(model, IDS, name)
    assert torch.equal(found[name], torch.cat([other[name], clean[name][:, 8:]], 1))
    with dl.patch(model, {name: other[name]}, positions=8), pytest.raises(ValueError, match="position 8 .* 8 rows"):
        forward(model, IDS)


def test_a_batch_of_sequences(model):
    name = "model.layers.1"
    x = torch.tensor([IDS, OTHER])
    with torch.no_grad():
        _, both = dl.run_with_cache(model, x.flip(0), name)
        with dl.patch(model, {name: both[name]}, positions=len(IDS) - 1):
            found = model(x).logits
        for i, ids in enumerate((IDS, OTHER)):
            with dl.patch(model, {name: both[name][i]}, positions=len(IDS) - 1):
                assert_close(found[i], forward(model, ids))
    with dl.patch(model, {name: both[name]}), pytest.raises(ValueError, match="for 2 sequences"), torch.no_grad():
        model(torch.tensor([IDS, IDS, IDS]))
    with dl.patch(model, {name: both[name]}), pytest.raises(ValueError, match="sessions have no order"):
        in_session(model, IDS)


def test_only_what_is_generated(model, vector):
    """From a position on, prompt and all."""
    with dl.create_session(model) as session:
        plain = session.eval(IDS[:6])
    with dl.create_session(model) as session, dl.steer(model, 0, vector, 3.0, positions=slice(6, None)):
        assert torch.equal(session.eval(IDS[:6]), plain)
        steered = session.eval(IDS[6:9])
    with dl.create_session(model) as session:
        session.eval(IDS[:6])
        with dl.steer(model, 0, vector, 3.0):
            assert torch.equal(session.eval(IDS[6:9]), steered)


def test_one_session_of_a_batch(model, vector):
    def batch(**how):
        sessions = [dl.create_session(model) for _ in range(3)]
        with dl.steer(model, 1, vector, sessions=how["of"](sessions)):
            return [dl.eval_batch(sessions, [IDS, OTHER, IDS]), dl.eval_batch(sessions, [[1], [2], [1]])]

    def alone(ids, token, steered):
        with dl.create_session(model) as session:
            if steered:
                with dl.steer(model, 1, vector):
                    return session.eval(ids), session.eval([token])
            return session.eval(ids), session.eval([token])

    plain, first, second = alone(IDS, 1, False), alone(IDS, 1, True), alone(OTHER, 2, True)
    for found, wanted in zip(batch(of=lambda s: s[1]), zip(plain, second, plain, strict=True), strict=True):
        assert all(map(torch.equal, found, wanted))
    for found, wanted in zip(batch(of=lambda s: (s[0], s[1])), zip(first, second, plain, strict=True), strict=True):
        assert all(map(torch.equal, found, wanted))
    _, nobody = batch(of=lambda s: ())
    assert torch.equal(nobody[0], plain[1])


def test_contexts_nest(model, vector):
    name = "blocks.0.hook_resid_post"
    with dl.patch(model, {name: lambda x: 2 * x}), dl.patch(model, {name: lambda x: x + vector}):
        found = forward(model, IDS)
    with dl.patch(model, {name: lambda x: 2 * x + vector}):
        assert torch.equal(forward(model, IDS), found)
    with dl.patch(model, {name: lambda x: x + vector}), dl.patch(model, {name: lambda x: 2 * x}):
        assert not torch.equal(forward(model, IDS), found)


def test_nothing_is_left_behind(model, vector):
    """After the block and after an error within: no hook, and steps are recorded again."""
    wanted = in_session(model, IDS, range(1, 20))

    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), dl.patch(model, {"model.layers.*": broken}):
        in_session(model, IDS)
    with pytest.raises(ValueError, match="wanted \\[20, "), dl.steer(model, 0, torch.ones(3, 1, 1)):
        forward(model, IDS)
    with pytest.raises(ZeroDivisionError), dl.steer(model, 0, vector):
        raise ZeroDivisionError
    assert hooks_of(model) == []
    reset_report()
    assert torch.equal(in_session(model, IDS, range(1, 20)), wanted)
    assert report()["step"].get("recorded", 0) >= 17


def test_a_prefix_cache_keeps_nothing_of_it(model, vector):
    cache = dl.create_prefix_cache(model, dl.create_kv_pool(model, page_rows=4))
    with cache, dl.create_session(model, n_ctx=128) as fresh:
        wanted = fresh.eval(IDS)
        with dl.steer(model, 0, vector, 5.0):
            dl.create_session(model, n_ctx=128, prefix_cache=cache).eval(IDS)
        assert cache.held_groups() == 0
        session = dl.create_session(model, n_ctx=128, prefix_cache=cache)
        assert torch.equal(session.eval(IDS), wanted)


def test_a_number_stands_for_all_of_a_value(load):
    model = load("llama")
    with dl.patch(model, {"blocks.0.hook_mlp_out": 0}):
        found = forward(model, IDS)
    with dl.patch(model, {"blocks.0.hook_mlp_out": torch.zeros_like}):
        assert torch.equal(forward(model, IDS), found)


def test_what_is_refused(load):
    model = load("gpt-oss")
    with pytest.raises(UnknownName, match="'blocks.0.attn.hook_pattern' is computed for who looks"):
        dl.patch(model, {"blocks.0.attn.hook_pattern": lambda x: x}).__enter__()
    with pytest.raises(UnknownName, match="close: "):
        dl.steer(model, 77, torch.zeros(1)).__enter__()
    with pytest.raises(ValueError, match="-1.*0 or more"):
        dl.steer(model, 0, torch.zeros(1), positions=-1).__enter__()
    with pytest.raises(ValueError, match="patched twice"):
        dl.patch(model, {"model.layers.0": lambda x: x, "blocks.0.hook_resid_post": lambda x: x}).__enter__()
    with dl.patch(model, {"model.layers.0.mlp": lambda x: x}), pytest.raises(UnknownName, match="gives 2 tensors"):
        forward(model, IDS)
    with (
        dl.patch(model, {"model.layers.0.mlp.experts.down_proj": lambda x: x[..., :3]}),
        pytest.raises(ValueError, match="in its place, found"),
    ):
        forward(model, IDS)
    with dl.patch(model, {"hook_embed": lambda x: None}), pytest.raises(ValueError, match="found NoneType"):
        forward(model, IDS)
    assert hooks_of(model) == []
    assert issubclass(UnknownName, DasllamaError)


def test_experts_by_hand(load):
    """All weight on the first expert chosen: what the others give does not count."""
    model = load("qwen3moe")

    def first_only(weights):
        return torch.cat([torch.ones_like(weights[:, :1]), torch.zeros_like(weights[:, 1:])], 1)

    with dl.patch(model, {"blocks.0.mlp.hook_expert_weights": first_only}):
        _, found = dl.run_with_cache(model, IDS, ["blocks.0.hook_mlp_out", "model.layers.0.mlp.experts.down_proj"])
    wanted = found["model.layers.0.mlp.experts.down_proj"][:, 0]
    assert torch.allclose(found["blocks.0.hook_mlp_out"][0], wanted, rtol=1e-5, atol=1e-6)


def test_a_module_on_its_own_is_left_alone(model, vector):
    x = torch.randn(1, 3, model.config.n_embd)
    with dl.patch(model, {"model.norm": lambda rows: rows * 0}):
        assert model.model.norm(x).abs().max() > 0
