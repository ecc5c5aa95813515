"""Sampling against plain formulas and against the distribution it claims to draw from."""

import dataclasses

import pytest
import torch

from dasllama_torch import sampling
from dasllama_torch.errors import DasllamaError, KernelError
from dasllama_torch.ops import registry
from dasllama_torch.ops.sample_token import sample_token, sample_tokens
from dasllama_torch.sampling import SamplingParams, candidates, penalize, restrict, sample

V = 1000
INF, NAN = float("inf"), float("nan")


def logits(seed=0, n=V):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3


def wanted_distribution(x, p):
    """The definition, by a full sort in f64."""
    values, ids = (x.double() / p.temp).sort(descending=True, stable=True)
    if p.top_k:
        values, ids = values[: p.top_k], ids[: p.top_k]
    probs = values.softmax(0)
    keep = torch.ones(len(probs), dtype=torch.bool)
    total = 0.0
    for i, q in enumerate(probs.tolist()):
        keep[i] = i == 0 or ((total < p.top_p or p.top_p == 1) and q >= p.min_p * probs[0])
        total += q
    return ids[keep], probs[keep] / probs[keep].sum()


PARAMS = [
    dict(temp=1.0),
    dict(temp=0.7, top_k=40),
    dict(temp=1.3, top_p=0.9),
    dict(temp=0.8, top_p=0.95, top_k=300),
    dict(temp=1.0, min_p=0.05),
    dict(temp=2.5, top_p=0.999),
    dict(temp=1.5, top_k=V + 7, top_p=0.5, min_p=0.2),
    dict(temp=0.01),
    dict(temp=1.0, top_k=1),
]


@pytest.mark.parametrize("params", PARAMS)
def test_candidates(params):
    p = SamplingParams(**params)
    ids, probs = candidates(logits(), p)
    wanted_ids, wanted = wanted_distribution(logits(), p)
    assert ids.tolist() == wanted_ids.tolist()
    torch.testing.assert_close(probs, wanted, rtol=1e-12, atol=0)


def token(x, draw, seen=(), op=sample_token, **params):
    p = SamplingParams(**params)
    seen = torch.tensor(seen, dtype=torch.int64)
    penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
    return int(op(x, seen, *penalties, p.temp, p.top_k, p.top_p, p.min_p, draw))


EDGE = 1e-5  # in probability: how far f32 sums may put the place where one token ends and the next begins


def assert_draws_from(x, ids, probs, **params):
    """That the kernel's tokens share [0, 1) as these do in the order of ids, and that there are no others."""
    ids, order = ids.sort()
    ends = probs[order].cumsum(0)
    for i, begin, end in zip(ids.tolist(), (ends - probs[order]).tolist(), ends.tolist(), strict=True):
        if end - begin > 4 * EDGE:
            assert token(x, begin + EDGE, **params) == i
            assert token(x, end - EDGE, **params) == i
    draws = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tolist()
    assert {token(x, draw, **params) for draw in (0.0, *draws, 1 - 2**-53)} <= set(ids.tolist())


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("n", [1, 2, 17, V, 2 * 1024 + 5])
def test_the_kernel_draws_from_the_candidates(isa, params, n):
    x = logits(n, n)
    assert_draws_from(x, *candidates(x, SamplingParams(**params)), **params)


@pytest.mark.parametrize(
    "params",
    [
        *(dict(top_k=40), dict(top_k=5000), dict(top_p=0.95), dict(top_p=0.3), dict(min_p=0.3)),
        *(dict(top_k=900, top_p=0.5), dict(top_p=0.95, min_p=0.1), dict(top_p=0.5, min_p=1e-4)),
    ],
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_cuts_of_large_vocabularies(isa, params, spread):
    """Each draw falls where it should: nobody is missing before it, and nobody is there who should not be."""
    x = torch.randn(50_001, generator=torch.Generator().manual_seed(1)) * spread
    x[777] = x.max() + spread
    seen = [777, 5, 5, *range(1000, 50_000, 997)]
    params = dict(temp=1.0, frequency_penalty=spread) | params
    ids, probs = candidates(penalize(x, seen, SamplingParams(**params)), SamplingParams(**params))
    ids, order = ids.sort()
    ends = probs[order].cumsum(0)
    draws = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    drawn = torch.tensor([token(x, draw, seen[-64:], **params) for draw in draws.tolist()])
    at = torch.searchsorted(ids, drawn)
    assert torch.equal(ids[at], drawn)
    assert (ends[at] >= draws - EDGE).all()
    assert (ends[at] - probs[order][at] <= draws + EDGE).all()


def test_the_lowest_ids_of_equals_stay(isa):
    x = torch.zeros(3000)
    x[[5, 1700, 2900]] = 1.0
    grid = [i / 4096 for i in range(4096)]
    assert {token(x, draw, temp=1.0, top_k=7) for draw in grid} == {5, 1700, 2900, 0, 1, 2, 3}
    assert {token(x, draw, temp=1.0, top_k=2) for draw in grid} == {5, 1700}
    # Ten of 3,000 equal tokens, more of which are just short of a hundredth.
    flat = torch.full((3000,), 2.5)
    assert {token(flat, draw, temp=1.0, top_p=0.0099 / 3) for draw in grid} == set(range(10))
    coarse = (torch.randn(20_000, generator=torch.Generator().manual_seed(2)) * 4).round() / 4
    for params in (dict(top_k=3000), dict(top_k=15_000), dict(top_k=40), dict(top_p=0.01)):
        kept = set(candidates(coarse, SamplingParams(temp=1.0, **params))[0].tolist())
        assert {token(coarse, draw, temp=1.0, **params) for draw in grid} <= kept


def test_minus_infinity_is_never_drawn(isa):
    x = torch.full((2000,), -INF)
    x[[3, 1500]] = torch.tensor([0.0, 1.0])
    for params in (dict(), dict(top_k=40), dict(top_p=0.99), dict(min_p=0.1)):
        drawn = {token(x, i / 64, temp=1.0, **params) for i in range(64)}
        assert drawn == {3, 1500}
    assert token(x, 0.0) == 1500


@pytest.mark.parametrize("params", [dict(), dict(temp=1.0), dict(temp=1.0, top_k=3), dict(temp=1.0, top_p=0.5)])
@pytest.mark.parametrize(("bad", "named"), [(NAN, "nan for token 70"), (INF, "inf for token 70")])
def test_logits_that_are_no_distribution_are_refused(isa, params, bad, named):
    x = logits(0, 100)
    x[70] = bad
    with pytest.raises(DasllamaError, match=named):
        sample(x, [], SamplingParams(**params), torch.Generator())
    with pytest.raises(DasllamaError, match="-inf for every token"):
        sample(torch.full((100,), -INF), [], SamplingParams(**params), torch.Generator())
    for op in (sample_token, sample_token.reference):
        assert token(x, 0.5, op=op, **params) == -1


def test_extreme_values(isa):
    x = torch.tensor([-3e38, 3e38, 0.0])
    for temp in (1e-300, 1e-40, 1.0, 1e30, 1e300):
        assert token(x, 0.0, temp=temp, top_p=0.9) in (0, 1, 2)
    assert {token(x, i / 8, temp=1e-300) for i in range(8)} == {1}
    x = torch.tensor([-100.0, -INF, 100.0, 0.0])
    assert {token(x, i / 8, temp=1e300) for i in range(8)} == {0, 2, 3}


@pytest.mark.parametrize("params", [dict(), *PARAMS])
def test_every_instruction_set_and_number_of_threads_draws_the_same(params, threads):
    x = logits(7, 30_011)
    grid = [i / 50 for i in range(50)]
    wanted = [token(x, draw, **params) for draw in grid]
    try:
        for name in registry.isas():
            registry.set_isa(name)
            for n in (1, 3):
                threads(n)
                assert [token(x, draw, **params) for draw in grid] == wanted
    finally:
        registry.set_isa(None)


@pytest.mark.parametrize("params", [dict(), dict(temp=0.9, top_k=40), dict(temp=1.0, top_p=0.9, min_p=0.01)])
def test_penalties_of_the_kernel_are_those_of_penalize(isa, params):
    x = logits(4)
    penalties = dict(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3)
    seen = [int(x.argmax())] * 3 + x.topk(30).indices.tolist() + [5, 5]
    before = x.clone()
    penalized = penalize(x, seen, SamplingParams(**penalties))
    for draw in (0.0, 0.1, 0.35, 0.7, 0.99):
        assert token(x, draw, seen, **params, **penalties) == token(penalized, draw, **params)
    assert torch.equal(x, before)


def test_the_reference_draws_as_the_kernel_does():
    x, seen = logits(5, 3000), [1, 2, 2]
    for params in [dict(), *PARAMS]:
        for draw in (0.001, 0.123, 0.5, 0.987):
            assert token(x, draw, seen, op=sample_token.reference, frequency_penalty=0.5, **params) == token(
                x, draw, seen, frequency_penalty=0.5, **params
            )


def test_the_op(isa):
    x, seen = logits(0, 40), torch.tensor([1, 1, 2])
    arguments = 1.1, 0.1, 0.2, 0.9, 5, 0.9, 0.01, 0.4
    torch.library.opcheck(sample_token, (x, seen, *arguments))
    torch.library.opcheck(sample_tokens, (x[None].expand(2, -1), seen[None].expand(2, -1), *arguments[:-1], [0.4, 0.9]))
    strided = torch.stack([x, -x], 1)[:, 0]
    assert sample_token(strided, seen, *arguments) == sample_token(x, seen, *arguments)
    registry.reset_report()
    sample_token(x, seen, *arguments)
    assert registry.report() == {"sample_token": {f"cpu/{isa}": 1}}
    with pytest.raises(KernelError, match="logits requires grad"):
        sample_token(x.clone().requires_grad_(), seen, *arguments)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(logits=torch.zeros(0)), "logits must be"), (dict(logits=torch.zeros(2, 8)), "logits must be"),
        (dict(logits=torch.zeros(8).double()), "logits must be"), (dict(seen=torch.tensor([8])), "id 8 of seen"),
        (dict(seen=torch.tensor([-1])), "id -1 of seen"), (dict(seen=torch.zeros(1)), "seen must be"),
        (dict(temp=-1.0), "temp >= 0"), (dict(temp=NAN), "temp >= 0"), (dict(top_k=-1), "top_k >= 0"),
        (dict(top_p=0.0), "top_p in"), (dict(min_p=1.5), "min_p in"), (dict(draw=1.0), "draw in"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_the_op_are_refused_by_name(change, named):
    arguments = dict(
        logits=torch.zeros(8), seen=torch.tensor([1]), repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, draw=0.5,
    )  # fmt: skip
    for op in (sample_token, sample_token.reference):
        with pytest.raises(RuntimeError, match=named):
            op(**(arguments | change))


def test_draws_follow_the_distribution():
    x, p = logits(2, 60), SamplingParams(temp=1.1, top_p=0.97, min_p=0.01)
    ids, probs = wanted_distribution(x, p)
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    counts = torch.zeros(60)
    for _ in range(n):
        counts[sample(x, [], p, generator)] += 1
    assert counts.sum() == counts[ids].sum()  # nothing outside the candidates
    expected = probs * n
    often = expected >= 5
    statistic = ((counts[ids] - expected).square() / expected)[often].sum()
    p_value = torch.special.gammaincc((often.sum() - 1) / 2.0, statistic / 2.0)  # upper tail of chi-square
    assert p_value > 1e-4


def test_greedy_takes_the_first_of_equals():
    x = torch.zeros(10)
    x[[3, 7]] = 2.0
    assert sample(x, [], SamplingParams(), torch.Generator()) == 3


def test_penalties():
    x = torch.tensor([2.0, -2.0, 1.0, 0.5])
    p = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    found = penalize(x, [0, 0, 1, 0], p)
    assert found.tolist() == [2.0 / 2 - 0.25 - 3 * 0.5, -2.0 * 2 - 0.25 - 0.5, 1.0, 0.5]
    assert x.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_penalties_reach_back_as_far_as_asked():
    x, history = torch.ones(5), [0, 1, 2, 3]
    penalty = dict(presence_penalty=1.0)
    assert penalize(x, history, SamplingParams(**penalty, penalty_last_n=2)).tolist() == [1, 1, 0, 0, 1]
    assert penalize(x, history, SamplingParams(**penalty, penalty_last_n=0)).tolist() == [1, 1, 1, 1, 1]
    assert penalize(x, history, SamplingParams(**penalty, penalty_last_n=-1)).tolist() == [0, 0, 0, 0, 1]


def test_repetition_penalty_is_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    x, history = logits(4), [3, 99, 3, 500]
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([history]), x.unsqueeze(0))[0]
    torch.testing.assert_close(penalize(x, history, SamplingParams(repetition_penalty=1.3)), wanted)


def test_a_seed_repeats():
    x, p = logits(), SamplingParams(temp=1.0)
    first = [sample(x, [], p, torch.Generator().manual_seed(5)) for _ in range(3)]
    assert len(set(first)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", float("nan")), ("temp", float("inf")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1),
        ("seed", 2**64), ("seed", -(2**63) - 1),
        ("repetition_penalty", 0.0), ("presence_penalty", float("nan")), ("penalty_last_n", -2),
        ("logit_bias", {3: NAN}), ("logit_bias", {3: INF}), ("logit_bias", {-1: 0.0}), ("stop", ""),
        ("stop", ["a", ""]), ("stop", [3]), ("stop_ids", [-1]), ("logprobs", -1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_params_are_values():
    one = SamplingParams(logit_bias={9: -INF, 3: 1}, stop="x", stop_ids={8, 2})
    other = SamplingParams(logit_bias=[(3, 1.0), (9, -INF)], stop=["x"], stop_ids=[2, 8, 8])
    assert one == other
    assert hash(one) == hash(other)
    assert (one.logit_bias, one.stop, one.stop_ids) == (((3, 1.0), (9, -INF)), ("x",), (2, 8))
    hotter = dataclasses.replace(one, temp=1.0)
    assert hotter != one
    assert dataclasses.replace(hotter, temp=0.0) == one
    assert torch.equal(restrict(torch.zeros(10), hotter), restrict(torch.zeros(10), one))
    assert one != dataclasses.replace(one, logit_bias={})


def test_bias_and_mask_leave_their_input_alone():
    x, params = logits(3, 20), SamplingParams(logit_bias={4: -1.5, 7: -INF})
    before, allowed = x.clone(), torch.arange(20) % 2 == 0
    wanted = x.clone()
    wanted[4] -= 1.5
    wanted[7] = -INF
    assert torch.equal(restrict(x, params), wanted)
    assert torch.equal(restrict(x, params, allowed), wanted.where(allowed, -INF))
    assert torch.equal(x, before)
    assert restrict(x, SamplingParams()) is x
    with pytest.raises(ValueError, match="token id 7, outside the vocabulary of 7"):
        restrict(x[:7], params)


@pytest.mark.parametrize("params", [dict(), dict(temp=0.9, top_k=40, top_p=0.9), dict(temp=1.2, min_p=0.02)])
def test_several_are_drawn_as_each_would_be(params):
    """Bias, histories of other lengths and generators included, which go on alike."""
    more = dict(repetition_penalty=1.3, frequency_penalty=0.2, penalty_last_n=7, logit_bias={3: -INF, 8: 2.0})
    p, rows = SamplingParams(**params, **more), [logits(seed, 50) for seed in range(5)]
    histories = [[], [1, 2, 2], list(range(20)), [int(rows[3].argmax())] * 9, [8]]

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (1, 5, 7, 7, 2**40)]

    one, together = generators(), generators()
    wanted = [int(sampling.draw(*each, p, generator)) for *each, generator in zip(rows, histories, one, strict=True)]
    assert sampling.draw_together(rows, histories, p, together).tolist() == wanted
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(one, together, strict=True))
