"""moe_router against transformers' routers, its order in ties and faults, its gradient."""

import pytest
import torch
from tolerances import ACTIVATION, GRADIENT
from transformers import Glm4MoeConfig, GptOssConfig, Qwen2MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from dasllama_torch.ops import registry
from dasllama_torch.ops.moe_router import SIGMOID, SOFTMAX, moe_router, moe_router_backward

KINDS = [(gate, renormalize) for gate in (SOFTMAX, SIGMOID) for renormalize in (False, True)]
T, E, K = 50, 61, 6
INF, NAN = float("inf"), float("nan")


def logits_and_bias(gate, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=generator) * 3
    return logits, torch.randn(E, generator=generator) if gate == SIGMOID else None


def of_transformers(logits, bias, gate, renormalize, scale):
    """The router of a family, made to see these logits by an identity in place of its weights."""
    if gate == SIGMOID:
        config = Glm4MoeConfig(
            hidden_size=E, num_experts_per_tok=K, n_routed_experts=E, norm_topk_prob=renormalize,
            routed_scaling_factor=scale,
        )  # fmt: skip
        router = Glm4MoeTopkRouter(config)
        router.e_score_correction_bias.copy_(bias)
    else:
        config = Qwen2MoeConfig(hidden_size=E, num_experts_per_tok=K, num_experts=E, norm_topk_prob=renormalize)
        router = Qwen2MoeTopKRouter(config)
    router.weight.data = torch.eye(E)
    _, weights, ids = router(logits)
    return (weights, ids) if gate == SIGMOID else (weights * scale, ids)


def by_expert(weights, ids):
    """Weights [T, E], zero where not chosen: transformers' sigmoid router gives the chosen in any order."""
    return torch.zeros(len(ids), E, dtype=weights.dtype).scatter(1, ids, weights)


@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_agrees_with_transformers(isa, gate, renormalize):
    logits, bias = logits_and_bias(gate)
    registry.reset_report()
    weights, ids = moe_router(logits, bias, K, gate, renormalize, 1.5)
    assert registry.report() == {"moe_router": {f"cpu/{isa}": 1}}
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    with torch.no_grad():
        wanted = by_expert(*of_transformers(logits, bias, gate, renormalize, 1.5))
    torch.testing.assert_close(by_expert(weights, ids), wanted, rtol=5 * ACTIVATION, atol=0)
    choice = logits if gate == SOFTMAX else logits.sigmoid() + bias
    assert (choice.gather(1, ids).diff() <= 0).all()  # best first
    reference = moe_router.reference(logits, bias, K, gate, renormalize, 1.5)
    assert torch.equal(ids, reference[1])
    torch.testing.assert_close(weights, reference[0], rtol=5 * ACTIVATION, atol=0)


def test_agrees_with_the_router_of_gpt_oss(isa):
    """The softmax of the chosen logits is that of all, renormalized."""
    router = GptOssTopKRouter(GptOssConfig(hidden_size=E, num_experts_per_tok=K, num_local_experts=E))
    router.weight.data = torch.eye(E)
    logits, _ = logits_and_bias(SOFTMAX)
    with torch.no_grad():
        _, wanted, wanted_ids = router(logits)
    weights, ids = moe_router(logits, None, K, SOFTMAX, True, 1.0)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=5 * ACTIVATION, atol=0)


def test_known_values(isa):
    logits = torch.tensor([2.0, 1, 0, -1])
    plain, _ = moe_router(logits, None, 2, SOFTMAX, False, 1.0)
    normed, ids = moe_router(logits, None, 2, SOFTMAX, True, 1.0)
    torch.testing.assert_close(plain, torch.tensor([0.643914, 0.236883]), rtol=1e-5, atol=0)
    torch.testing.assert_close(normed, torch.tensor([0.731059, 0.268941]), rtol=1e-5, atol=0)
    assert ids.tolist() == [0, 1]


def test_a_selection_bias_changes_the_choice_and_not_the_weights(isa):
    logits, bias = torch.tensor([1.0, 0, -1, -2]), torch.tensor([-9.0, 0, 0, 9])
    weights, ids = moe_router(logits, bias, 2, SIGMOID, False, 1.0)
    assert ids.tolist() == [3, 1]
    torch.testing.assert_close(weights, torch.tensor([-2.0, 0]).sigmoid(), rtol=5 * ACTIVATION, atol=0)


@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_the_lower_id_comes_first(isa, gate, renormalize):
    logits = torch.tensor([[0.0, 2, -0.0, 2, 0, 2], [1, 1, 1, 1, 1, 1], [-INF, 3, -INF, -INF, 3, -INF]])
    bias = torch.zeros(6) if gate == SIGMOID else None
    for op in (moe_router, moe_router.reference):
        _, ids = op(logits, bias, 4, gate, renormalize, 1.0)
        assert ids.tolist() == [[1, 3, 5, 0], [0, 1, 2, 3], [1, 4, 0, 2]]


@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_ids_are_valid_whatever_the_logits(isa, gate, renormalize):
    rows = [[NAN] * 5, [-INF] * 5, [INF] * 5, [1, NAN, 3, -INF, NAN], [INF, -INF, NAN, 0, 3e38], [-3e38, 3e38, 0, 1, 2]]
    logits = torch.tensor(rows)
    found, wanted = (op(logits, None, 3, gate, renormalize, 1.0) for op in (moe_router, moe_router.reference))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    torch.testing.assert_close(found[0], wanted[0], rtol=5 * ACTIVATION, atol=1e-30, equal_nan=True)
    assert found[1][3].tolist()[:2] == [1, 4]  # NaN before all numbers, as in torch.topk


@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_gradients(isa, gate, renormalize):
    logits, bias = logits_and_bias(gate)
    grad = torch.randn(T, K)
    l32, l64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    weights, ids = moe_router(l32, bias, K, gate, renormalize, 1.5)
    (weights * grad).sum().backward()
    score = l64.sigmoid() if gate == SIGMOID else l64.softmax(-1)
    chosen = score.gather(1, ids)
    exact = 1.5 * (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    (exact * grad.double()).sum().backward()
    assert (l32.grad - l64.grad).abs().max() <= GRADIENT * l64.grad.std()
    reference = moe_router_backward.reference(grad, logits, ids, gate, renormalize, 1.5)
    assert (reference - l64.grad).abs().max() <= GRADIENT * l64.grad.std()
    assert not ids.requires_grad


@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_bits_depend_on_nothing_but_the_row(gate, renormalize, threads):
    logits, bias = logits_and_bias(gate)
    grad = torch.randn(T, K)
    whole = moe_router(logits, bias, K, gate, renormalize, 1.5)
    gradient = moe_router_backward(grad, logits, whole[1], gate, renormalize, 1.5)
    try:
        for isa in registry.isas():
            registry.set_isa(isa)
            for n in (1, 3):
                threads(n)
                for first, last in ((0, T), (7, 8), (20, 43)):
                    part = slice(first, last)
                    found = moe_router(logits[part], bias, K, gate, renormalize, 1.5)
                    assert torch.equal(found[0], whole[0][part])
                    assert torch.equal(found[1], whole[1][part])
                    back = moe_router_backward(grad[part], logits[part], found[1], gate, renormalize, 1.5)
                    assert torch.equal(back, gradient[part])
    finally:
        registry.set_isa(None)


@pytest.mark.parametrize("n_experts", [1, 2, 15, 16, 17, 128, 512])
@pytest.mark.parametrize(("gate", "renormalize"), KINDS)
def test_sizes_and_views_between_guards(isa, gate, renormalize, n_experts):
    logits = torch.randn(4, n_experts)
    around = torch.full((9, n_experts + 5), NAN)
    around[1:9:2, 3 : n_experts + 3] = logits
    for k in {1, min(n_experts, 10), n_experts}:
        found = moe_router(around[1:9:2, 3 : n_experts + 3], None, k, gate, renormalize, 2.5)
        wanted = moe_router.reference(logits, None, k, gate, renormalize, 2.5)
        torch.testing.assert_close(found[0], wanted[0], rtol=5 * ACTIVATION, atol=0)
        assert torch.equal(logits.gather(1, found[1]), logits.gather(1, wanted[1]))


def test_shapes_and_dtypes(isa):
    logits = torch.randn(2, 3, 8)
    for dtype in (torch.float16, torch.bfloat16):
        weights, ids = moe_router(logits.to(dtype), None, 2, SOFTMAX, True, 1.0)
        assert (weights.shape, ids.shape, weights.dtype) == ((2, 3, 2), (2, 3, 2), torch.float32)
        assert torch.equal(weights, moe_router(logits.to(dtype).float(), None, 2, SOFTMAX, True, 1.0)[0])
    assert moe_router(logits[:0], None, 2, SOFTMAX, True, 1.0)[0].shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(logits=torch.zeros(2, 8).int()), "logits must be"), (dict(top_k=0), "logits must be"),
        (dict(top_k=9), "logits must be"), (dict(logits=torch.zeros(())), "logits must be"),
        (dict(gate=2), "gate must be"), (dict(gate=-1), "gate must be"), (dict(bias=torch.zeros(7)), "bias must be"),
        (dict(bias=torch.zeros(8).double()), "bias must be"), (dict(gate=SOFTMAX), "bias must be"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(change, named):
    arguments = dict(logits=torch.zeros(2, 8), bias=torch.zeros(8), top_k=2, gate=SIGMOID, renormalize=True, scale=1.0)
    for op in (moe_router, moe_router.reference):
        with pytest.raises(RuntimeError, match=named):
            op(**(arguments | change))


def test_wrong_arguments_of_the_gradient_are_refused_by_name():
    grad, logits, ids = torch.zeros(2, 3), torch.zeros(2, 8), torch.zeros(2, 3, dtype=torch.int64)
    for bad in (-1, 8):
        with pytest.raises(RuntimeError, match=f"moe_router_backward: id {bad} is not one of 8"):
            moe_router_backward(grad, logits, ids + bad, SOFTMAX, True, 1.0)
    for arguments in (
        (grad[:1], logits, ids), (grad[0], logits, ids), (grad, logits, ids.int()), (grad, logits[:1], ids),
        (grad[:, :2], logits, ids),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="moe_router_backward: (logits|grad)"):
            moe_router_backward(*arguments, SOFTMAX, True, 1.0)


def test_opcheck():
    for gate, renormalize in KINDS:
        logits, bias = torch.randn(4, 9, requires_grad=True), torch.randn(9) if gate == SIGMOID else None
        torch.library.opcheck(moe_router, (logits, bias, 3, gate, renormalize, 1.5))
        ids = moe_router(logits, bias, 3, gate, renormalize, 1.5)[1]
        torch.library.opcheck(moe_router_backward, (torch.randn(4, 3), logits.detach(), ids, gate, renormalize, 1.5))
