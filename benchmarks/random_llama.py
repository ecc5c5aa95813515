"""A llama of 180 M random weights in one file for each type of weights: for speed, where no small model has that type.

    python benchmarks/random_llama.py --tokenizer smollm2.gguf --out llama-180m --peer-python peer/bin/python

The vocabulary and the tokenizer are those of the given file, so that both engines read the passage. The weights are
drawn once (a matrix of K columns from N(0, 1/K), norms around 1: activations stay those of a trained model in size) and
written in F32; llama.cpp's own quantizer then makes `OUT/llama-180m-<type>.gguf`, with every matrix in that
type. The F32 file, 720 MB beside the others, is deleted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from dasllama_torch.gguf.random_source import RandomSource
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf
from dasllama_torch.ops.ggml_types import F32, GGML_TYPES

HERE = Path(__file__).resolve().parent
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q3_K", "IQ2_XS")
C, LAYERS, H, G, D, FF = 1024, 16, 16, 4, 64, 1792  # every width is a multiple of 256, which K-types and IQ types need
CONTEXT = 4096


def hyper_parameters(vocabulary: int) -> dict:
    return {
        "general.name": "random llama 180M",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": C,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": H,
        "llama.attention.head_count_kv": G,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": D,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": vocabulary,
    }


def shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape; the head is the embedding."""
    block = {
        "attn_norm": (C,),
        "attn_q": (H * D, C),
        "attn_k": (G * D, C),
        "attn_v": (G * D, C),
        "attn_output": (C, H * D),
        "ffn_norm": (C,),
        "ffn_gate": (FF, C),
        "ffn_up": (FF, C),
        "ffn_down": (C, FF),
    }
    layers = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"token_embd.weight": (vocabulary, C), **layers, "output_norm.weight": (C,)}


def write_f32(path: Path, tokenizer: Path, seed: int) -> None:
    md = GGUFFile(tokenizer).metadata
    words = {key: md.typed(key) for key in md if key.startswith("tokenizer.")}
    vocabulary, source = len(words["tokenizer.ggml.tokens"]), RandomSource(seed)
    tensors: dict[str, tuple[np.ndarray, int]] = {
        name: (source.f32(name, *shape).numpy(), F32) for name, shape in shapes(vocabulary).items()
    }
    write_gguf(path, "llama", {**hyper_parameters(vocabulary), **words}, tensors)


def requantize(source: Path, target: Path, kind: str, peer_python: str) -> None:
    """`requantize.py` in the peer's interpreter. Raises SystemExit unless every matrix has the type then."""
    matrices = {tensor.name: tensor.shape[-1] for tensor in GGUFFile(source).tensors.values() if len(tensor.shape) > 1}
    order = {"source": str(source), "target": str(target), "type": kind, "columns": matrices}
    subprocess.run([peer_python, str(HERE / "requantize.py")], input=json.dumps(order), text=True, check=True)
    tensors = GGUFFile(target).tensors
    made = {name: GGML_TYPES[tensors[name].qtype].name for name in matrices}
    if wrong := {name: found for name, found in made.items() if found != kind}:
        raise SystemExit(f"{target}: {wrong}, wanted {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="GGUF file that has the vocabulary")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--types", default=",".join(TYPES), help="separated by commas (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    full = options.out / "llama-180m-F32.gguf"
    try:
        write_f32(full, options.tokenizer, options.seed)
        for kind in options.types.split(","):
            target = options.out / f"llama-180m-{kind}.gguf"
            requantize(full, target, kind, options.peer_python)
            print(target, flush=True)
    finally:
        full.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
