"""Sampling against plain formulas and against the distribution it claims to draw from."""

import pytest
import torch

from dasllama_torch.sampling import SamplingParams, candidates, penalize, sample

V = 1000


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
    assert len(ids) == len(wanted_ids)
    possible = wanted > 1e-30  # below, f32 has zeros, whose order means nothing
    assert ids[possible].tolist() == wanted_ids[possible].tolist()
    torch.testing.assert_close(probs.double(), wanted, rtol=1e-5, atol=1e-9)


def test_a_wide_nucleus_is_found_without_a_full_sort():
    flat = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 0.1
    p = SamplingParams(temp=1.0, top_p=0.3)
    ids, probs = candidates(flat, p)
    wanted_ids, wanted = wanted_distribution(flat, p)
    assert abs(len(ids) - len(wanted_ids)) <= 1  # the mass at the edge is a sum of 15,000 f32
    torch.testing.assert_close(probs[:1000].double(), wanted[:1000], rtol=1e-3, atol=0)


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
        ("repetition_penalty", 0.0), ("presence_penalty", float("nan")), ("penalty_last_n", -2),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
