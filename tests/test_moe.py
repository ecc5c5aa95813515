"""Mixtures of experts as modules and as files: which tensor goes where, what is shared, what is refused or left."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tolerances import ACTIVATION

import dasllama_torch as dl
from dasllama_torch.config import MoESpec
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import StateDictSource
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.modules.moe import ExpertLinear, Experts, SharedExpertMoeBlock, SparseMoeBlock
from dasllama_torch.modules.requantized import RequantizedSource
from dasllama_torch.ops import ggml_types

C, WIDTH, SHARED, E = 8, 4, 6, 4
SPEC = MoESpec(n_experts=E, n_used=2, width=WIDTH, gate="softmax", renormalize=True, shared_width=SHARED)


def weights(**more):
    torch.manual_seed(0)
    return {
        "ffn_gate_inp.weight": torch.randn(E, C), "ffn_gate_exps.weight": torch.randn(E, WIDTH, C),
        "ffn_up_exps.weight": torch.randn(E, WIDTH, C), "ffn_down_exps.weight": torch.randn(E, C, WIDTH),
        "ffn_gate_inp_shexp.weight": torch.randn(C), "ffn_gate_shexp.weight": torch.randn(SHARED, C),
        "ffn_up_shexp.weight": torch.randn(SHARED, C), "ffn_down_shexp.weight": torch.randn(C, SHARED),
    } | more  # fmt: skip


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=20 * ACTIVATION, atol=20 * ACTIVATION)


def test_an_id_names_its_slice_of_the_stacks():
    stacks = {f"ffn_{name}_exps.weight": torch.ones(E, WIDTH, C) for name in ("gate", "up")}
    stacks["ffn_down_exps.weight"] = torch.arange(E).float().view(E, 1, 1).expand(E, C, WIDTH).contiguous()
    experts = Experts(StateDictSource(stacks), C, SPEC, "silu")
    x = torch.full((E, C), 0.1)
    one = torch.nn.functional.silu(torch.tensor(0.8)) * 0.8 * WIDTH  # what an expert of weight 1 gives
    y = experts(x, torch.arange(E).unsqueeze(1), torch.ones(E, 1))
    assert_close(y, one * torch.arange(E).unsqueeze(1).expand(E, C))
    # Slots of one token: each with its own expert and weight.
    y = experts(x[:1], torch.tensor([[3, 1]]), torch.tensor([[0.25, 2.0]]))
    assert_close(y, one * (3 * 0.25 + 1 * 2.0) * torch.ones(1, C))


def test_fused_and_separate_stacks_are_the_same():
    w = weights()
    separate = Experts(StateDictSource(w), C, SPEC, "gelu_tanh")
    w["ffn_gate_up_exps.weight"] = torch.cat([w.pop("ffn_gate_exps.weight"), w.pop("ffn_up_exps.weight")], 1)
    source = StateDictSource(w)
    fused = Experts(source, C, SPEC, "gelu_tanh")
    assert [name for name, _ in fused.named_children()] == ["gate_up_proj", "down_proj"]
    x, ids, by = torch.randn(5, C), torch.tensor([[0, 3], [1, 2], [3, 2], [2, 0], [1, 3]]), torch.rand(5, 2)
    assert torch.equal(fused(x, ids, by), separate(x, ids, by))


def test_the_shared_expert_is_added_once_times_its_gate():
    w = weights()
    w["ffn_down_exps.weight"] = torch.zeros(E, C, WIDTH)
    block = SharedExpertMoeBlock(StateDictSource(w), C, SPEC)
    x = torch.randn(2, 3, C)
    hidden = torch.nn.functional.silu(x @ w["ffn_gate_shexp.weight"].T) * (x @ w["ffn_up_shexp.weight"].T)
    gate = torch.sigmoid(x @ w["ffn_gate_inp_shexp.weight"]).unsqueeze(-1)
    wanted = gate * (hidden @ w["ffn_down_shexp.weight"].T)
    assert wanted.abs().min() > 0
    assert_close(block(x), wanted)


def test_routed_experts_are_added_to_the_shared_one():
    source = StateDictSource(weights())
    x = torch.randn(2, 3, C)
    routed, both = SparseMoeBlock(source, C, SPEC)(x), SharedExpertMoeBlock(source, C, SPEC)
    silent = SharedExpertMoeBlock(
        StateDictSource(weights(**{"ffn_down_exps.weight": torch.zeros(E, C, WIDTH)})), C, SPEC
    )
    assert torch.equal(both(x), routed + silent(x))


def test_a_gate_may_be_stored_as_a_row_or_a_matrix():
    """The converter writes [1, C]; llama-quantize drops the dimension of 1."""
    w = weights()
    x = torch.randn(3, C)
    as_row = SharedExpertMoeBlock(StateDictSource(w), C, SPEC)(x)
    w["ffn_gate_inp_shexp.weight"] = w["ffn_gate_inp_shexp.weight"].view(1, C)
    assert torch.equal(SharedExpertMoeBlock(StateDictSource(w), C, SPEC)(x), as_row)


@pytest.mark.parametrize("qtype", [ggml_types.Q8_0, ggml_types.Q4_0])
def test_requantized_stacks(qtype):
    """Every expert's matrix as gguf-py quantizes it; routers and gates stay f32."""
    spec = MoESpec(n_experts=3, n_used=2, width=32, gate="softmax", renormalize=True, shared_width=64)
    plain = SharedExpertMoeBlock(RandomSource(0, ggml_types.Q5_1), 64, spec)
    made = SharedExpertMoeBlock(RequantizedSource(RandomSource(0, ggml_types.Q5_1), qtype), 64, spec)
    seen = 0
    for module, parent in zip(made.modules(), plain.modules(), strict=True):
        if isinstance(module, ExpertLinear):
            assert module.qtype == qtype
            for one, wanted in zip(module.qweight, parent.weight, strict=True):
                packed = gguf.quants.quantize(wanted.numpy(), GGMLQuantizationType(qtype))
                assert np.array_equal(one.numpy(), packed)
            seen += 1
    assert seen == 3
    assert torch.equal(made.gate.weight, plain.gate.weight)
    assert torch.equal(made.shared_expert_gate.weight, plain.shared_expert_gate.weight)
    x = torch.randn(4, 64)
    assert made(x).isfinite().all()


def test_half_keeps_routers_in_f32(oracle):
    model = dl.load_model(oracle / "tiny" / "glm4moe.gguf").half()
    gate = model.model.layers[1].mlp.gate
    assert (gate.weight.dtype, gate.e_score_correction_bias.dtype) == (torch.float32, torch.float32)


# ---- files ----------------------------------------------------------------------------------------------------------


def rewritten(oracle, tmp_path, name, keys, more):
    """A golden file with other keys, and more tensors: a name's tensor under another name, or as many zeros."""
    file = GGUFFile(oracle / "tiny" / f"{name}.gguf")
    arch = file.metadata.architecture
    metadata = {key: file.metadata.typed(key) for key in file.metadata} | {f"{arch}.{k}": v for k, v in keys.items()}
    tensors = {tensor.name: (tensor.data, tensor.qtype) for tensor in file.tensors.values()}
    for new, old in more.items():
        tensors[new] = tensors[old] if isinstance(old, str) else (np.zeros(old, np.float32), ggml_types.F32)
    write_gguf(tmp_path / "made.gguf", arch, metadata, tensors)
    return tmp_path / "made.gguf"


def test_a_block_that_drafts_tokens_is_left_with_a_warning(oracle, tmp_path):
    names = GGUFFile(oracle / "tiny" / "glm4moe.gguf").tensors
    block = {name.replace("blk.2.", "blk.3."): name for name in names if name.startswith("blk.2.")}
    block |= {"blk.3.nextn.eh_proj.weight": (64, 128), "blk.3.nextn.embed_tokens.weight": "token_embd.weight"}
    block |= {f"blk.3.nextn.{name}.weight": (64,) for name in ("enorm", "hnorm", "shared_head_norm")}
    path = rewritten(oracle, tmp_path, "glm4moe", {"block_count": 4, "nextn_predict_layers": 1}, block)
    with pytest.warns(
        UserWarning, match=r"made.gguf: 1 NextN block\(s\) for drafting tokens are not used yet"
    ) as caught:
        model = dl.load_model(path, mode="fp32")
    assert caught[0].filename == __file__
    assert len(model.model.layers) == len(model.config.layers) == 3
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        wanted = dl.load_model(oracle / "tiny" / "glm4moe.gguf", mode="fp32")(ids).logits
        assert torch.equal(model(ids).logits, wanted)


def test_blocks_that_draft_tokens_cannot_be_all(oracle, tmp_path):
    path = rewritten(oracle, tmp_path, "glm4moe", {"nextn_predict_layers": 3}, {})
    with pytest.raises(dl.GGUFError, match="nextn_predict_layers"):
        dl.load_model(path)
    path = rewritten(oracle, tmp_path, "glm4moe", {}, {"blk.3.nextn.enorm.weight": (64,)})
    with pytest.raises(dl.UnsupportedModel, match=r"does not use tensor 'blk.3.nextn.enorm.weight'"):
        dl.load_model(path)


@pytest.mark.parametrize(
    ("name", "keys", "more", "named"),
    [
        ("qwen3moe", {}, {"blk.0.ffn_up_shexp.weight": (32, 64)}, "tensor 'blk.0.ffn_up_shexp.weight'"),
        ("qwen3moe", {"expert_shared_count": np.uint32(1)}, {}, "key 'qwen3moe.expert_shared_count'"),
        ("qwen3moe", {}, {"blk.1.exp_probs_b.bias": (6,)}, "tensor 'blk.1.exp_probs_b.bias'"),
        ("qwen3moe", {}, {"blk.0.ffn_gate_exps.bias": (6, 24)}, "tensor 'blk.0.ffn_gate_exps.bias'"),
        ("glm4moe", {"expert_group_count": np.uint32(4)}, {}, "key 'glm4moe.expert_group_count' is u32 4"),
        ("glm4moe", {"attention.kv_lora_rank": np.uint32(64)}, {}, "key 'glm4moe.attention.kv_lora_rank'"),
        ("gpt-oss", {"swiglu_clamp_exp": np.float32(7)}, {}, "key 'gpt-oss.swiglu_clamp_exp'"),
    ],
)  # fmt: skip
def test_what_a_family_lacks_is_refused_by_name(oracle, tmp_path, name, keys, more, named):
    path = rewritten(oracle, tmp_path, name, keys, more)
    with pytest.raises(dl.UnsupportedModel) as caught:
        dl.load_model(path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("qwen3moe", {"expert_count": 7}, "'blk.0.ffn_gate_inp.weight' has shape [6, 64], wanted [7, 64]"),
        ("qwen3moe", {"expert_count": 0}, "'blk.0.ffn_gate.weight' is missing"),
        ("qwen3moe", {"expert_feed_forward_length": 25}, "'blk.0.ffn_gate_exps.weight' has shape [6, 24, 64]"),
        ("qwen2moe", {"expert_shared_feed_forward_length": 31}, "'blk.0.ffn_gate_shexp.weight' has shape [32, 64]"),
        ("glm4moe", {"leading_dense_block_count": 2}, "'blk.1.ffn_gate.weight' is missing"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_the_tensors_are_refused(oracle, tmp_path, name, keys, named):
    path = rewritten(oracle, tmp_path, name, keys, {})
    with pytest.raises(dl.GGUFError) as caught:
        dl.load_model(path)
    assert named in str(caught.value)


def test_gpt_oss_layers():
    keys = {
        "block_count": 4, "context_length": 131072, "embedding_length": 64, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    }  # fmt: skip
    values = {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": value for key, value in keys.items()}

    class Source(RandomSource):
        def rows(self, name):
            return 300

    cfg = dl.build_model(Metadata(values, "made.gguf"), Source(0)).config
    assert [layer.window for layer in cfg.layers] == [128, 0, 128, 0]
    rope = cfg.layers[0].rope
    assert not rope.yarn.truncate
    assert rope.attention_factor == pytest.approx(1.346574, rel=1e-6)
    # The ramp of gpt-oss-20b lies between pairs 8.0928 and 17.398: within it, frequencies are neither kept nor divided.
    plain = rope.theta ** (-torch.arange(32) / 32)
    kept = (rope.inv_freq() / plain - 1 / 32) / (1 - 1 / 32)
    wanted = 1 - ((torch.arange(32) - 8.0928) / (17.398 - 8.0928)).clamp(0, 1)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-4)
