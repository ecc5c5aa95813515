"""Every family against its transformers class with the weights of the golden file: what the golden data does not hold,
that is padding, positions, module outputs and gradients.

The weights go from our modules to those of the same path, so paths, row orders and shapes are tested with them.
"""

import json

import pytest
import torch
from families import TINY
from test_module_paths import hf_model
from tolerances import FP32_LOGITS, GRADIENT

import dasllama_torch as dl
from dasllama_torch.modules.linear import Packed

PLUS_ONE = ("gemma2", "gemma3")  # files hold these norms' weights with the one that transformers adds
M_ROPE = ("qwen2vl", "qwen3vl")
CASES = [name for name in TINY if name not in ("gemma2_27b", "phi3_longrope")]


@pytest.fixture(scope="module", params=CASES)
def pair(request, oracle):
    path = oracle / "tiny" / f"{request.param}.gguf"
    model = dl.load_model(path, mode="fp32")
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()), device="cpu").eval().float()
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("qweight")}
    if request.param.startswith(PLUS_ONE):
        weights = {name: value - 1 for name, value in weights.items()}  # all of these are norms
    weights |= {f"{name}.weight": m.weight for name, m in model.named_modules() if isinstance(m, Packed)}
    _, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected
    return model, hf, request.param


def assert_close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.std()


def ids(batch, length, seed=0):
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    model, hf, name = pair
    x = ids(3, 37)
    mask = torch.ones_like(x)
    for row, n in enumerate((0, 5, 30)):
        mask[row, :n] = 0
    if side == "right":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = positions.expand(3, -1, -1) if name in M_ROPE else positions
    wanted = hf(input_ids=x, attention_mask=mask, position_ids=given).logits[mask.bool()]
    assert_close(model(x, attention_mask=mask, position_ids=positions).logits[mask.bool()], wanted)


@torch.no_grad()
@pytest.mark.parametrize("pair", M_ROPE, indirect=True)
def test_positions_of_several_axes(pair):
    model, hf, _ = pair
    positions = torch.randint(0, 90, (3, 2, 41), generator=torch.Generator().manual_seed(1))
    x = ids(2, 41)
    wanted = hf(input_ids=x, position_ids=positions).logits
    assert_close(model(x, position_ids=positions).logits, wanted)
    text = torch.arange(41).expand(3, 2, 41)
    assert (wanted - hf(input_ids=x, position_ids=text).logits).abs().max() > 0.1 * wanted.std()


@torch.no_grad()
def test_module_outputs(pair):
    """Hooks by the same path see the same tensors."""
    model, hf, _ = pair
    seen = {}

    def watch(root, side):
        for name, module in root.named_modules():
            if name.endswith(("_proj", "norm", "layernorm", "embed_tokens", "lm_head", "mlp", "self_attn")):

                def keep(m, args, out, key=(side, name)):
                    seen[key] = out[0] if isinstance(out, tuple) else out

                yield module.register_forward_hook(keep)

    hooks = [*watch(model, "ours"), *watch(hf, "hf")]
    x = ids(1, 19)
    model(x), hf(input_ids=x)
    for hook in hooks:
        hook.remove()
    names = {name for _, name in seen}
    assert len(names) > 15
    for name in names:
        found, wanted = seen["ours", name], seen["hf", name]
        assert_close(found, wanted if found.shape == wanted.shape else wanted.transpose(1, 2))


def test_gradients(pair):
    """d loss / d embeddings, by a hook on the embedding table, equals transformers'."""
    model, hf, _ = pair
    x = ids(2, 17)
    target = torch.randn(2, 17, 256, generator=torch.Generator().manual_seed(3))
    gradients = []
    for root in (model, hf):
        embeds = []
        hook = root.get_input_embeddings().register_forward_hook(
            lambda m, args, out, keep=embeds: keep.append(out.detach().requires_grad_()) or keep[-1]
        )
        loss = (root(input_ids=x).logits * target).sum()
        hook.remove()
        gradients.append(torch.autograd.grad(loss, embeds[0])[0])
    assert_close(*gradients, tolerance=GRADIENT)
