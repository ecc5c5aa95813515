"""A published model through the calls of transformers, against transformers with its dequantized weights."""

import pytest
import torch
import transformers
from hf_pairs import hf_weights
from tolerances import FP32_LOGITS, REAL_GREEDY_MARGIN

import dasllama_torch as dl

TEXTS = ["The old lighthouse keeper began to write down everything he remembered about the storm.", "A cat sat"]


@pytest.fixture(scope="module")
def pair(demo_model):
    """SmolLM2 of ours in fp32 mode, and transformers' Llama with its weights."""
    model = dl.AutoModelForCausalLM.from_pretrained(demo_model, mode="fp32")
    c, rope = model.config, model.config.layers[0].rope
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.max_position_embeddings, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
    )  # fmt: skip
    with torch.device("meta"):
        hf = transformers.LlamaForCausalLM(config)
    hf.to_empty(device="cpu")
    hf.load_state_dict(hf_weights(model))
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config)  # its buffers are in no state dict
    return model, hf.eval()


@pytest.fixture(scope="module")
def batch(pair):
    return dl.hf_tokenizer(pair[0])(TEXTS, return_tensors="pt", padding=True)


def assert_close(found, wanted):
    """Relative to the spread at each position, and to values far beyond it: the first token's are up to a thousand
    times as large as the others'."""
    assert found.shape == wanted.shape
    found, wanted = found.flatten(1), wanted.flatten(1)
    bound = FP32_LOGITS * torch.maximum(wanted.std(1, keepdim=True), wanted.abs())
    assert ((found - wanted).abs() <= bound).all()


@torch.no_grad()
def test_hidden_states_attentions_and_logits(pair, batch):
    model, hf = pair
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel()
    looks = dict(output_hidden_states=True, output_attentions=True)
    found, wanted = model(**batch, **looks), hf(**batch, **looks)
    real = batch["attention_mask"].bool()
    for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert_close(a[real], b[real])
    for a, b in zip(found.attentions, wanted.attentions, strict=True):
        assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
    assert_close(found.logits[real], wanted.logits[real])


def test_generate(pair, batch):
    model, hf = pair
    how = dict(max_new_tokens=12, pad_token_id=0, eos_token_id=2, do_sample=False)
    wanted = hf.generate(**batch, **how, return_dict_in_generate=True, output_scores=True)
    found, T = model.generate(**batch, **how), batch["input_ids"].shape[1]
    for row in range(len(found)):
        best = torch.stack([scores[row].topk(2).values for scores in wanted.scores])
        near = (best[:, 0] - best[:, 1] <= REAL_GREEDY_MARGIN).tolist()
        clear = T + (near.index(True) if True in near else len(near))
        assert torch.equal(found[row, :clear], wanted.sequences[row, :clear])


def test_a_pipeline_of_transformers(pair):
    model, _ = pair
    tokenizer = dl.hf_tokenizer(model)
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (found,) = write(TEXTS[1], max_new_tokens=8, do_sample=False)
    ids = model.generate(**tokenizer(TEXTS[1], return_tensors="pt"), max_new_tokens=8)
    assert found["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(found["generated_text"]) > len(TEXTS[1])
