"""Tensors of transformers, served as a GGUF file of the same model would hold them.

    source = HFSource(state_dict, values, tensors, origin)   # the two in the middle: of `config.gguf_facts`
    source.get("blk.0.attn_q.weight", n, k)                  # model.layers.0.self_attn.q_proj.weight, rows interleaved

Constructors ask for GGUF names and undo what converters do (row orders, norms plus one, ...), so this source does it:
what it takes is a copy of each tensor whose values or order change, and a view of all others. Stacks of experts come in
one piece, also where a checkpoint has a tensor for each expert.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dasllama_torch.errors import FolderError
from dasllama_torch.gguf.source import PackedTensor, TensorSource, pack
from dasllama_torch.hf.names import adds_one, canonical, to_gguf, to_hf
from dasllama_torch.modules.linear import half_split_order

# Beside a text decoder: towers that see and hear, and blocks that draft tokens; files of text hold neither.
_TOWERS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)
_DRAFTS = re.compile(r"(model\.)?mtp\.")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq$")  # of old checkpoints; computed from the config
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(gate_proj|up_proj|down_proj)\.weight$")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.*)$")
_SHARED_KV = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
_INTERLEAVED = ("llama", "mistral3", "smollm3")  # whose files hold rotary pairs next to each other


class HFSource(TensorSource):
    """tensors: transformers' names -> float tensors; a mapping may load them when it is asked. values, computed: of
    `config.gguf_facts`. tied: the head is the embedding table, whatever the tensors hold.

    Tensors that the model does not know keep their names and stay unasked. Raises FolderError where two tensors are one
    by their names, or experts are missing.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], computed: Mapping[str, Tensor], tied: bool,
        origin: str,
    ):  # fmt: skip
        super().__init__(origin)
        self._tensors, self._computed = tensors, computed
        self._arch = values["general.architecture"]
        self._values = {key.removeprefix(f"{self._arch}."): value for key, value in values.items()}
        self._parts = self._named(tied) | {name: [] for name in computed}

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def _named(self, tied: bool) -> dict[str, list[str]]:
        """GGUF name -> the tensors that it is made of."""
        parts: dict[str, list[str]] = {}
        stacks: dict[str, dict[int, str]] = defaultdict(dict)
        for key in self._tensors:
            name = canonical(key)
            if self._is_left_out(name, tied):
                continue
            if match := _EXPERT.match(name):
                experts, index, part = match[1], int(match[2]), match[3]
                stacks[f"{experts}.{part}" + (".weight" if part != "down_proj" else "")][index] = key
                continue
            self._note(parts, to_gguf(self._arch, name) or key, [key])
        for name, experts in stacks.items():
            if set(experts) != set(range(n := self._values["expert_count"])):
                raise FolderError(f"{self.origin}: {name} has {len(experts)} experts, wanted 0 to {n - 1}")
            self._note(parts, to_gguf(self._arch, name) or name, [experts[i] for i in range(n)])
        return parts

    def _note(self, parts: dict[str, list[str]], name: str, keys: list[str]) -> None:
        if name in parts:
            raise FolderError(f"{self.origin}: {parts[name][0]!r} and {keys[0]!r} are one tensor, {name!r}")
        parts[name] = keys

    def _is_left_out(self, name: str, tied: bool) -> bool:
        if _TOWERS.match(name) or _DRAFTS.match(name) or _BUFFERS.match(name):
            return True
        if tied and name == "lm_head.weight":
            return True
        match = _LAYER.match(name)
        if match is None:
            return False
        layer, n = int(match[1]), self._values["block_count"]
        # GLM numbers the blocks that draft tokens on behind the layers; Gemma 4's checkpoints hold keys and values of
        # layers that read those of others.
        drafts = self._arch == "glm4moe" and layer >= n
        return drafts or (layer >= n - self._values.get("attention.shared_kv_layers", 0) and match[2] in _SHARED_KV)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        if name in self._computed:
            return pack(name, self._computed[name], self.origin)
        keys = self._parts.get(name)
        if keys is None:
            return None
        tensors = [self._tensors[key] for key in keys]
        tensor = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
        return pack(name, self._converted(name, tensor, shape), self.origin)

    def _hint(self, full: str) -> str:
        name = to_hf(self._arch, full)
        return f" ({name})" if name else super()._hint(full)

    def _converted(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What a GGUF file holds in the place of transformers' tensor."""
        leaf = name.partition(".")[2].partition(".")[2] if name.startswith("blk.") else name
        if adds_one(self._arch, name):
            return tensor.float() + 1
        if leaf == "ssm_a":
            tensor = -tensor.float().exp()
        if leaf == "ssm_conv1d.weight":
            tensor = tensor.squeeze(1)
        if self._arch in _INTERLEAVED and (heads := self._heads_of(leaf)):
            return tensor[half_split_order(heads, len(tensor) // heads).argsort()]
        if self._arch in ("qwen35", "qwen35moe"):
            return self._value_heads_in_turns(leaf, tensor)
        if self._arch == "gpt-oss":
            return _output_major(leaf, tensor)
        if self._arch == "qwen3vlmoe" and leaf in ("ffn_gate_up_exps.weight", "ffn_down_exps.weight"):
            # Published checkpoints hold their experts input-major, and those that transformers wrote do not.
            swapped = tensor.transpose(1, 2)
            return swapped if swapped.shape == shape != tensor.shape else tensor
        return tensor

    def _heads_of(self, leaf: str) -> int:
        """How many heads the rows of a projection stand for that is rotated; 0 for any other tensor."""
        key = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(leaf.partition(".")[0])
        return self._values[key] if key else 0

    def _value_heads_in_turns(self, leaf: str, tensor: Tensor) -> Tensor:
        """Qwen3.5's files have one value head of each key head, then the next of each; transformers has all of a key
        head together."""
        n_keys, n_values = self._values["ssm.group_count"], self._values["ssm.time_step_rank"]
        heads = torch.arange(n_values).view(n_keys, -1).T.reshape(-1)
        rows = torch.arange(self._values["ssm.inner_size"]).view(n_values, -1)[heads].reshape(-1)
        if leaf in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
            return tensor[heads]
        if leaf == "attn_gate.weight":
            return tensor[rows]
        if leaf == "ssm_out.weight":
            return tensor[:, rows]
        if leaf in ("attn_qkv.weight", "ssm_conv1d.weight"):
            first = len(tensor) - len(rows)  # behind queries and keys
            return tensor[torch.cat([torch.arange(first), first + rows])]
        return tensor


def _output_major(leaf: str, tensor: Tensor) -> Tensor:
    """gpt-oss: transformers multiplies by its experts from the other side, and rows of gate and up take turns."""
    if leaf.endswith("_exps.weight"):
        tensor = tensor.transpose(1, 2)
    if leaf.startswith("ffn_gate_up_exps."):
        tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
    return tensor
