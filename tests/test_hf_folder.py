"""Folders of transformers, written by `save_pretrained`: the same logits, and refusals that name what is wrong."""

import json

import hf_twin
import pytest
import torch
from families import TINY
from hf_pairs import CASES, live_pair
from safetensors.torch import load_file, save_file
from tolerances import FP32_LOGITS

import dasllama_torch as dl
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.hf.config import gguf_facts

# Keys in which folder and file may differ, as nothing of a forward is in them or both say the same otherwise.
ELSEWHERE = (
    "full_attention_interval",  # attention.recurrent_layers says it
    "n_deepstack_layers",  # of the tower
    "nextn_predict_layers",
    "rope.scaling.yarn_log_multiplier",  # in attn_factor
    "rope.scaling.attn_factor",
    "rope.dimension_count",  # all of a head
    "rope.dimension_count_swa",
    "attention.key_length",  # hidden / heads
    "attention.value_length",
    "attention.head_count_kv",  # one for all layers, or one for each
    "feed_forward_length",
    "expert_weights_norm",  # the family's own
    "expert_gating_func",
    "expert_shared_count",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.original_context_length",
    "attention.sliding_window",  # 0 for none
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


@pytest.fixture(scope="module", params=CASES)
def saved(request, oracle, tmp_path_factory):
    """Our model, transformers' with the same weights, the case, and a folder that holds it."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    model, hf = live_pair(oracle, request.param)
    hf.save_pretrained(folder)
    return model, hf, request.param, folder


def ids(n=40):
    return torch.randint(0, 250, (2, n), generator=torch.Generator().manual_seed(0))


def assert_close(found, wanted, tolerance=FP32_LOGITS):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.std()


@torch.no_grad()
def test_a_folder_gives_the_logits_of_transformers(saved):
    model, hf, case, folder = saved
    loaded = dl.load_model(folder, mode="fp32")
    assert type(loaded) is type(model)
    x = ids()
    assert_close(loaded(x).logits, hf(input_ids=x).logits, FP32_LOGITS * TINY[case])
    assert loaded.name_or_path == str(folder)
    with dl.create_session(loaded, kv_dtype="f32") as session:
        assert_close(session.eval(x[0].tolist()), loaded(x).logits[0, -1])


def test_the_config_says_what_the_file_says(saved, oracle):
    model, hf, case, _ = saved
    values, _ = gguf_facts(hf.config, "config.json")
    arch = model.config.arch
    for key, wanted in model.metadata.arch.items():
        if key not in ELSEWHERE:
            found = values[f"{arch}.{key}"]
            wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted
            assert found == pytest.approx(wanted), key


@pytest.mark.parametrize("kind", hf_twin.KINDS)
@torch.no_grad()
def test_twins(kind, tmp_path):
    """Biases, a tied head, Mistral, linear scaling."""
    twin = hf_twin.make(kind, tmp_path)
    twin.hf.save_pretrained(tmp_path / "hf")
    model = dl.load_model(tmp_path / "hf", mode="fp32")
    x = ids()
    assert_close(model(x).logits, twin.hf(x).logits)
    # What generation_config.json says of ends and padding.
    assert model.generation_config.pad_token_id == 0
    assert torch.equal(model.generate(x), twin.hf.generate(x))
    # The very weights of the file, to the bit.
    file = dl.load_model(twin.path, mode="fp32")
    for (name, found), wanted in zip(model.state_dict().items(), file.state_dict().values(), strict=True):
        assert torch.equal(found, wanted), name


@pytest.fixture
def llama(tmp_path):
    """A folder that a test may break."""
    hf_twin.make("llama", tmp_path).hf.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@torch.no_grad()
def test_shards(llama):
    wanted = dl.load_model(llama)(ids()).logits
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, llama / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    (llama / "model.safetensors").unlink()
    assert torch.equal(dl.load_model(llama)(ids()).logits, wanted)
    (llama / "b.safetensors").unlink()
    with pytest.raises(dl.FolderError, match=r"b\.safetensors"):
        dl.load_model(llama)
    index["weight_map"][names[0]] = "../a.safetensors"
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(dl.FolderError, match="names the file '../a.safetensors'"):
        dl.load_model(llama)


@torch.no_grad()
def test_half_precision_stays_as_it_is(llama):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    model = dl.load_model(llama, mode="fp32")
    assert "BF16" in repr(model.model.layers[0].mlp.up_proj)
    wanted = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight.bfloat16(), wanted)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not implemented"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"sliding_window": 7}, "sliding_window"),
        ({"logits_scaling": 2.0}, "logits_scaling=2.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type.*dynamic"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(llama, changes, says):
    edit(llama, **changes)
    with pytest.raises(dl.UnsupportedModel, match=says):
        dl.load_model(llama)


def test_broken_folders(llama, tmp_path):
    with pytest.raises(dl.FolderError, match=r"config\.json"):
        dl.load_model(tmp_path)
    tensors = load_file(llama / "model.safetensors")

    def save(changed):
        save_file(changed, llama / "model.safetensors", {"format": "pt"})

    save({**tensors, "model.layers.0.extra.weight": torch.zeros(3)})
    with pytest.raises(dl.UnsupportedModel, match=r"model\.layers\.0\.extra\.weight"):
        dl.load_model(llama)
    save({name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name})
    with pytest.raises(dl.GGUFError, match=r"blk\.1\.ffn_up\.weight.*model\.layers\.1\.mlp\.up_proj\.weight"):
        dl.load_model(llama)
    save({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(dl.FolderError, match=r"lm_head\.weight is missing"):
        dl.load_model(llama)
    save({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)})
    with pytest.raises(dl.UnsupportedModel, match="float8"):
        dl.load_model(llama)
    (llama / "model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(dl.FolderError, match=r"model\.safetensors"):
        dl.load_model(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(dl.FolderError, match="neither"):
        dl.load_model(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(dl.FolderError, match=r"config\.json"):
        dl.load_model(llama)


@torch.no_grad()
def test_experts_of_their_own_and_a_tower(oracle, tmp_path):
    """Published checkpoints: a tensor for each expert, names of a model that also sees, experts input-major."""
    model, hf = live_pair(oracle, "qwen3vlmoe")
    hf.save_pretrained(tmp_path / "hf")
    x = ids()
    wanted = hf(input_ids=x).logits
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    swapped = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file(swapped, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert_close(dl.load_model(tmp_path / "hf", mode="fp32")(x).logits, wanted)
    split = {}
    for name, tensor in tensors.items():
        place, dot, stack = name.partition(".experts.")
        for i in range(len(tensor) if dot else 0):
            parts = tensor[i].chunk(2) if stack == "gate_up_proj" else [tensor[i]]
            kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
            for kind, part in zip(kinds, parts, strict=True):
                split[f"{place}.experts.{i}.{kind}.weight"] = part.clone()
        if not dot:
            split[name] = tensor
    save_file(split, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert_close(dl.load_model(tmp_path / "hf", mode="fp32")(x).logits, wanted)
    del split[next(name for name in split if ".experts.3.down_proj" in name)]
    save_file(split, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(dl.FolderError, match="has 4 experts, wanted 0 to 4"):
        dl.load_model(tmp_path / "hf")


@torch.no_grad()
def test_longrope(oracle, tmp_path):
    """By the tokens in hand, as transformers has it."""
    from test_module_paths import hf_model

    path = oracle / "tiny" / "phi3_longrope.gguf"
    hf = hf_model(json.loads(path.with_suffix(".json").read_text()), device="cpu").eval()
    hf.save_pretrained(tmp_path / "hf")
    model = dl.load_model(tmp_path / "hf", mode="fp32")
    for n in (40, 300):
        x = ids(n)[:1]
        assert_close(model(x).logits, hf(input_ids=x).logits)
    assert GGUFFile(path).metadata.arch.float("rope.scaling.attn_factor") == pytest.approx(
        model.metadata.arch.float("rope.scaling.attn_factor")
    )


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(dl.DownloadError):
        dl.AutoModelForCausalLM.from_pretrained(tmp_path / "none.gguf")


def test_from_pretrained(llama, tmp_path):
    path = next(tmp_path.glob("*.gguf"))
    for name, how in ((path, {}), (tmp_path, {"gguf_file": path.name}), (llama, {"dtype": torch.float32})):
        model = dl.AutoModelForCausalLM.from_pretrained(name, mode="fp32", device_map="auto", **how)
        assert model.name_or_path == str(name)
        assert model.lm_head.native is False
    with pytest.raises(dl.UnsupportedModel, match="bfloat16"):
        dl.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="trust_remote_code"):
        dl.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
