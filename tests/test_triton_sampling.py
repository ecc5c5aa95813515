"""The draw of a token in Triton: the same token as on the CPU for the same number, and the distribution itself."""

import pytest
import torch
from test_sampling import EDGE, PARAMS, logits, wanted_distribution
from triton_device import DEVICE, cases

from dasllama_torch.ops.sample_token import sample_token as op
from dasllama_torch.ops.sample_token import sample_tokens as op_rows
from dasllama_torch.sampling import SamplingParams, candidates, penalize
from dasllama_torch.triton_kernels.sample_token import BLOCK, sample_token, sample_tokens

INF, NAN = float("inf"), float("nan")
SIZES = cases([1, 17, BLOCK + 5, 151_936, 262_144], 17, BLOCK + 5)
N_DRAWS = 60 if DEVICE == "cuda" else 3


def token(x, draw, seen=(), **params):
    p = SamplingParams(**params)
    seen = torch.tensor(seen, dtype=torch.int64, device=DEVICE)
    penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
    return int(sample_token(x.to(DEVICE), seen, *penalties, p.temp, p.top_k, p.top_p, p.min_p, draw))


def assert_draws_from(x, seen=(), n=N_DRAWS, **params):
    """Each draw takes the token that the definition gives it, or near an edge of that one's share its neighbour."""
    p = SamplingParams(**params)
    ids, probs = candidates(penalize(x, seen, p), p)
    ids, order = ids.sort()
    ends = probs[order].cumsum(0)
    draws = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tolist()
    for draw in (0.0, *draws, 1 - 2**-53):
        at = int(torch.searchsorted(ids, drawn := token(x, draw, seen, **params)))
        assert ids[at] == drawn
        assert ends[at] - probs[order][at] - EDGE <= draw <= ends[at] + EDGE


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("n", SIZES)
def test_a_draw_takes_the_token_that_the_definition_gives_it(params, n):
    assert_draws_from(logits(n, n), **params)


@pytest.mark.parametrize(
    "params", [dict(top_k=900, top_p=0.5), dict(top_p=0.95, min_p=0.1), dict(top_p=0.5, min_p=1e-4), dict(top_k=5000)]
)
@pytest.mark.parametrize("spread", cases([0.1, 1.0, 4.0], 0.1))
def test_cuts_of_large_vocabularies(params, spread):
    x = torch.randn(50_001 if DEVICE == "cuda" else 2 * BLOCK + 1, generator=torch.Generator().manual_seed(1)) * spread
    x[777] = x.max() + spread
    seen = [777, 5, 5, *range(1000, len(x), 997)]
    assert_draws_from(x, seen, temp=1.0, frequency_penalty=spread, penalty_last_n=-1, **params)


@pytest.mark.parametrize("params", [dict(), *PARAMS])
@pytest.mark.parametrize("n", cases([1, 17, BLOCK + 5, 151_936], 17, BLOCK + 5))
def test_rows_are_drawn_as_each_would_be(params, n):
    p, draws = SamplingParams(**params, frequency_penalty=0.5), [0.1, 0.77, 0.5, 0.99]
    x = torch.stack([logits(seed, n) for seed in range(4)])
    x[2] = NAN
    seen = [[], [0, 0, int(x[1].argmax())], [0], [n - 1]]
    wanted = [
        token(row, draw, ids, **params, frequency_penalty=0.5) for row, draw, ids in zip(x, draws, seen, strict=True)
    ]
    ids = torch.tensor([[*each, *[-1] * (3 - len(each))] for each in seen], device=DEVICE)
    wide = torch.zeros(4, 2 * n, device=DEVICE)
    wide[:, n:] = x.to(DEVICE)  # rows that are not beside each other
    rest = p.repetition_penalty, p.presence_penalty, p.frequency_penalty, p.temp, p.top_k, p.top_p, p.min_p
    found = sample_tokens(wide[:, n:], ids, *rest, draws)
    assert found.tolist() == wanted
    assert wanted[2] == -1
    if DEVICE == "cpu":  # where the op has no kernel
        assert op_rows(x[:2], ids[:2], *rest, draws[:2]).tolist() == [
            int(op(row, ids[ids != -1], *rest, draw)) for row, ids, draw in zip(x[:2], ids[:2], draws[:2], strict=True)
        ]
    with pytest.raises(RuntimeError, match="n draws"):
        sample_tokens(wide[:, n:], ids, *rest, draws[:3])


def test_it_is_the_token_of_the_cpu():
    x = logits(5, 3000)
    for params in cases([dict(), *PARAMS], dict(temp=0.8, top_p=0.95, top_k=300), dict()):
        p = SamplingParams(**params)
        for draw in (0.123, 0.5, 0.987):
            wanted = op(x, torch.tensor([1, 2, 2]), 1.0, 0.0, 0.5, p.temp, p.top_k, p.top_p, p.min_p, draw)
            assert token(x, draw, [1, 2, 2], frequency_penalty=0.5, **params) == wanted


def test_the_lowest_ids_of_equals_stay():
    x = torch.zeros(BLOCK + 100)
    x[[5, 1700, BLOCK + 50]] = 1.0
    x[0] = -0.0
    grid = [i / 64 for i in range(64)] if DEVICE == "cuda" else [0.0, 0.2, 0.99]
    kept = {token(x, draw, temp=1.0, top_k=7) for draw in grid}
    assert {0} < kept <= {5, 1700, BLOCK + 50, 0, 1, 2, 3}
    assert {token(x, draw, temp=1.0, top_k=2) for draw in grid} == {5, 1700}
    assert token(x, 0.0) == 5
    flat = torch.full((BLOCK + 100,), 2.5)
    assert {token(flat, draw, temp=1.0, top_p=10 / len(flat)) for draw in (0.0, 0.95)} == {0, 9}
    # Of the 20 that top-k leaves, top-p takes half.
    assert {token(flat, draw, temp=1.0, top_k=20, top_p=0.5) for draw in (0.05, 0.95)} == {0, 9}


def test_minus_infinity_is_never_drawn():
    x = torch.full((BLOCK + 9,), -INF)
    x[[3, BLOCK + 5]] = torch.tensor([0.0, 1.0])
    for params in cases([dict(), dict(top_k=40), dict(top_p=0.99), dict(min_p=0.1)], dict(top_k=40)):
        assert {token(x, draw, temp=1.0, **params) for draw in (0.0, 0.2, 0.3, 1 - 2**-53)} == {3, BLOCK + 5}
    assert token(x, 0.0) == BLOCK + 5


@pytest.mark.parametrize("params", [dict(), dict(temp=1.0, top_k=3, top_p=0.5)])
def test_logits_that_are_no_distribution_have_no_token(params):
    for bad in (NAN, INF, -NAN):
        x = logits(0, 100)
        x[70] = bad
        assert token(x, 0.5, **params) == -1
    assert token(torch.full((100,), -INF), 0.5, **params) == -1


def test_extreme_values():
    x = torch.tensor([-3e38, 3e38, 0.0])
    for temp in (1e-310, 1e30, 1e300):
        assert token(x, 0.0, temp=temp, top_p=0.9) in (0, 1, 2)
    assert token(x, 0.99, temp=1e-310) == 1
    x = torch.tensor([-100.0, -INF, 100.0, 0.0])
    assert {token(x, draw, temp=1e300) for draw in (0.2, 0.5, 0.8)} == {0, 2, 3}


def test_penalties():
    x = logits(4, 1000)
    penalties = dict(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3, penalty_last_n=-1)
    seen = [int(x.argmax())] * 3 + x.topk(80).indices.tolist() + [5, 5]
    kept = x.clone()
    wanted = penalize(x, seen, SamplingParams(**penalties))
    for draw in (0.1, 0.7):
        assert token(x, draw, seen, temp=0.9, top_k=40, **penalties) == token(wanted, draw, temp=0.9, top_k=40)
    assert torch.equal(x, kept)
    assert token(x, 0.0, [-1, 1000, 2**40], presence_penalty=100.0) == x.argmax()  # a GPU cannot raise
    with pytest.raises(RuntimeError, match="temp >= 0"):
        sample_token(x, torch.tensor([1]), 1.0, 0.0, 0.0, -1.0, 0, 1.0, 0.0, 0.5)


@pytest.mark.skipif(DEVICE != "cuda", reason="in the interpreter each draw takes a tenth of a second")
@pytest.mark.parametrize("params", [dict(temp=1.1, top_p=0.97, min_p=0.01), dict(temp=1.0, top_k=20), dict(temp=0.7)])
def test_draws_follow_the_distribution(params):
    x, n = logits(2, 60), 5000
    ids, probs = wanted_distribution(x, SamplingParams(**params))
    draws = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    counts = torch.tensor([token(x, draw, **params) for draw in draws]).bincount(minlength=60)
    assert counts.sum() == counts[ids].sum()  # nothing outside the candidates
    expected = probs * n
    often = expected >= 5
    statistic = ((counts[ids] - expected).square() / expected)[often].sum()
    assert torch.special.gammaincc((often.sum() - 1) / 2.0, statistic / 2.0) > 1e-4  # upper tail of chi-square
