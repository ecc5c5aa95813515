"""What a KV cache of few bits costs in likelihood: the mean NLL of natural text for each codec, and llama.cpp's own.

    python benchmarks/kv_nll.py --models smollm2.gguf gemma3.gguf --peer-python peer/bin/python

Each text gives the first `--tokens` tokens to an empty stream, 64 at a time, so that most keys that a token sees come
out of the cache. NLL is the mean, in nats, of minus the log-probability of each token after the first. Both engines
evaluate the same token ids, ours; llama.cpp runs with flash attention, which its quantized values need. "KV bytes" are
those of a token in all layers that keep it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from worker import LlamaCpp

CHUNK = 64
CODECS = ("f32", "f16", "q8_0", "tq4", ("q8_0", "tq4"))
PEER_TYPES = {"f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0", "q4_0": "GGML_TYPE_Q4_0"}
TEXTS = ["benchmarks/passage.txt", "CONTRIBUTING.md"]


def losses(logits: np.ndarray, targets: list[int]) -> np.ndarray:
    """Nats of each target under its row of logits [n, V]."""
    top = logits.max(1)
    total = np.exp(logits - top[:, None]).sum(1, dtype=np.float64)
    return np.log(total) + top - logits[np.arange(len(targets)), targets]


def ours(model, texts: list[list[int]], kv_dtype) -> tuple[float, int]:
    """Mean NLL, and bytes that a token keeps."""
    import dasllama_torch as dl

    found = []
    for ids in texts:
        with dl.create_session(model, kv_dtype, n_ctx=len(ids)) as session:
            for i in range(0, len(ids) - 1, CHUNK):
                chunk = ids[i : min(i + CHUNK, len(ids) - 1)]
                targets = ids[i + 1 : i + 1 + len(chunk)]
                found.append(losses(session.eval(chunk, logits="all").numpy(), targets))
            pool = session.pool
    return np.concatenate(found).mean(), sum(group.page_bytes for group in pool.groups) // pool.page_rows


def peer(path: str, texts: list[list[int]], threads: int) -> dict[str, float]:
    """Mean NLL of llama.cpp for each type of its cache."""
    engine = LlamaCpp(threads)
    engine.load(path, max(map(len, texts)))
    lib, found = engine.lib, {}
    for name, of_ggml in PEER_TYPES.items():
        params = lib.llama_context_default_params()
        params.n_ctx = engine.n_ctx
        params.n_batch = params.n_outputs_max = CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = getattr(lib, of_ggml)
        context = lib.llama_init_from_model(engine.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {name}")
        values = []
        for ids in texts:
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            for i in range(0, len(ids) - 1, CHUNK):
                chunk = ids[i : min(i + CHUNK, len(ids) - 1)]
                batch = lib.llama_batch_init(len(chunk), 0, 1)
                batch.n_tokens = len(chunk)
                for k, token in enumerate(chunk):
                    batch.token[k], batch.pos[k], batch.logits[k] = token, i + k, 1
                    batch.n_seq_id[k], batch.seq_id[k][0] = 1, 0
                if lib.llama_decode(context, batch) != 0:
                    raise RuntimeError(f"llama_decode failed after {i} tokens")
                lib.llama_batch_free(batch)
                rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(chunk), engine.n_vocab))
                values.append(losses(rows, ids[i + 1 : i + 1 + len(chunk)]))
        lib.llama_free(context)
        found[name] = float(np.concatenate(values).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--texts", nargs="+", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=1000, help="of each text at most, 1,000 by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-python", help="a Python with llama-cpp-python; without one, ours alone")
    options = parser.parse_args()
    import torch

    import dasllama_torch as dl

    torch.set_num_threads(options.threads)
    print("| model | tokens | engine | KV | KV bytes | NLL | more than f16 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in options.models:
        model = dl.load_model(path, progress=False)
        texts = [model.encode(Path(text).read_text())[: options.tokens] for text in options.texts]
        n = sum(len(ids) - 1 for ids in texts)
        results = {kv: ours(model, texts, kv) for kv in CODECS}
        for kv, (nll, nbytes) in results.items():
            name = kv if isinstance(kv, str) else ", ".join(kv)
            more = f"{nll - results['f16'][0]:+.4f}"
            print(f"| {Path(path).name} | {n} | dasllama-torch | {name} | {nbytes} | {nll:.4f} | {more} |", flush=True)
        if options.peer_python:
            command = [options.peer_python, __file__, "--peer", path, str(options.threads)]
            answer = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True).stdout
            found = json.loads(answer.splitlines()[-1])
            for name, nll in found.items():
                print(f"| {Path(path).name} | {n} | llama.cpp | {name} | | {nll:.4f} | {nll - found['f16']:+.4f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        print(json.dumps(peer(sys.argv[2], json.load(sys.stdin), int(sys.argv[3]))))
    else:
        main()
