"""Beam search against transformers': the same tokens, scores and beams, however it ends."""

import pytest
import torch
from hf_pairs import live_pair, pair_of
from test_hf_generate import CASES, HOW, prompts
from tolerances import FP32_LOGITS

import dasllama_torch as dl

# Not token 0: transformers takes a padding token 0 for none, and fills up with the end.
HOW = HOW | dict(pad_token_id=1, num_beams=4, return_dict_in_generate=True, output_scores=True)


@pytest.fixture(scope="module", params=CASES)
def pair(request, oracle):
    return live_pair(oracle, request.param)


llama = pair_of("llama")


def ends_of(model, x, mask, n=2):
    """Tokens that beams come upon early."""
    free = model.generate(x, attention_mask=mask, **HOW | dict(num_return_sequences=4, eos_token_id=255)).sequences
    return free[:, 11].unique()[:n].tolist()


def assert_same(found, wanted):
    assert found.keys() == list(wanted.keys())
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(found.beam_indices, wanted.beam_indices)
    assert torch.allclose(found.sequences_scores, wanted.sequences_scores, rtol=FP32_LOGITS)
    for a, b in zip(found.scores, wanted.scores, strict=True):
        assert a.shape == b.shape
        seen = b.isfinite()
        assert torch.allclose(a[seen], b[seen], rtol=FP32_LOGITS, atol=FP32_LOGITS)


def test_families(pair):
    """Window, recurrent and shared states are forked and put in another order, in a padded batch."""
    model, hf = pair
    x, mask = prompts()
    how = HOW | dict(attention_mask=mask, num_return_sequences=3, eos_token_id=ends_of(model, x, mask))
    assert_same(model.generate(x, **how), hf.generate(x, **how))


@pytest.mark.parametrize(
    "settings",
    [
        dict(early_stopping=True),
        dict(early_stopping="never", length_penalty=2.0),
        dict(early_stopping="never", length_penalty=-1.0),
        dict(length_penalty=0.0, num_beams=2),
        dict(repetition_penalty=1.5, num_beams=3, num_return_sequences=1),
        dict(eos_token_id=255, max_new_tokens=1),
        dict(num_beams=7, num_return_sequences=7, max_length=15, max_new_tokens=None),
    ],
    ids=str,
)
def test_settings(llama, settings):
    model, hf = llama
    x, mask = prompts()
    how = HOW | dict(attention_mask=mask, num_return_sequences=2, eos_token_id=ends_of(model, x, mask, 3)) | settings
    assert_same(model.generate(x, **how), hf.generate(x, **how))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_every_end(llama, early_stopping):
    """So many ends that most candidates stop, and the search before its last step."""
    model, hf = llama
    x, mask = prompts()
    how = HOW | dict(attention_mask=mask, num_return_sequences=4, early_stopping=early_stopping)
    how |= dict(eos_token_id=list(range(100, 200)), max_new_tokens=24)
    assert_same(model.generate(x, **how), hf.generate(x, **how))


STRICT = dict(temperature=0.5, top_k=2, top_p=0.1, min_p=0.9)  # as many tokens stay as beams need


@pytest.mark.parametrize(
    "warpers", [dict(temperature=1.4, top_k=30, top_p=0.9, min_p=0.01), STRICT], ids=["", "strict"]
)
def test_draws_are_those_of_transformers(llama, warpers):
    model, hf = llama
    x, mask = prompts()
    how = HOW | warpers | dict(attention_mask=mask, do_sample=True)
    how |= dict(eos_token_id=ends_of(model, x, mask), num_return_sequences=2)
    torch.manual_seed(3)
    found = model.generate(x, **how)
    torch.manual_seed(3)
    assert_same(found, hf.generate(x, **how))


def test_processors_and_criteria(llama):
    model, hf = llama
    x, mask = prompts()

    def even(ids, scores):
        assert ids.shape[0] == scores.shape[0] == 12
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -torch.inf)

    def seventh(ids, scores, **_):
        return ids[:, -1] % 7 == 0

    how = HOW | dict(attention_mask=mask, logits_processor=[even], stopping_criteria=[seventh], num_return_sequences=4)
    assert_same(model.generate(x, **how), hf.generate(x, **how))


def test_embeddings(llama):
    model, hf = llama
    x, mask = prompts()
    embeds = model.get_input_embeddings()(x)
    how = HOW | dict(inputs_embeds=embeds, attention_mask=mask)
    assert_same(model.generate(**how), hf.generate(**how))
    how = HOW | dict(inputs_embeds=embeds[:1], repetition_penalty=1.3)
    assert_same(model.generate(**how), hf.generate(**how))


def test_what_is_kept_of_each_step(llama):
    model, hf = llama
    x = prompts()[0][:1]
    how = HOW | dict(output_logits=True, output_hidden_states=True, output_attentions=True, max_new_tokens=4)
    found, wanted = model.generate(x, **how), hf.generate(x, **how)
    assert_same(found, wanted)
    for name in ("logits", "hidden_states", "attentions"):
        a, b = (out[name] if name != "logits" else [[each] for each in out[name]] for out in (found, wanted))
        for ours, theirs in zip(a, b, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == other.shape
                assert torch.allclose(one, other, atol=FP32_LOGITS * max(1.0, other.std().item()))
    transitions = [
        hf.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
        for out in (found, wanted)
    ]
    assert torch.allclose(*transitions, atol=1e-4)


def test_a_greedy_beam_is_no_worse(llama):
    """Its likelihood is that of a fresh forward, and at least that of the greedy text."""
    model, _ = llama
    x = prompts()[0][:1]
    out = model.generate(x, **HOW | dict(eos_token_id=255, length_penalty=0.0))
    greedy = model.generate(x, max_new_tokens=12, eos_token_id=255, pad_token_id=1)

    def likelihood(ids):
        with torch.no_grad():
            logs = model(ids).logits[0, 8:-1].log_softmax(-1)
        return logs.gather(1, ids[0, 9:, None]).sum()

    assert likelihood(out.sequences).item() == pytest.approx(out.sequences_scores.item(), rel=1e-4)
    assert likelihood(out.sequences) > likelihood(greedy)


def test_nothing_is_left_open(llama):
    model, _ = llama
    x, _ = prompts()
    with dl.create_session(model, "f32") as session:
        before = session.pool.used_bytes
        plain = HOW | dict(return_dict_in_generate=False)
        assert model.generate(x, **plain).shape == (3, 21)
        with pytest.raises(ZeroDivisionError):
            model.generate(x, **HOW, logits_processor=[lambda ids, scores: 1 / 0])
        assert session.pool.used_bytes == before


def test_refusals(llama):
    model, _ = llama
    x, _ = prompts()
    for how, says in (
        (dict(num_beams=0), "num_beams is 0"),
        (dict(num_beams=2, num_return_sequences=3), "num_return_sequences is 3, wanted no more than num_beams=2"),
        (dict(num_beams=2, early_stopping="soon"), "early_stopping is 'soon'"),
        (dict(num_beams=2, streamer=object()), "streamer"),
        (dict(num_beams=2, stopping_criteria=[lambda ids, scores: ids[:, -1] % 3 == 0], max_new_tokens=9), "pad_token"),
    ):
        with pytest.raises(ValueError, match=says):
            model.generate(x, **how)
