"""Every architecture, in every tensor type and mode, against transformers on the dequantized weights.

Models are of random weights in the sizes of the golden data's metadata, but wide enough for blocks of 256; what keeps
rows of another length is Q8_0 or F32, as in real files. transformers' side is its own class, made of our export's
config and state dict, whose tests hold those against the golden data. With --measured all types are measured for
docs/write_parity.py, else a few for each architecture, so that every type is.
"""

import numpy as np
import torch
import transformers
from families import TINY
from tolerances import FP32_LOGITS, NATIVE_LOGPROB_RANDOM

import dasllama_torch as dl
from dasllama_torch.arch import FAMILIES
from dasllama_torch.export.hf_config import hf_class, hf_config
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops.ggml_types import F32, GGML_TYPES, Q8_0, WEIGHT_TYPES, by_name

# Architecture -> golden case whose metadata it has, where that is another name.
CASES = {"mistral3": "mistral3_yarn"}
TYPES = [GGML_TYPES[qtype].name for qtype in WEIGHT_TYPES]
WIDEN = 4  # the golden data's models are 64 wide
WIDENED = (
    "embedding_length", "attention.key_length", "attention.value_length", "attention.key_length_swa",
    "attention.value_length_swa", "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections",
    "ssm.state_size", "ssm.inner_size",
)  # fmt: skip
WIDTHS = ("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length")
WIDTH = 256
# Where no token's head of a delta net all but vanishes, as the norm behind it would magnify its roundings.
SEEDS = {"qwen35": 5}
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


def metadata(oracle, arch):
    found = GGUFFile(oracle / "tiny" / f"{CASES.get(arch, arch)}.gguf").metadata
    values = dict(found)
    for key, value in values.items():
        name = key.removeprefix(f"{arch}.")
        if name in WIDENED:
            values[key] = value * WIDEN
        elif name in WIDTHS:
            values[key] = WIDTH if isinstance(value, int) else np.full_like(value, WIDTH)
    return Metadata(values, origin=arch)


class Weights(RandomSource):
    """Of a model as well conditioned as a trained one: decays fall, what scales a whole layer is about 1, and scores
    are of size 1 also where the model does not scale them (Gemma 4, whose norms of q and k do)."""

    def __init__(self, arch, qtype):
        super().__init__(seed=SEEDS.get(arch, 3), qtype=qtype)
        self.arch = arch

    def rows(self, name):
        return 256  # the vocabulary, whose size no key tells

    def f32(self, name, *shape):
        values = super().f32(name, *shape)
        if name == "ssm_a":
            return -0.5 - values.abs()
        if self.arch == "gemma4" and name in ("attn_q_norm.weight", "attn_k_norm.weight"):
            return values * shape[0] ** -0.25
        return 1 + values if name.endswith(("scale", "scale.weight")) else values


def build(oracle, arch, name, native):
    def qtype_of(tensor, shape):
        wanted = (by_name(name).id, Q8_0, F32)
        return next(qtype for qtype in wanted if shape[-1] % GGML_TYPES[qtype].block == 0)

    source = Weights(arch, qtype_of)
    source.native = native
    return dl.build_model(metadata(oracle, arch), source)


def cases(config):
    for i, arch in enumerate(FAMILIES):
        types = TYPES if config.getoption("measured") else TYPES[i % 14 :: 14]
        yield from ((arch, name) for name in types)


def pytest_generate_tests(metafunc):
    if "arch" in metafunc.fixturenames:
        metafunc.parametrize(("arch", "name"), list(cases(metafunc.config)), ids=lambda value: value)


@torch.no_grad()
def test_parity(arch, name, oracle, measured):
    tested = build(oracle, arch, name, native=False)
    config = transformers.AutoConfig.for_model(**hf_config(tested))
    config._attn_implementation = "eager"
    if "vision_config" in config.sub_configs:
        # The tower is not looked at.
        config.vision_config.update(dict(depth=1, hidden_size=32, out_hidden_size=32, embed_dim=32, num_heads=1))
    hf = getattr(transformers, hf_class(arch))(config).eval()
    _, unexpected = hf.load_state_dict(dl.to_hf(tested), strict=False)
    assert not unexpected
    wanted = hf(input_ids=IDS).logits
    worst = ((tested(IDS).logits - wanted).abs().max() / wanted.std()).item()
    measured(arch, f"fp32 {name}", worst)
    found = build(oracle, arch, name, native=True)(IDS).logits
    apart = (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean().item()
    measured(arch, f"native {name}", apart)
    noise = TINY[CASES.get(arch, arch)]
    assert worst <= FP32_LOGITS * noise
    assert apart <= NATIVE_LOGPROB_RANDOM * noise


def test_every_type_and_architecture_is_measured(request):
    assert {arch for arch, _ in cases(request.config)} == set(FAMILIES)
    assert {name for _, name in cases(request.config)} == set(TYPES)
