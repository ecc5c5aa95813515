"""Live parity with transformers on tiny random models: logits, padding, gradients, tracing."""

import copy

import hf_twin
import pytest
import torch
from tolerances import FP32_LOGITS, GRADIENT

import dasllama_torch as dl
from dasllama_torch.ops import registry


@pytest.fixture(scope="module", params=hf_twin.KINDS)
def twin(request, tmp_path_factory):
    return hf_twin.make(request.param, tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def model(twin):
    return dl.load_model(twin.path, mode="fp32")


def ids(batch, length, seed=0):
    return torch.randint(0, 301, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.std()


@torch.no_grad()
def test_logits(twin, model):
    x = ids(2, 37)
    assert_close(model(x).logits, twin.hf(x).logits)
    assert_close(model(x, logits_to_keep=3).logits, twin.hf(x, logits_to_keep=3).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(twin, model, side):
    x = ids(3, 23)
    mask = torch.ones_like(x)
    for row, n in enumerate((0, 5, 22)):
        mask[row, :n] = 0
    if side == "right":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask.bool()
    wanted = twin.hf(x, attention_mask=mask, position_ids=positions).logits[real]
    assert_close(model(x, attention_mask=mask, position_ids=positions).logits[real], wanted)
    assert_close(model(x, attention_mask=mask).logits[real], twin.hf(x, attention_mask=mask).logits[real])


@torch.no_grad()
def test_module_outputs(twin, model):
    """Hooks by the same path see the same tensors, layer by layer."""
    x = ids(1, 19)
    seen = {}

    def watch(root, side):
        for name, module in root.named_modules():
            if name.endswith(("_proj", "norm", "layernorm", "embed_tokens", "lm_head", "mlp", "self_attn")):

                def keep(m, args, out, key=(side, name)):
                    seen[key] = out[0] if isinstance(out, tuple) else out

                yield module.register_forward_hook(keep)

    hooks = [*watch(model, "ours"), *watch(twin.hf, "hf")]
    model(x), twin.hf(x)
    for hook in hooks:
        hook.remove()
    names = {name for _, name in seen}
    assert len(names) > 20
    for name in names:
        # HF norms queries and keys as [B, heads, T, D] or [B, T, heads, D]; ours as [B, T, heads, D].
        found, wanted = seen["ours", name], seen["hf", name]
        if found.shape != wanted.shape:
            wanted = wanted.transpose(1, 2)
        assert_close(found, wanted)


def test_weight_is_hf_weight(twin, model):
    """Tensor order is HF's, also where the file interleaves rotary rows; gemma's norms hold the one."""
    hf = twin.hf.state_dict()
    plus = 1.0 if "gemma" in type(twin.hf).__name__.lower() else 0.0
    for name, module in model.named_modules():
        if hasattr(module, "weight"):
            wanted = hf[f"{name}.weight"]
            found = module.weight
            assert torch.equal(found, wanted + plus) if found.dim() == 1 else torch.equal(found, wanted)
        if getattr(module, "bias", None) is not None:
            assert torch.equal(module.bias, hf[f"{name}.bias"])


def test_gradients(twin, model):
    """d loss / d embeddings through every packed weight equals transformers'."""
    x = ids(2, 17)
    target = torch.randn(2, 17, 301, generator=torch.Generator().manual_seed(3))
    gradients = []
    for root in (model, twin.hf):
        embeds = twin.hf.model.embed_tokens(x).detach().requires_grad_()
        loss = (root(inputs_embeds=embeds).logits * target).sum()
        gradients.append(torch.autograd.grad(loss, embeds)[0])
    assert_close(*gradients, tolerance=GRADIENT)


def test_traces_in_one_graph(model):
    x = ids(2, 11)
    compiled = torch.compile(lambda x: model(x).logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x).logits)


@torch.no_grad()
def test_every_op_agrees_with_its_reference(model):
    with registry.compare_to_reference(rtol=1e-4, atol=1e-5) as compared:
        model(ids(2, 21))
    assert {"quant_linear", "rms_norm", "rope", "rope_tables", "attention", "gated_act"} <= set(compared.worst)


@torch.no_grad()
def test_no_reference_serves_a_forward(model):
    registry.reset_report()
    with registry.strict():
        model(ids(1, 9))
        with dl.create_session(model) as session:
            session.eval(list(range(9)))
    assert not any("reference" in kernels for kernels in registry.report().values())


@torch.no_grad()
def test_half_keeps_what_the_file_holds(model):
    half = copy.deepcopy(model).half()
    for (name, found), wanted in zip(half.state_dict().items(), model.state_dict().values(), strict=True):
        assert found.dtype == wanted.dtype, name
