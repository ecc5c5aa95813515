"""LongRoPE: a session's frequencies follow from its n_ctx, whatever is evaluated when and beside whom."""

import numpy as np
import pytest
import torch
from test_invariants import text
from tolerances import FP32_LOGITS

import dasllama_torch as dl

ORIGINAL = 256  # original context of the golden case


@pytest.fixture
def model(load):
    return load("phi3_longrope")


def logits(model, ids, n_ctx, size=10**6):
    with dl.create_session(model, n_ctx=n_ctx) as session:
        return torch.cat([session.eval(ids[i : i + size], logits="all") for i in range(0, len(ids), size)])


def test_chunks_across_the_original_context(model):
    ids = text(1, ORIGINAL + 44)
    wanted = logits(model, ids, 300)
    for size in (1, 3, 64):
        assert torch.equal(logits(model, ids, 300, size), wanted)


def test_the_context_decides(model):
    ids = text(2, 50)
    short, long = logits(model, ids, ORIGINAL), logits(model, ids, ORIGINAL + 1)
    assert (short - long).abs().max() > 0.1 * short.std()
    assert torch.equal(logits(model, ids, 60), short)
    assert torch.equal(logits(model, ids, 4096), long)


def test_neighbours_of_another_context(model):
    ids, other = text(3, 60), text(4, 270)
    wanted = logits(model, ids, ORIGINAL), logits(model, other, 512)
    with dl.create_session(model, n_ctx=ORIGINAL) as a, dl.create_session(model, n_ctx=512) as b:
        for found, want in zip(dl.eval_batch([a, b], [ids, other], logits="all"), wanted, strict=True):
            assert torch.equal(found, want)


@torch.no_grad()
def test_without_a_cache_the_tokens_in_hand_decide(model, oracle):
    """Each sequence of a batch as alone; transformers lets the longest decide for all."""
    data = np.load(oracle / "tiny" / "phi3_longrope.npz")
    ids = torch.zeros(2, 300, dtype=torch.int64)
    ids[0] = torch.from_numpy(data["ids_s300"])
    ids[1, 200:] = torch.from_numpy(data["ids_s100"])
    mask = torch.ones_like(ids)
    mask[1, :200] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, n in enumerate((300, 100)):
        wanted = torch.from_numpy(data[f"logits_hf_s{n}"])
        at = torch.from_numpy(data[f"rows_s{n}"]).long() + 300 - n
        assert (found[row, at] - wanted).abs().max() <= FP32_LOGITS * wanted.std()
