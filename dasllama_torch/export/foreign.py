"""GGUF files of architectures that this package does not implement, as parts of transformers' model of them.

Names come from the `gguf` package's table of the architecture. It says nothing of what a converter does to values, so
only architectures count whose converter does nothing: those of `PLAIN`.
"""

from torch import Tensor, nn

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.source import GGUFSource
from dasllama_torch.modules.linear import Embedding, Linear

# Half-split rotary pairs as in transformers, norms as they are, no matrices joined or turned. Source: llama.cpp's
# convert_hf_to_gguf.py.
PLAIN = ("olmo2", "stablelm", "starcoder2")


def foreign_parts(model: nn.Module, file: GGUFFile, mode: str) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
    """Packed modules by path, and f32 tensors by name, for all parameters of transformers' model.

    mode: "native" or "fp32". Raises UnsupportedModel for an architecture that is not in `PLAIN`, for a parameter that
    the file has nothing for, and for a tensor of the file that no parameter is for.
    """
    md: Metadata = file.metadata
    arch = md.architecture
    if arch not in PLAIN:
        raise UnsupportedModel(f"{md.origin}: architecture {arch!r} is not implemented, nor one of {', '.join(PLAIN)}")
    if mode not in ("native", "fp32"):
        raise UnsupportedModel(f"{md.origin}: mode {mode!r} is for implemented architectures, wanted native or fp32")
    names = _names(arch, md.arch.int("block_count"))
    source = GGUFSource(file)
    source.native = mode == "native"
    parts: dict[str, nn.Module] = {}
    floats: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            name = names(path)
            if path == "lm_head" and not source.has(f"{name}.weight"):
                name = names("model.embed_tokens")  # a head that is the embedding table
            bias = "no" if module.bias is None else "yes"
            parts[path] = Linear(source, name, module.out_features, module.in_features, bias=bias)
        elif isinstance(module, nn.Embedding):
            parts[path] = Embedding(source, names(path), module.num_embeddings, module.embedding_dim)
        else:
            for leaf, value in module.named_parameters(recurse=False):
                floats[f"{path}.{leaf}"] = source.f32(f"{names(path)}.{leaf}", *value.shape)
    if left := source.unasked():
        raise UnsupportedModel(f"{md.origin}: {type(model).__name__} has no place for {', '.join(left[:4])}")
    return parts, floats


def _names(arch: str, n_blocks: int):
    """Path of transformers' module -> GGUF's stem."""
    import gguf

    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(number, n_blocks)

    def name(path: str) -> str:
        found = table.get_name(path)
        if found is None:
            raise UnsupportedModel(f"architecture {arch!r} has no tensor for transformers' module {path}")
        return found

    return name
