"""One engine in a process of its own: it carries out commands that come over a pipe and sleeps in between.

    python worker.py dasllama-torch|llama.cpp THREADS

A command is one line of JSON on stdin, `{"do": name, ...arguments}`; its reply is one line of JSON on stdout, which
carries `error` if the command failed. Whatever an engine prints goes to stderr. The first line comes unasked, once the
engine is imported. The two engines share everything that is timed but the evaluation itself.
"""

import json
import os
import sys
import time
from importlib.metadata import version

import numpy as np


class DasllamaTorch:
    """This package, through its public verbs."""

    def __init__(self, threads: int):
        import torch

        import dasllama_torch as dl
        from dasllama_torch.ops import strict

        torch.set_num_threads(threads)
        self.strict = strict()  # what a reference serves is no measurement of the kernels: refuse it by name
        self.strict.__enter__()
        # Names of the package are looked up lazily; the import is not to be counted as loading.
        self.load_model, self.create_session, self.eval_batch = dl.load_model, dl.create_session, dl.eval_batch
        self.sessions = []

    def about(self) -> dict:
        from dasllama_torch.ops import isas

        names = ("dasllama-torch", "torch", "numpy")
        return {"versions": {name: version(name) for name in names}, "kernels": isas()[-1]}

    def load(self, path: str, n_ctx: int) -> None:
        self.model, self.n_ctx = self.load_model(path), n_ctx

    def tokenize(self, text: str) -> list[int]:
        return list(self.model.encode(text))

    def reset(self, n_seq: int) -> None:
        for session in self.sessions:
            session.close()
        self.sessions = [self.create_session(self.model, kv_dtype="f16", n_ctx=self.n_ctx) for _ in range(n_seq)]

    def feed(self, ids: list[list[int]]) -> list[int]:
        return [int(logits.numpy().argmax()) for logits in self.eval_batch(self.sessions, ids)]

    def served(self) -> dict:
        """Calls by op and kernel since the process began."""
        from dasllama_torch.ops import report

        return report()


class LlamaCpp:
    """llama-cpp-python, through the low-level calls; contexts are made once for each number of streams and setting."""

    def __init__(self, threads: int):
        import llama_cpp.llama_cpp as lib

        self.lib, self.threads, self.contexts = lib, threads, {}
        # The callback must live as long as the library may call it.
        self.quiet = lib.llama_log_callback(lambda level, text, user_data: None)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()

    def about(self) -> dict:
        names = ("llama-cpp-python", "numpy")
        kernels = self.lib.llama_print_system_info().decode().strip(" |")
        return {"versions": {name: version(name) for name in names}, "kernels": kernels}

    def load(self, path: str, n_ctx: int, repack: bool = True) -> None:
        """repack: let the engine keep copies of weights in other layouts (AMX tiles, interleaved rows), as it does by
        default; otherwise it reads the file's own blocks."""
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, repack
        self.model = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab, self.n_ctx = self.lib.llama_model_get_vocab(self.model), n_ctx
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (self.lib.llama_token * (len(raw) + 2))()
        n = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, False)
        if n < 0:
            raise RuntimeError(f"llama.cpp needs {-n} ids for {len(raw)} bytes of text")
        return list(ids[:n])

    def reset(self, n_seq: int, flash: bool = True) -> None:
        key = n_seq, flash
        if key not in self.contexts:
            self.contexts[key] = self._context(n_seq, flash)
        self.context = self.contexts[key]
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.past = [0] * n_seq

    def _context(self, n_seq: int, flash: bool):
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.n_ctx * n_seq, n_seq  # the cells are divided among the streams
        params.n_batch, params.n_outputs_max = self.n_ctx, n_seq
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = self.lib.GGML_TYPE_F16
        params.swa_full = False  # layers with a window keep no more than it, as in llama.cpp's own programs
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {n_seq} times {self.n_ctx} tokens")
        return context

    def feed(self, ids: list[list[int]]) -> list[int]:
        pointer = self.lib.ctypes.POINTER
        counts = [len(tokens) for tokens in ids]
        n, last = sum(counts), np.cumsum(counts) - 1
        token = np.array([token for tokens in ids for token in tokens], np.int32)
        pos = np.concatenate([np.arange(past, past + k, dtype=np.int32) for past, k in self._spans(counts)])
        seq = np.repeat(np.arange(len(ids), dtype=np.int32), counts)
        seq_at = seq.ctypes.data + 4 * np.arange(n, dtype=np.uintp)  # addresses of seq's elements
        ones, wanted = np.ones(n, np.int32), np.zeros(n, np.int8)
        wanted[last] = 1
        batch = self.lib.llama_batch(
            n_tokens=n,
            token=token.ctypes.data_as(pointer(self.lib.llama_token)),
            pos=pos.ctypes.data_as(pointer(self.lib.llama_pos)),
            n_seq_id=ones.ctypes.data_as(pointer(self.lib.ctypes.c_int32)),
            seq_id=seq_at.ctypes.data_as(pointer(pointer(self.lib.llama_seq_id))),
            logits=wanted.ctypes.data_as(pointer(self.lib.ctypes.c_int8)),
        )
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {n} tokens after {max(self.past)}")
        self.past = [past + k for past, k in self._spans(counts)]
        rows = (self.lib.llama_get_logits_ith(self.context, int(row)) for row in last)
        return [int(np.ctypeslib.as_array(row, (self.n_vocab,)).argmax()) for row in rows]

    def _spans(self, counts: list[int]):
        return zip(self.past, counts, strict=True)

    def served(self) -> dict:
        return {}


def measure(engine, prompts: list[list[int]], n_decode: int, **setting) -> dict:
    """Evaluate each prompt in a fresh stream of its own, all in one batch, then continue all of them greedily.

    Returns prefill_s (the prompts, up to and with the choice of the first tokens), decode_s (n_decode evaluations of
    one token per stream, each with its choice) and ids, the chosen tokens of the first stream.
    """
    engine.reset(len(prompts), **setting)
    engine.feed([prompt[:1] for prompt in prompts])  # wakes the threads and draws the weights back into the caches
    engine.reset(len(prompts), **setting)
    begin = time.perf_counter()
    tokens = engine.feed(prompts)
    prefilled = time.perf_counter()
    ids = [tokens[0]]
    for _ in range(n_decode):
        tokens = engine.feed([[token] for token in tokens])
        ids.append(tokens[0])
    end = time.perf_counter()
    return {"prefill_s": prefilled - begin, "decode_s": end - prefilled, "ids": ids}


def memory() -> dict:
    """Resident bytes of this process, now and at their peak (Linux)."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {"now": int(lines["VmRSS"].split()[0]) * 1024, "peak": int(lines["VmHWM"].split()[0]) * 1024}


def load(engine, **arguments) -> dict:
    begin = time.perf_counter()
    engine.load(**arguments)
    return {"load_s": time.perf_counter() - begin}


COMMANDS = {
    "load": load,
    "tokenize": lambda engine, text: {"ids": engine.tokenize(text)},
    "measure": measure,
    "memory": lambda engine: memory(),
    "served": lambda engine: engine.served(),
}


def serve(make_engine, requests, replies) -> None:
    """Answer until the requests end. An engine that cannot be made is reported in the first line."""

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = make_engine()
        reply(engine.about() | {"memory": memory()})
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    for line in requests:
        arguments = json.loads(line)
        try:
            reply(COMMANDS[arguments.pop("do")](engine, **arguments))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})


ENGINES = {"dasllama-torch": DasllamaTorch, "llama.cpp": LlamaCpp}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints must not stand between the replies
    serve(lambda: ENGINES[sys.argv[1]](int(sys.argv[2])), sys.stdin, answers)
