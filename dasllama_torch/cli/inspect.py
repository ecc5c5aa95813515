"""`inspect`: what a GGUF file holds."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from .models import resolve
from .options import JsonOption, ModelArgument
from .output import megabytes, printable

if TYPE_CHECKING:
    from dasllama_torch.gguf.reader import GGUFFile

LONG_ARRAY = 16  # elements; longer arrays of the metadata are shown by their type


def command(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Print what a GGUF file holds. That is architecture, hyper-parameters, vocabulary, tensors and chat templates.

    Any readable file will do, whether its architecture is implemented or not.
    """
    from dasllama_torch.gguf.reader import GGUFFile

    facts = _facts(GGUFFile(resolve(model)))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_describe(facts)))


def _facts(file: "GGUFFile") -> dict[str, Any]:
    """What `inspect --json` prints. Shapes are in PyTorch's order, sizes in bytes."""
    from dasllama_torch.ops.ggml_types import GGML_TYPES

    md = file.metadata
    tensors, types = [], {}
    for tensor in file.tensors.values():
        kind = GGML_TYPES[tensor.qtype]
        elements = math.prod(tensor.shape)
        tensors.append(
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": kind.name,
                "bits_per_weight": kind.bits_per_weight,
                "bytes": tensor.nbytes,
            }
        )
        total = types.setdefault(kind.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        total["tensors"] += 1
        total["parameters"] += elements
        total["bytes"] += tensor.nbytes
    parameters = sum(total["parameters"] for total in types.values())
    tensor_bytes = sum(total["bytes"] for total in types.values())
    return {
        "files": [str(path) for path in file.paths],
        "bytes": file.nbytes,
        "gguf_version": file.version,
        "architecture": md.get("general.architecture"),
        "caps": _caps(file),
        "parameters": parameters,
        "bits_per_weight": round(8 * tensor_bytes / parameters, 4) if parameters else None,
        "metadata": {key: _json_value(md, key) for key in md if not key.startswith("tokenizer.chat_template")},
        "special_tokens": _special_tokens(md),
        "chat_templates": {
            key: md[key] for key in md if key.startswith("tokenizer.chat_template") and isinstance(md[key], str)
        },
        "types": types,
        "tensors": tensors,
    }


def _caps(file: "GGUFFile") -> dict[str, Any]:
    """What `caps()` says of the model, with its text as "summary"; or {"unsupported": why}."""
    from dasllama_torch.arch import FAMILIES, family
    from dasllama_torch.errors import DasllamaError

    md = file.metadata
    arch = md.get("general.architecture")
    if arch not in FAMILIES:
        return {"unsupported": f"architecture {arch!r} is not implemented"}
    from dasllama_torch.arch.caps import Caps
    from dasllama_torch.gguf.source import GGUFSource
    from dasllama_torch.text.tokenizer import Tokenizer

    try:
        config = family(arch, md.origin).config.from_gguf(md, GGUFSource(file))
        found = Caps.of(config, md, Tokenizer.from_metadata(md))
    except DasllamaError as e:
        return {"unsupported": str(e)}
    return {**dataclasses.asdict(found), "summary": str(found)}


def _json_value(md: Any, key: str) -> Any:
    """A scalar, the elements of a short array, or the type of a long one ("string[49152]"). JSON has no NaN and no
    infinity: those are strings."""
    value = md[key]
    if not isinstance(value, str | bool | int | float):
        if len(value) > LONG_ARRAY or md.type_name(key).startswith("array"):
            return md.type_name(key)
        return [_finite(element) for element in (value.tolist() if hasattr(value, "tolist") else value)]
    return _finite(value)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _special_tokens(md: Any) -> dict[str, dict[str, Any]]:
    """Name ("bos") -> id and text, of the keys `tokenizer.ggml.<name>_token_id`; an id out of range has no text."""
    tokens = md.get("tokenizer.ggml.tokens", ())
    found = {}
    for key in md:
        name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
        if key == f"tokenizer.ggml.{name}_token_id" and isinstance(md[key], int):
            token_id = md[key]
            found[name] = {"id": token_id, "text": str(tokens[token_id]) if 0 <= token_id < len(tokens) else None}
    return found


def _describe(facts: dict[str, Any]) -> list[str]:
    """The lines that `inspect` prints for people."""
    architecture = facts["architecture"]
    own = {"general": {}, "hyper-parameters": {}, "tokenizer": {}, "other keys": {}}
    for key, value in facts["metadata"].items():
        group = key.partition(".")[0]
        section = "hyper-parameters" if group == architecture else group if group in own else "other keys"
        own[section][key] = value
    lines = [f"file           {printable(path)}" for path in facts["files"]]
    lines += [
        f"size           {megabytes(facts['bytes'])}, GGUF version {facts['gguf_version']}",
        f"architecture   {_value(architecture) if architecture is not None else 'not stated'}",
        f"parameters     {facts['parameters']:,}, {facts['bits_per_weight'] or 0:.2f} bits per weight",
    ]
    caps = facts["caps"]
    said = caps["summary"].split("; ") if "summary" in caps else [f"not supported: {printable(caps['unsupported'])}"]
    lines += [f"{'' if i else 'model':14} {line}" for i, line in enumerate(said)]
    for title, entries in own.items():
        if entries:
            lines += ["", title, *(f"  {printable(key):44} {_value(value)}" for key, value in entries.items())]
    if facts["special_tokens"]:
        lines += ["", "special tokens"]
        lines += [
            f"  {printable(name):20} {token['id']:>8}  {_value(token['text'])}"
            for name, token in facts["special_tokens"].items()
        ]
    lines += ["", "types"]
    for kind, total in facts["types"].items():
        n, weights, size = total["tensors"], total["parameters"], megabytes(total["bytes"])
        lines.append(f"  {kind:8} {n:>6} tensors {weights:>16,} weights {size:>12}")
    lines += ["", "tensors"]
    for tensor in facts["tensors"]:
        name, shape = printable(tensor["name"]), " x ".join(map(str, tensor["shape"]))
        bits, size = tensor["bits_per_weight"], megabytes(tensor["bytes"])
        lines.append(f"  {name:36} {shape:>18} {tensor['type']:>8} {bits:>8.4g} bits {size:>12}")
    for key, template in facts["chat_templates"].items():
        lines += ["", printable(key), printable(template, keep="\n\t")]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"  # the digits that an f32 has
    return repr(value) if isinstance(value, str) else str(value)
