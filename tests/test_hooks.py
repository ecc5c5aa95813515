"""Hooks on every kind of module, with packed kernels, recorded steps and caches: hooks that change nothing change
nothing, to the bit; what a hook puts in the place of a tensor is what the next module gets."""

import pytest
import torch
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.engine import graphs
from dasllama_torch.ops import report, reset_report

# Every kind of module that a family has, at least once.
CASES = ["qwen2vl", "phi3", "gpt-oss", "gemma4_e", "gemma4_moe", "qwen35moe", "qwen3next", "mistral3_yarn"]


@pytest.fixture(scope="module", params=CASES)
def model(request, q8_0):
    return dl.load_model(q8_0(request.param))


def text(n):
    return torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(5)).tolist()


def run(model):
    """Logits of a prompt, of single tokens behind it, of a batch, and of a forward without a cache."""
    ids = text(30)
    with dl.create_session(model) as a, dl.create_session(model) as b:
        out = [a.eval(ids[:20], "all"), *(a.eval([token]) for token in ids[20:24])]
        out += dl.eval_batch([a, b], [ids[24:25], ids[:7]])
        out += dl.eval_batch([a, b], [ids[25:26], ids[7:8]])
    with torch.no_grad():
        out.append(model(torch.tensor([ids])).logits)
    return out


def counted_run(model):
    """`run`, and how many steps were replayed from a recording."""
    reset_report()
    return run(model), report()["step"].get("recorded", 0)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def leaves(model):
    return {path: module for path, module in model.named_modules() if path}


def changed(output):
    """What no norm behind it can take away; ids of experts stay."""
    if isinstance(output, tuple):
        return tuple(changed(each) if each.is_floating_point() else each for each in output)
    return output.flip(-1) * 0.5


def test_hooks_that_change_nothing(model):
    """On all modules at once: the input as it came, the output handed back; each has been called in each step. Without
    hooks the small steps are replayed, with them they run module by module."""
    (wanted, replayed), calls = counted_run(model), dict.fromkeys(leaves(model), 0)
    assert replayed >= 3
    hooks = []
    for path, module in leaves(model).items():

        def before(module, args, kwargs):
            return args, kwargs

        def after(module, args, output, path=path):
            calls[path] += 1
            return output

        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    found, replayed = counted_run(model)
    for hook in hooks:
        hook.remove()
    assert same(found, wanted)
    assert replayed == 0
    containers = {path for path, module in leaves(model).items() if isinstance(module, torch.nn.ModuleList)}
    assert {path for path, n in calls.items() if not n} == containers
    found, replayed = counted_run(model)
    assert same(found, wanted)
    assert replayed >= 3


def test_each_kind_of_module_may_replace_its_output(model):
    """One module of each class at a time: its output turned round and halved changes the logits, and the hook's removal
    restores them."""
    wanted, seen = run(model), set()
    for path, module in reversed(leaves(model).items()):
        if type(module) in seen or isinstance(module, torch.nn.ModuleList):
            continue
        seen.add(type(module))
        hook = module.register_forward_hook(lambda module, args, output: changed(output))
        found = run(model)
        assert "hook" in graphs.why_not(model)
        hook.remove()
        assert not any(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), path
    assert len(seen) >= 8
    assert same(run(model), wanted)


def test_each_kind_of_module_may_get_another_input(model):
    """A pre-hook that reverses the first tensor's last dim, on one module of each class."""
    wanted, seen = run(model), set()
    for path, module in leaves(model).items():
        if type(module) in seen or isinstance(module, torch.nn.ModuleList):
            continue
        seen.add(type(module))

        def reverse(module, args):
            first = args[0]
            return (first.flip(-1) if first.is_floating_point() else (first + 1) % 250, *args[1:])

        hook = module.register_forward_pre_hook(reverse)
        found = run(model)
        hook.remove()
        # Where all but the last token's input is a single row, only its values change; never nothing.
        assert not torch.equal(found[0], wanted[0]), path
        assert not torch.equal(found[-1], wanted[-1]), path
    assert same(run(model), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35moe"])
def test_layers_taken_out_or_twice(name, oracle):
    """Sessions follow what the decoder is left with, by recorded steps too, unless a layer is there twice."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", mode="fp32")
    layers = model.get_decoder().layers
    del layers[1]
    layers.insert(0, layers.pop(-1))
    ids = text(24)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    with dl.create_session(model, "f32") as session:
        found = [session.eval(ids[:16], "all"), *(session.eval([token])[None] for token in ids[16:])]
    assert (torch.cat(found) - wanted).abs().max() <= FP32_LOGITS * wanted.std()
    layers.append(layers[0])
    with pytest.raises(dl.UnsupportedModel, match=f"layer {len(layers) - 1} of the decoder is also layer 0"):
        dl.create_session(model)


def test_hooks_see_each_step_of_generate(model):
    ids = torch.tensor([text(9)])
    rows = []
    hook = model.get_decoder().layers[0].register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    found = model.generate(ids, max_new_tokens=4)
    hook.remove()
    assert rows == [9, 1, 1, 1]
    assert torch.equal(found, model.generate(ids, max_new_tokens=4))
