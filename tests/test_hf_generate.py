"""`model.generate` against transformers': the same tokens, the same distribution, the same shapes."""

import copy

import pytest
import torch
import transformers
from families import TINY
from hf_pairs import each_of, pair_of
from tolerances import GREEDY_MARGIN

import dasllama_torch as dl
from dasllama_torch.hf.options import Options
from dasllama_torch.sampling import candidates, penalize

CASES = ("llama", "qwen3moe", "qwen3vl", "phi3", "gpt-oss", "gemma3", "gemma4_e", "qwen35")


pair, llama = each_of(CASES), pair_of("llama")


def prompts():
    """Three prompts of 9, 6 and 2 tokens, padded on the left with token 0, and their mask."""
    x = torch.randint(5, 250, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(x)
    for row, n in enumerate((0, 3, 7)):
        x[row, :n], mask[row, :n] = 0, 0
    return x, mask


HOW = dict(max_new_tokens=12, pad_token_id=0, eos_token_id=2)


def same_until_a_near_tie(found, wanted, scores) -> bool:
    """Equal tokens up to the first step of a row whose best two are closer than f32 noise. scores: of each step."""
    assert found.shape == wanted.shape
    T = found.shape[1] - len(scores)
    for row in range(len(found)):
        for i, step in enumerate(scores):
            best = step[row].topk(2).values
            if best[0] - best[1] <= GREEDY_MARGIN:
                break
            assert found[row, T + i] == wanted[row, T + i], (row, i)
    return True


def test_greedy(pair):
    """With a penalty; `test_a_batch` has none."""
    model, hf, case = pair
    x, mask = prompts()
    x[:, 0] = torch.where(mask[:, 0] == 0, x[0, 3], x[:, 0])  # padding that is penalized by transformers, or not at all
    how = HOW | dict(attention_mask=mask, repetition_penalty=1.7, do_sample=False)
    found = model.generate(x, **how)
    for row in range(3):  # transformers penalizes padding, so row by row
        real = mask[row].bool()
        how_alone = how | dict(attention_mask=mask[row : row + 1, real])
        wanted = hf.generate(x[row : row + 1, real], **how_alone, return_dict_in_generate=True, output_scores=True)
        alone = model.generate(x[row : row + 1, real], **how_alone)
        n = alone.shape[1]
        assert same_until_a_near_tie(alone, wanted.sequences, wanted.scores)
        assert found[row, int((~real).sum()) :][:n].tolist() == alone[0].tolist()
        assert (found[row, 9:][n - int(real.sum()) :] == 0).all()


def test_a_batch(pair):
    model, hf, _ = pair
    x, mask = prompts()
    wanted = hf.generate(x, attention_mask=mask, **HOW, return_dict_in_generate=True, output_scores=True)
    assert same_until_a_near_tie(model.generate(x, attention_mask=mask, **HOW), wanted.sequences, wanted.scores)


def test_padding_is_told_by_its_token(llama):
    model, hf = llama
    x, mask = prompts()
    assert torch.equal(model.generate(x, **HOW), model.generate(x, attention_mask=mask, **HOW))
    assert torch.equal(model.generate(x, **HOW), hf.generate(x, **HOW))


def test_lengths(llama):
    model, hf = llama
    x, _ = prompts()
    x, ends = x[:1], dict(pad_token_id=0, eos_token_id=2)
    for how in ({}, {"max_length": 14}, {"max_new_tokens": 3, "max_length": 4}):
        assert torch.equal(model.generate(x, **how, **ends), hf.generate(x, **how, **ends)), how
    with pytest.raises(ValueError, match="new tokens"):
        model.generate(x, max_length=9)


def test_ends(llama):
    """A row that has ended is filled up; the batch ends with its last row."""
    model, hf = llama
    x, mask = prompts()
    free = model.generate(x, attention_mask=mask, **HOW)
    ends = [int(free[0, 11]), int(free[1, 13])]
    how = HOW | dict(eos_token_id=ends, attention_mask=mask)
    found = model.generate(x, **how)
    assert torch.equal(found, hf.generate(x, **how))
    assert found[0, 11] == ends[0]
    assert (found[0, 12:] == 0).all()
    assert torch.equal(model.generate(x, **how | dict(eos_token_id=torch.tensor(ends))), found)


def test_sampling_draws_from_the_distribution_of_transformers(llama):
    """The candidates and their probabilities are those of transformers' own processors."""
    model, _ = llama
    x, _ = prompts()
    logits = model(x[:1]).logits[0, -1].detach()
    history = x[0].tolist()
    settings = [
        dict(temperature=0.7),
        dict(top_k=7, temperature=1.3),
        dict(top_p=0.6, top_k=0),
        dict(min_p=0.2, repetition_penalty=1.4),
        dict(top_k=40, top_p=0.8, min_p=0.05, temperature=1.5, repetition_penalty=0.8),
    ]
    for how in settings:
        params = Options.of({"do_sample": True, **how}).sampling()
        ids, probabilities = candidates(penalize(logits, history, params), params)
        process = transformers.LogitsProcessorList()
        if "repetition_penalty" in how:
            process.append(transformers.RepetitionPenaltyLogitsProcessor(how["repetition_penalty"]))
        process.append(transformers.TemperatureLogitsWarper(how.get("temperature", 1.0)))
        if how.get("top_k", 50):
            process.append(transformers.TopKLogitsWarper(how.get("top_k", 50)))
        if "top_p" in how:
            process.append(transformers.TopPLogitsWarper(how["top_p"]))
        if "min_p" in how:
            process.append(transformers.MinPLogitsWarper(how["min_p"]))
        wanted = process(x[:1], logits[None].clone())[0].softmax(-1)
        assert set(ids.tolist()) == set(wanted.nonzero().flatten().tolist()), how
        assert torch.allclose(probabilities.float(), wanted[ids], rtol=1e-4, atol=1e-6)


def test_sampling_repeats_with_the_seed(llama):
    model, _ = llama
    x, mask = prompts()
    how = HOW | dict(attention_mask=mask, do_sample=True, temperature=1.5, num_return_sequences=2)
    torch.manual_seed(3)
    found = model.generate(x, **how)
    assert found.shape[0] == 6
    assert torch.equal(found[::2, :9], x)
    torch.manual_seed(3)
    assert torch.equal(model.generate(x, **how), found)
    assert not torch.equal(model.generate(x, **how), found)
    assert not torch.equal(found[0], found[1])


def test_a_config_of_transformers(llama):
    model, hf = llama
    x, _ = prompts()
    config = transformers.GenerationConfig(max_new_tokens=5, repetition_penalty=1.3, eos_token_id=2, pad_token_id=0)
    wanted = hf.generate(x[:1], generation_config=config)
    assert torch.equal(model.generate(x[:1], generation_config=config), wanted)
    plain = model.generation_config
    assert plain.max_new_tokens is None
    copy.copy(plain).max_new_tokens = 3
    assert plain.to_diff_dict() == {}
    model.generation_config = config
    try:
        assert torch.equal(model.generate(x[:1]), wanted)
        assert model.generate(x[:1], max_new_tokens=2).shape[1] == 11
    finally:
        model.generation_config = plain


def test_processors_criteria_and_streamers(llama):
    model, hf = llama
    x, mask = prompts()

    def even(ids, scores):
        assert ids.shape[0] == scores.shape[0]
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -torch.inf)

    def five(ids, scores, **_):
        return torch.full((ids.shape[0],), ids.shape[1] >= 14)

    how = HOW | dict(attention_mask=mask, logits_processor=[even], stopping_criteria=[five])
    found = model.generate(x, **how)
    assert torch.equal(found, hf.generate(x, **how))
    assert found.shape[1] == 14

    class Streamer:
        def __init__(self):
            self.seen = []

        def put(self, ids):
            self.seen += ids.reshape(-1).tolist()

        def end(self):
            self.seen.append("end")

    ours, theirs = Streamer(), Streamer()
    for root, streamer in ((model, ours), (hf, theirs)):
        root.generate(x[:1], **HOW, streamer=streamer)
    assert ours.seen == theirs.seen


def test_what_is_not_implemented_is_refused_by_name(llama):
    model, _ = llama
    x, _ = prompts()
    with pytest.raises(dl.UnsupportedModel, match="use_cache=False"):
        model.generate(x, use_cache=False)
    with pytest.raises(TypeError, match="'no_repeat_ngram_size' is not implemented"):
        model.generate(x, generation_config=transformers.GenerationConfig(no_repeat_ngram_size=2))
    with pytest.raises(TypeError, match="'max_tokens'"):
        model.generate(x, max_tokens=3)
    with pytest.raises(ValueError, match="temperature is 0"):
        model.generate(x, do_sample=True, temperature=0)
    with pytest.raises(ValueError, match="num_return_sequences is 2"):
        model.generate(x, num_return_sequences=2)
    with pytest.raises(ValueError, match="top_p is 2"):
        model.generate(x, do_sample=True, top_p=2.0)
    with pytest.raises(ValueError, match="without any token"):
        model.generate(x, attention_mask=torch.zeros_like(x))
    with pytest.raises(ValueError, match="wanted ids"):
        model.generate(x.float())
    assert model.generate(x, num_beams=1, use_cache=True, max_new_tokens=1).shape == (3, 10)


def test_nothing_is_left_open(llama):
    model, _ = llama
    x, _ = prompts()
    with dl.create_session(model, "f32") as session:
        before = session.pool.used_bytes
        model.generate(x, **HOW)
        with pytest.raises(ZeroDivisionError):
            model.generate(x, **HOW, logits_processor=[lambda ids, scores: 1 / 0])
        assert session.pool.used_bytes == before


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen35", "gpt-oss"])
def test_a_steering_hook_changes_generate_as_it_changes_a_loop_of_forwards(case, oracle):
    """With the hook in each step of the cache, and in forwards of the whole text without one."""
    model = dl.load_model(oracle / "tiny" / f"{case}.gguf", mode="fp32")
    x, _ = prompts()
    x = x[:1]
    direction = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(7))
    plain = model.generate(x, **HOW)
    hook = model.get_decoder().layers[1].register_forward_hook(lambda module, args, out: out + direction)
    try:
        steered = model.generate(x, **HOW)
        text, near = x, False
        with torch.no_grad():
            for _ in range(12):
                logits = model(text).logits[0, -1]
                best = logits.topk(2).values
                near = near or bool(best[0] - best[1] <= GREEDY_MARGIN * TINY[case])
                text = torch.cat([text, logits.argmax()[None, None]], 1)
                if near or text[0, -1] == 2:
                    break
    finally:
        hook.remove()
    n = text.shape[1] - near
    assert torch.equal(steered[:, :n], text[:, :n])
    assert n > 12
    assert not torch.equal(steered, plain)
    assert torch.equal(model.generate(x, **HOW), plain)
