"""Looking inside of models on a GPU: what the CPU finds. Skipped without one; `make test-cuda` runs them."""

import pytest
import torch
from conftest import absent_gpu
from test_invariants import text
from tolerances import CUDA_LOGITS, GRADIENT

import dasllama_torch as dl

absent_gpu()
DEVICE = "cuda"
NAMES = ["llama", "gemma3", "qwen35moe"]


@pytest.fixture(params=NAMES)
def models(request, oracle):
    """Of a file in f32, on the GPU and on the CPU."""
    path = oracle / "tiny" / f"{request.param}.gguf"
    return [dl.load_model(path, mode="fp32", device=device) for device in (DEVICE, "cpu")]


def assert_near(found, wanted, most=CUDA_LOGITS):
    found = found.cpu()
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 10 * most * wanted.abs().max().clamp(min=1e-3)


def prompt(model) -> torch.Tensor:
    return torch.tensor([text(5, 23)]) % model.config.n_vocab


def test_recorded_values(models):
    gpu, cpu = models
    ids = prompt(cpu)
    names = ["model.layers.*", "model.layers.*.mlp", "model.norm"]
    (logits, seen), (wanted, known) = (dl.run_with_cache(model, ids, names) for model in models)
    assert_near(logits, wanted)
    assert set(seen) == set(known)
    for name in known:
        assert_near(seen[name], known[name])


def test_patches_and_directions(models):
    ids = prompt(models[1])
    _, other = dl.run_with_cache(models[1], ids.flip(1), "model.layers.0")
    direction = torch.randn(models[1].config.n_embd, generator=torch.Generator().manual_seed(0))
    for change in (
        lambda model: dl.patch(model, {"model.layers.0": other["model.layers.0"]}, positions=[3, 22]),
        lambda model: dl.patch(model, {"model.layers.0.mlp": 0}),
        lambda model: dl.steer(model, 0, direction, 0.5, positions=slice(5, None)),
    ):
        found, plain = [], []
        for model in models:
            with torch.no_grad():
                plain.append(model(ids.to(model.device)).logits.cpu())
                with change(model):
                    found.append(model(ids.to(model.device)).logits.cpu())
                with change(model), dl.create_session(model, kv_dtype="f32") as session:
                    assert_near(session.eval(ids[0].tolist(), "all"), found[-1][0])
        assert_near(*found)
        assert (found[1] - plain[1]).abs().max() > 1e-3 * plain[1].abs().max()


def test_lens_and_attribution(models):
    ids = prompt(models[1])
    lenses = [dl.logit_lens(model, ids, top_k=3) for model in models]
    assert_near(lenses[0].logits, lenses[1].logits)
    found, wanted = (dl.logit_attribution(model, ids, 3, 7) for model in models)
    assert_near(found.values, wanted.values)


def test_saliency(models):
    found, wanted = (dl.saliency(model, prompt(models[1]), 3) for model in models)
    assert_near(found, wanted, 10 * GRADIENT)


def test_attention_patterns(oracle):
    found = []
    for device in (DEVICE, "cpu"):
        model = dl.load_model(oracle / "tiny" / "llama.gguf", mode="fp32", device=device)
        ids = text(5, 23)
        with dl.create_session(model, kv_dtype="f32") as session:
            session.eval(ids[:20])
            cached = dl.attention_pattern(session, ids[20:])
        plain = dl.attention_pattern(model, torch.tensor([ids]))
        found.append((cached, plain))
    for mine, theirs in zip(*found, strict=True):
        assert set(mine) == set(theirs)
        for layer in theirs:
            assert_near(mine[layer].weights, theirs[layer].weights)


def test_evaluation_and_comparison(models):
    gpu, cpu = models
    ids = text(5, 200)
    found, wanted = (dl.evaluate(model, ids, n_ctx=64, progress=False) for model in models)
    assert found.nll.mean == pytest.approx(wanted.nll.mean, rel=1e-4)
    apart = dl.evaluate(gpu, ids, cpu, n_ctx=64, progress=False)
    assert 0 <= apart.kl.mean < 1e-5
    assert apart.top1.mean > 0.99
    result = dl.compare(gpu, cpu, ids[:32])
    assert max(result.kl) < 1e-5
    assert not result.only_in_model
    assert not result.shapes_differ
    assert all(module.relative <= 10 * CUDA_LOGITS for module in result.modules), result


def test_transformers_generate(models):
    ids = prompt(models[1])
    found = [model.generate(ids.to(model.device), max_new_tokens=8, do_sample=False).cpu() for model in models]
    assert torch.equal(*found)
