"""Gradients at the embeddings: autograd of transformers' twin, and no dequantized copy of the model."""

import hf_twin
import pytest
import resident
import torch
from hf_pairs import live_pair
from test_invariants import text
from tolerances import FINITE_DIFFERENCE, GRADIENT, NATIVE_GRADIENT

import dasllama_torch as dl

IDS = text(71, 17)
REFUSED = ("decay", "dt_bias", "conv1d.weight")  # parameters whose ops have a gradient of their rows only


def assert_close(found, wanted, factor=1):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= factor * GRADIENT * wanted.std()


def hf_gradients(hf, ids, score):
    embeds = []
    hook = hf.get_input_embeddings().register_forward_hook(
        lambda m, args, out: embeds.append(out.detach().requires_grad_()) or embeds[0]
    )
    value = score(hf(input_ids=torch.tensor([ids])).logits)
    hook.remove()
    return embeds[0].detach(), torch.autograd.grad(value, embeds[0])[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2_tied"])
def test_autograd_of_transformers(kind, tmp_path):
    twin = hf_twin.make(kind, tmp_path)
    model = dl.load_model(twin.path, mode="fp32")
    embeds, wanted = hf_gradients(twin.hf, IDS, lambda logits: logits[:, -1, 5].sum())
    assert_close(dl.embedding_gradients(model, IDS, 5), wanted)
    assert torch.allclose(dl.saliency(model, IDS, 5), wanted.norm(dim=-1), rtol=1e-3)
    products = (wanted * embeds).sum(-1)
    assert (dl.saliency(model, IDS, 5, how="input") - products).abs().max() <= 10 * GRADIENT * products.std()

    def entropy(logits):
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum()

    assert_close(dl.embedding_gradients(model, IDS, entropy), hf_gradients(twin.hf, IDS, entropy)[1])


@pytest.mark.parametrize("name", ["qwen35moe", "gpt-oss", "gemma4_e"])
def test_of_other_families(name, oracle):
    """Delta nets, experts, tables of each layer's own."""
    model, hf = live_pair(oracle, name)
    assert_close(dl.embedding_gradients(model, IDS, 5), hf_gradients(hf, IDS, lambda logits: logits[0, -1, 5])[1], 3)


def second_derivative(model, embeds, direction):
    """Of a token's log-probability with respect to the embeddings, along a direction."""
    x = embeds.clone().requires_grad_()
    score = model(inputs_embeds=x).logits[0, -1].log_softmax(-1)[5]
    (first,) = torch.autograd.grad(score, x, create_graph=True)
    return torch.autograd.grad((first * direction).sum(), x)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4_moe", "qwen35moe", "gpt-oss"])
def test_second_derivatives(name, oracle):
    """Once zeros: kernels of gradients have none of their own, and torch takes that for a constant."""
    model, hf = live_pair(oracle, name)
    embeds = model.get_input_embeddings()(torch.tensor([IDS])).detach()
    direction = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (second_derivative(each, embeds, direction) for each in (model, hf))
    assert_close(found, wanted, 3)
    assert wanted.std() > 0


@pytest.mark.parametrize("name", ["llama", "gemma4_moe", "qwen2moe", "qwen35moe"])
def test_parameters(name, oracle):
    """Norms, routers and biases, all of which once came back from `backward` without a gradient but the last."""
    model, hf = live_pair(oracle, name)
    ours, theirs = (dict(each.named_parameters()) for each in (model, hf))
    ours = {path: weight for path, weight in ours.items() if not path.endswith(REFUSED)}
    for weight in ours.values():
        weight.requires_grad_()
    ids = torch.tensor([IDS])
    for each in (model, hf):
        each(ids, labels=ids).loss.backward()
    for path, weight in ours.items():
        assert_close(weight.grad, theirs[path].grad, 3)


@pytest.mark.parametrize(("name", "path"), [("gpt-oss", "sinks"), ("qwen35moe", "dt_bias"), ("qwen35moe", "decay")])
def test_parameters_without_a_gradient_are_refused(name, path, load):
    model = load(name)
    weight = next(weight for name, weight in model.named_parameters() if name.endswith(path))
    weight.requires_grad_()
    with pytest.raises(dl.KernelError, match=f"{path} requires grad, but has no gradient here"):
        model(torch.tensor([IDS])).logits.sum().backward()
    weight.requires_grad_(False)


def test_forward_mode_is_refused(load):
    """Once zeros, too."""
    mlp = load("llama").model.layers[0].mlp
    x = torch.randn(2, mlp.gate_proj.in_features)
    with pytest.raises(dl.KernelError, match="x has a tangent, but no op of this package has a derivative in forward"):
        torch.func.jvp(mlp, (x,), (x,))


def test_finite_differences(demo_model):
    """Along the gradient the logit grows by its length; roundings of native mode pass gradients straight through."""
    model = dl.load_model(demo_model, mode="fp32")
    ids = model.encode("The capital of France is")
    paris = model.encode(" Paris")[0]
    gradient = dl.embedding_gradients(model, ids, paris)
    step = 2e-3 * gradient[0] / gradient.norm()
    logits = []
    for sign in (1, -1):
        with dl.patch(model, {"hook_embed": lambda x, sign=sign: x + sign * step}), torch.no_grad():
            logits.append(model(torch.tensor([ids])).logits[0, -1, paris].item())
    assert (logits[0] - logits[1]) / 4e-3 == pytest.approx(gradient.norm().item(), rel=FINITE_DIFFERENCE)
    native = dl.embedding_gradients(dl.load_model(demo_model), ids, paris)
    assert torch.cosine_similarity(native.flatten(), gradient.flatten(), 0) > NATIVE_GRADIENT


def test_under_inference_mode_and_a_patch(load):
    model = load("llama")
    wanted = dl.embedding_gradients(model, IDS, 5)
    with torch.inference_mode():
        assert torch.equal(dl.embedding_gradients(model, IDS, 5), wanted)
    with dl.patch(model, {"hook_embed": lambda x: 0.5 * x}):
        assert not torch.allclose(dl.embedding_gradients(model, IDS, 5), wanted)


def test_what_is_refused(load):
    with pytest.raises(ValueError, match="token id 256 is outside"):
        dl.embedding_gradients(load("llama"), IDS, 256)
    with pytest.raises(ValueError, match="how is 'l2', wanted one of norm, input"):
        dl.saliency(load("llama"), IDS, 5, how="l2")


@resident.linux
def test_memory(demo_model):
    """The peak stays far below the size of a dequantized copy, and below the largest matrix of one."""
    model = dl.load_model(demo_model, mmap=False)
    dl.embedding_gradients(model, [1, 2], 5)  # what the first call of anything takes
    packed = {m.gguf_name: m for m in model.modules() if hasattr(m, "qweight")}
    sizes = [4 * m.shape[0] * m.shape[1] for m in packed.values()]
    ids = model.encode("The capital of France is Paris.")
    peak = resident.peak(lambda: dl.embedding_gradients(model, ids, 5))
    assert sum(sizes) > 500e6
    assert peak < min(sum(sizes) / 10, max(sizes))
