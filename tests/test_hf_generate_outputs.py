"""What `generate` hands out beside the ids, and what it begins with beside ids, against transformers'."""

import pytest
import torch
import transformers
from families import TINY
from hf_pairs import each_of, pair_of
from test_hf_generate import CASES, HOW, prompts
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.hf.cache import SessionCache

ALL = dict(
    return_dict_in_generate=True,
    output_scores=True,
    output_logits=True,
    output_hidden_states=True,
    output_attentions=True,
)


pair, llama = each_of(CASES), pair_of("llama")


def assert_close(found, wanted, times=1):
    """Tensors, or tuples of them however deep."""
    if isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, times)
        return
    assert found.shape == wanted.shape
    assert torch.equal(found.isinf(), wanted.isinf())
    finite = wanted.isfinite()
    assert (found - wanted)[finite].abs().max() <= times * FP32_LOGITS * max(wanted[finite].std(), 1)


def real_rows(step, mask, i):
    """The rows of a step's hidden states or attentions that are no padding."""
    return tuple(each.movedim(-2, 1)[mask.bool()] if i == 0 else each for each in step)


def test_what_is_kept_of_each_step(pair):
    """Windows have moved on by the end: W is 8 to 16 in these models."""
    model, hf, case = pair
    x, mask = prompts()
    how = HOW | ALL | dict(attention_mask=mask, repetition_penalty=1.3, eos_token_id=255)
    found, wanted = model.generate(x, **how), hf.generate(x, **how)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.keys() == list(wanted.keys())
    assert not (found.sequences == 255).any()
    times = TINY[case]
    assert_close(found.scores, wanted.scores, times)
    assert_close(found.logits, wanted.logits, times)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(wanted[name])
        for i, (a, b) in enumerate(zip(found[name], wanted[name], strict=True)):
            assert [each.shape for each in a] == [each.shape for each in b]
            assert_close(real_rows(a, mask, i), real_rows(b, mask, i), times)


def test_a_row_that_has_ended_has_zeros(llama):
    model, _ = llama
    x, mask = prompts()
    free = model.generate(x, attention_mask=mask, **HOW)
    how = HOW | ALL | dict(attention_mask=mask, eos_token_id=int(free[1, 12]))
    found = model.generate(x, **how)
    assert found.sequences.shape == free.shape
    for i in range(12):
        for each in (found.scores[i], found.logits[i], found.hidden_states[i][1], found.attentions[i][0]):
            assert each[0].any()
            assert bool(each[1].any()) == (i < 4)


def test_scores_of_samples_are_those_of_transformers_warpers(llama):
    model, _ = llama
    x, mask = prompts()
    warpers = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    how = HOW | ALL | warpers | dict(attention_mask=mask, do_sample=True, num_return_sequences=2)
    torch.manual_seed(1)
    found = model.generate(x, **how)
    torch.manual_seed(1)
    assert torch.equal(model.generate(x, **HOW | warpers, do_sample=True, num_return_sequences=2, attention_mask=mask),
                       found.sequences)  # fmt: skip
    process = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(40),
            transformers.TopPLogitsWarper(0.9),
            transformers.MinPLogitsWarper(0.02),
        ]
    )
    for logits, scores in zip(found.logits, found.scores, strict=True):
        assert logits.shape == (6, 256)
        assert_close(scores, process(None, logits))
    assert len(found.cache.sessions) == 6


def test_only_what_is_asked_for(llama):
    model, hf = llama
    x, _ = prompts()
    assert isinstance(model.generate(x[:1], **HOW, output_scores=True), torch.Tensor)  # as in transformers
    found, wanted = (root.generate(x[:1], **HOW, return_dict_in_generate=True) for root in (model, hf))
    assert found.keys() == list(wanted.keys()) == ["sequences", "cache"]
    assert found.past_key_values is found.cache is found["cache"] is found[1]


def test_going_on_from_the_cache(llama):
    """It lacks the last token only."""
    model, _ = llama
    x, mask = prompts()
    out = model.generate(x, attention_mask=mask, **HOW | dict(max_new_tokens=5), return_dict_in_generate=True)
    assert out.cache.get_seq_length() == 13
    more = model(out.sequences[:, -1:], cache=out.cache, output_attentions=True)
    assert more.attentions[0].shape[-1] == 14
    wanted = model.generate(x, attention_mask=mask, **HOW | dict(max_new_tokens=6))
    assert torch.equal(more.logits[:, -1].argmax(-1), wanted[:, -1])


def test_embeddings(pair):
    """Alone, and in the place of ids, which the result then begins with."""
    model, hf, case = pair
    if case == "gemma4_e":
        pytest.skip("its layers look tokens up, and transformers finds them by their embeddings")
    x, mask = prompts()
    embeds = model.get_input_embeddings()(x)
    how = HOW | dict(attention_mask=mask, inputs_embeds=embeds)
    assert torch.equal(model.generate(**how), hf.generate(**how))
    assert model.generate(**how).shape == (3, 12)
    assert torch.equal(model.generate(x, **how), hf.generate(x, **how))
    assert torch.equal(model.generate(input_ids=x, **how)[:, :9], x)
    # Not of a padded row: transformers takes as many new tokens for padding as there is.
    how = HOW | dict(inputs_embeds=embeds[:1], repetition_penalty=1.2)
    assert torch.equal(model.generate(**how), hf.generate(**how))
    assert torch.equal(model.generate(x[:1], **how), hf.generate(x[:1], **how))


def test_lengths_of_embeddings(llama):
    model, hf = llama
    x, _ = prompts()
    embeds = model.get_input_embeddings()(x[:1])
    for how in ({"max_length": 14}, {"max_new_tokens": 3}, {}):
        for ids in ({}, {"input_ids": x[:1]}):
            how = how | ids | dict(inputs_embeds=embeds, pad_token_id=0, eos_token_id=2)
            assert model.generate(**how).shape == hf.generate(**how).shape


def test_refusals_of_embeddings(llama):
    model, _ = llama
    x, mask = prompts()
    embeds = model.get_input_embeddings()(x)
    with pytest.raises(ValueError, match="inputs_embeds are torch.int64"):
        model.generate(inputs_embeds=x)
    with pytest.raises(ValueError, match=r"inputs are \[1, 9\] beside inputs_embeds, wanted \[3, 9\]"):
        model.generate(x[:1], inputs_embeds=embeds)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[3, 8\], wanted \[3, 9\]"):
        model.generate(inputs_embeds=embeds, attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="wanted inputs"):
        model.generate()


@torch.no_grad()
def test_rows_of_a_cache_are_chosen_and_repeated(llama):
    model, _ = llama
    x = prompts()[0][:, :4] + 1
    token = torch.tensor([[7], [8], [9], [7]])
    cache = model(x, use_cache=True).cache
    with dl.create_session(model, "f32") as session:
        before = session.pool.used_bytes
        cache.reorder_cache(torch.tensor([2, 0, 2, 2]))
        assert session.pool.used_bytes < before  # row 1 was given back
        found = model(token, cache=cache).logits
        wanted = model(torch.cat([x[[2, 0, 2, 2]], token], 1)).logits[:, -1:]
        assert_close(found, wanted)
        cache.batch_repeat_interleave(2)
        assert_close(model(token.repeat_interleave(2, 0), cache=cache).logits[::2, 0],
                     model(torch.cat([x[[2, 0, 2, 2]], token, token], 1)).logits[:, -1])  # fmt: skip
        cache.close()
        assert session.pool.used_bytes == 0
    assert repr(SessionCache([])) == "SessionCache(0 sessions, 0 positions)"
