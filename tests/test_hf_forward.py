"""The forward by transformers' conventions, against transformers: hidden states, attentions, losses, caches."""

import pytest
import torch
from families import TINY
from hf_pairs import CASES, each_of, live_pair, pair_of
from tolerances import FP32_LOGITS

import dasllama_torch as dl

M_ROPE = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")


pair, llama = each_of(CASES), pair_of("llama")


def ids(batch, length, seed=0):
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.std()


def padded(x, side):
    """A mask of x [3, T] with 0, 5 and 30 positions of padding, and the positions that go with it."""
    mask = torch.ones_like(x)
    for row, n in enumerate((0, 5, 30)):
        mask[row, :n] = 0
    mask = mask.flip(1) if side == "right" else mask
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def test_hidden_states_and_attentions(pair):
    model, hf, case = pair
    x = ids(2, 33)
    looks = dict(output_hidden_states=True, output_attentions=True)
    found, wanted = model(x, **looks), hf(input_ids=x, use_cache=False, **looks)
    assert len(found.hidden_states) == len(wanted.hidden_states) == model.config.num_hidden_layers + 1
    for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert_close(a, b, FP32_LOGITS * TINY[case])
    assert len(found.attentions) == len(wanted.attentions)
    for a, b in zip(found.attentions, wanted.attentions, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= FP32_LOGITS * TINY[case]
    assert_close(found.logits, wanted.logits, FP32_LOGITS * TINY[case])
    assert torch.equal(found.logits, model(x).logits)
    assert all(not module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_hidden_states_and_attentions_with_a_cache(pair):
    """A prompt, some tokens, one: windows have moved on by then, and keys of layers that have one are left out."""
    model, hf, case = pair
    x, looks = ids(2, 47), dict(output_hidden_states=True, output_attentions=True)
    ours = theirs = None
    for part in (x[:, :37], x[:, 37:46], x[:, 46:]):
        found = model(part, cache=ours, use_cache=True, logits_to_keep=1, **looks)
        wanted = hf(input_ids=part, cache=theirs, use_cache=True, logits_to_keep=1, **looks)
        ours, theirs = found.cache, wanted.cache
        assert found.keys() == list(wanted.keys())
        assert_close(found.logits, wanted.logits, FP32_LOGITS * TINY[case])
        for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True):
            assert_close(a, b, FP32_LOGITS * TINY[case])
        for a, b in zip(found.attentions, wanted.attentions, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= FP32_LOGITS * TINY[case]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt-oss"])
def test_attentions_of_a_padded_batch_with_a_cache(case, oracle):
    """Columns of padding stay where they are, whatever comes behind them."""
    model, hf = live_pair(oracle, case)
    x = ids(3, 44)
    mask, positions = padded(x, "left")
    if case == "llama":
        mask[1, 39:41] = 0  # a row that gets less; windows of transformers would count this as tokens
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ours = theirs = None
    for start, stop in ((0, 37), (37, 43), (43, 44)):
        given = dict(attention_mask=mask[:, :stop], output_attentions=True, use_cache=True)
        found = model(x[:, start:stop], cache=ours, **given)
        wanted = hf(x[:, start:stop], cache=theirs, position_ids=positions[:, start:stop], **given)
        ours, theirs = found.cache, wanted.cache
        real = mask[:, start:stop].bool()
        for a, b in zip(found.attentions, wanted.attentions, strict=True):
            assert a.shape == b.shape
            assert (a - b).movedim(2, 1)[real].abs().max() <= FP32_LOGITS
            assert not a.movedim(2, 1)[~real].any()


@torch.no_grad()
def test_attentions_of_a_window_with_padding_in_it(oracle):
    """It shows as many tokens as without, and the columns reach back to them."""
    model = dl.load_model(oracle / "tiny" / "gemma3.gguf", mode="fp32")
    x, mask = ids(1, 44), torch.ones(1, 44)
    mask[:, 37:43] = 0
    cache = model(x[:, :43], attention_mask=mask[:, :43], use_cache=True).cache
    found = model(x[:, 43:], cache=cache, output_attentions=True).attentions
    alone = model(x[mask.bool()][None], output_attentions=True).attentions
    for a, b in zip(found, alone, strict=True):
        columns = mask[0, 44 - a.shape[-1] :].bool()
        assert (a[0, :, 0, columns] - b[0, :, -1, -int(columns.sum()) :]).abs().max() <= FP32_LOGITS
        assert a.sum(-1).allclose(torch.ones(()))


@torch.no_grad()
def test_attentions_over_sessions(llama):
    """Sessions of several lengths are as rows that are padded on the left; windows of a long prompt do not show."""
    model, _ = llama
    x = ids(2, 600)
    with (
        dl.create_session(model, "f32", n_ctx=601) as a,
        dl.create_session(model, "f32", n_ctx=601) as b,
    ):
        a.eval(x[0, :40].tolist())
        b.eval(x[1, :25].tolist())
        a.pending = [int(x[0, 40])]  # as `Session.generate` leaves it
        found = model(torch.stack([x[0, 41:600], x[1, 25:584]]), cache=[a, b], output_attentions=True)
        for layer, wanted in zip(found.attentions, model(x, output_attentions=True).attentions, strict=True):
            assert layer.shape == (2, 4, 559, 600)
            assert (layer[0] - wanted[0, :, 41:]).abs().max() <= FP32_LOGITS
            assert (layer[1, :, :, 16:] - wanted[1, :, 25:584, :584]).abs().max() <= FP32_LOGITS
            assert not layer[1, :, :, :16].any()
    with dl.create_session(model, "f32", n_ctx=16, on_full="shift") as a:
        a.eval(x[0, :12].tolist())
        with pytest.raises(ValueError, match="would shift tokens away"):
            model(x[:1, :9], cache=a, output_attentions=True)
        assert a.n_past == 12
    cache = model(x[:1, :9], use_cache=True).cache
    cache.sessions[0].eval([3, 4])
    with pytest.raises(ValueError, match="holds 11 tokens, and the cache has seen 9"):
        model(x[:1, :9], cache=cache, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_with_a_cache_is_what_each_row_is_alone(pair, side):
    model, hf, case = pair
    x, more = ids(3, 37), ids(3, 4, seed=1)
    mask, positions = padded(x, side)
    out = model(x, attention_mask=mask, position_ids=positions, use_cache=True)
    full = torch.cat([mask, torch.ones_like(more)], 1)
    again = model(more, attention_mask=full, cache=out.cache, logits_to_keep=1)
    assert again.past_key_values is out.cache
    assert out.cache.get_seq_length() == 41
    for row in range(3):
        real = mask[row].bool()
        alone = torch.cat([x[row, real], more[row]])[None]
        wanted = hf(input_ids=alone).logits[0]
        assert_close(out.logits[row, real], wanted[: int(real.sum())], FP32_LOGITS * TINY[case])
        assert_close(again.logits[row, -1], wanted[-1], FP32_LOGITS * TINY[case])


@torch.no_grad()
def test_attentions_of_a_padded_batch(llama):
    model, hf = llama
    x = ids(3, 37)
    for side in ("left", "right"):
        mask, positions = padded(x, side)
        given = dict(attention_mask=mask, position_ids=positions, output_attentions=True)
        for a, b in zip(model(x, **given).attentions, hf(x, **given).attentions, strict=True):
            real = mask.bool()[:, None, :, None].expand_as(a)
            assert (a - b)[real].abs().max() <= FP32_LOGITS
            assert not a[~real].any()


@torch.no_grad()
def test_steps_with_a_cache(llama):
    """Ids, embeddings and single tokens one after the other, as one forward of all."""
    model, hf = llama
    x = ids(2, 30)
    embeds = model.get_input_embeddings()(x)
    wanted = hf(x, output_hidden_states=True)
    first = model(x[:, :13], use_cache=True, output_hidden_states=True)
    second = model(inputs_embeds=embeds[:, 13:20], cache=first.cache)
    third = model(x[:, 20:], past_key_values=second.cache, output_hidden_states=True)
    found = torch.cat([first.logits, second.logits, third.logits], 1)
    assert_close(found, wanted.logits)
    for a, b, c in zip(first.hidden_states, third.hidden_states, wanted.hidden_states, strict=True):
        assert_close(a, c[:, :13])
        assert_close(b, c[:, 20:])


@torch.no_grad()
def test_a_row_that_gets_nothing_stays_where_it_is(llama):
    model, _ = llama
    x, more = ids(2, 9), ids(2, 3, seed=1)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    cache = model(x, use_cache=True).cache
    for keep in (0, 1):
        out = model(more, cache=cache, attention_mask=mask, logits_to_keep=keep, output_hidden_states=not keep)
        assert out.logits.shape == (2, 1 if keep else 3, 256)
        assert not out.logits[1].any()
    assert [session.n_past for session in cache.sessions] == [15, 9]
    assert_close(model(more[1:], cache=cache.sessions[1]).logits, model(torch.cat([x, more], 1)).logits[1:, 9:])
    nobody = model(more, cache=cache, attention_mask=mask * 0, logits_to_keep=1)
    assert nobody.logits.shape == (2, 1, 256)


@torch.no_grad()
def test_sessions_as_a_cache(llama):
    model, _ = llama
    x = ids(2, 30)
    wanted = model(x).logits
    with dl.create_session(model, "f32") as a, dl.create_session(model, "f32") as b:
        out = model(x, cache=[a, b])
        assert out.cache == [a, b]
        assert_close(out.logits, wanted)
        assert a.tokens == x[0].tolist()
        one = model(x[:1, :3], cache=a)
        assert one.cache is a
        assert_close(one.logits, model(torch.cat([x[:1], x[:1, :3]], 1)).logits[:, -3:])
        with pytest.raises(ValueError, match="2 sessions, wanted one for each of the 1 rows"):
            model(x[:1], cache=[a, b])
        with pytest.raises(ValueError, match="position_ids of row 0 begin"):
            model(x[:1], cache=a, position_ids=torch.arange(30)[None])
        with pytest.raises(ValueError, match="attention_mask has shape"):
            model(x[:1], cache=a, attention_mask=torch.ones(1, 63))
        with pytest.raises(ValueError, match="cache is a dict"):
            model(x[:1], cache={})


@torch.no_grad()
def test_a_long_prompt_goes_through_in_windows(llama):
    """More rows than one forward of the engine has."""
    model, hf = llama
    x = ids(1, 700)
    out = model(x, use_cache=True, output_hidden_states=True)
    wanted = hf(x, output_hidden_states=True)
    assert_close(out.logits, wanted.logits)
    assert_close(out.hidden_states[1], wanted.hidden_states[1])


@torch.no_grad()
def test_logits_to_keep(llama):
    model, hf = llama
    x = ids(3, 12)
    mask = ids(3, 12, seed=2) > 100
    for keep in (0, 1, 5, torch.tensor([0, 7, 3]), torch.tensor([[1, 2], [0, 11], [5, 5]]), mask):
        wanted = hf(x, logits_to_keep=keep).logits
        assert_close(model(x, logits_to_keep=keep).logits, wanted)
        assert_close(model(x, logits_to_keep=keep, use_cache=True).logits, wanted)


def test_loss(llama):
    model, hf = llama
    x = ids(2, 21)
    labels = torch.where(x > 60, x, -100)
    embeds = hf.get_input_embeddings()(x).detach().requires_grad_()
    losses = [root(inputs_embeds=embeds, labels=labels).loss for root in (model, hf)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, embeds)[0] for loss in losses]
    assert_close(*gradients)
    with pytest.raises(ValueError, match="labels have shape"):
        model(x, labels=labels[:, 1:])


@torch.no_grad()
def test_outputs_read_as_those_of_transformers(llama):
    model, hf = llama
    x = ids(2, 9)
    for looks in ({}, {"output_hidden_states": True}, {"output_hidden_states": True, "output_attentions": True}):
        found, wanted = model(x, **looks), hf(x, use_cache=False, **looks)
        assert list(found.keys()) == list(wanted.keys()) == list(found)
        assert len(found.to_tuple()) == len(wanted.to_tuple()) == len(found)
        assert found["logits"] is found.logits is found[0]
        assert "loss" not in found
        assert found.get("loss", 3) == 3
        assert dict(found.items()).keys() == dict(wanted.items()).keys()
        assert torch.equal(model(x, **looks, return_dict=False)[0], found.logits)
    with pytest.raises(KeyError):
        found["loss"]
    some = model(x, output_hidden_states=[0, -1]).hidden_states
    assert [state is not None for state in some] == [True, False, True]
    wanted = hf(x, output_hidden_states=[0, -1]).hidden_states
    assert [state is None for state in wanted] == [state is None for state in some]
    assert_close(some[-1], wanted[-1])


@torch.no_grad()
@torch.no_grad()
def test_a_forward_is_exported(llama):
    """As a graph of our ops, for any length."""
    model, x = llama[0], ids(2, 9)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=512)},))
    for other in (ids(2, 9, 1), ids(2, 31, 2)):
        found = exported.module()(other)
        assert isinstance(found, type(model(other)))
        assert torch.equal(found.logits, model(other).logits)
    targets = {str(node.target) for node in exported.graph.nodes}
    assert "dasllama.quant_linear.default" in targets


def test_hooks_of_others_show_in_the_hidden_states(llama):
    """What a hook has put in a tensor's place is what shows, and what goes on."""
    model, hf = llama
    x = ids(1, 9)
    plain = model(x, output_hidden_states=True).hidden_states
    hooks = [root.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5) for root in llama]
    found, wanted = (root(x, output_hidden_states=True).hidden_states for root in (model, hf))
    for hook in hooks:
        hook.remove()
    assert torch.equal(found[1], plain[1] * 1.5)
    assert_close(found[-1], wanted[-1])


def test_what_tools_ask_a_model(pair):
    model, hf, case = pair
    assert model.get_input_embeddings() is model.get_decoder().embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert (model.lm_head.in_features, model.lm_head.out_features) == (model.config.hidden_size, 256)
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert model.can_generate()
    assert model.main_input_name == hf.main_input_name
    config = hf.config.get_text_config()
    for name, value in model.config.to_dict().items():
        if name not in ("use_cache", "num_key_value_heads", "head_dim", "intermediate_size", "model_type"):
            assert getattr(config, name) == pytest.approx(value), name
    assert model.config.model_type in (config.model_type, "llama")
    if "vl" not in case:  # a tower
        for how in ({}, {"exclude_embeddings": True}):
            assert model.num_parameters(**how) == hf.num_parameters(**how)
    assert model.num_parameters(only_trainable=True) == 0


def test_refusals(llama):
    model, _ = llama
    with pytest.raises(TypeError, match="output_router_logits"):
        model(ids(1, 3), output_router_logits=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="rank 1"):
        model(ids(1, 3)[0])
    with dl.create_session(model) as session, pytest.raises(ValueError, match="one argument"):
        model(ids(1, 3), cache=session, past_key_values=session)
