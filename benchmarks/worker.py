"""One engine in a process of its own: it carries out commands that come over a pipe and sleeps in between.

    python worker.py dasllama-torch|llama.cpp THREADS [INSTRUCTION_SET]

A command is one line of JSON on stdin, `{"do": name, ...arguments}`; its reply is one line of JSON on stdout, which
carries `error` if the command failed. Whatever an engine prints goes to stderr. The first line comes unasked, once the
engine is imported. The two engines share everything that is timed but the evaluation itself.
"""

import abc
import hashlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np


def build(*modules) -> str:
    """Tells one state of the code from another: a hash of what lies in and below the modules' folders, .py and .so."""
    digest = hashlib.sha256()
    for module in modules:
        for path in sorted(Path(module.__file__).parent.rglob("*")):
            if path.suffix in (".py", ".so"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Streams(abc.ABC):
    """Some streams of tokens that are evaluated in one batch. ids: a list of token ids for each of them."""

    prompts: list[list[int]] | None = None  # what the streams stand behind, see `after`

    def clear(self) -> None:
        """Begin anew, with empty streams."""
        self.prompts = None

    @abc.abstractmethod
    def feed(self, ids: list[list[int]]) -> list[int]:
        """Evaluate ids and return the next token of each stream, the most likely one."""

    @abc.abstractmethod
    def mark(self) -> None:
        """Make it possible to rewind to here."""

    @abc.abstractmethod
    def rewind(self) -> None:
        """Go back to the mark."""

    def after(self, prompts: list[list[int]]) -> list[int]:
        """The first tokens after the prompts, behind which the streams stand then. They are evaluated once: with the
        same prompts again, the streams go back."""
        if self.prompts == prompts:
            self.rewind()
        else:
            self.clear()
            self.firsts = self.feed(prompts)
            self.mark()
            self.prompts = prompts
        return self.firsts


class DasllamaTorch:
    """This package, through its public verbs."""

    def __init__(self, threads: int, isa: str | None = None):
        if isa == "avx2":
            os.environ["ATEN_CPU_CAPABILITY"] = isa  # torch's own kernels; it reads this when it is imported
        import torch

        import dasllama_torch as dl
        from dasllama_torch import ops

        torch.set_num_threads(threads)
        ops.set_isa(isa)
        self.isa = isa or ops.isas()[-1]
        self.strict = ops.strict()  # what a reference serves is no measurement of the kernels: refuse it by name
        self.strict.__enter__()
        # Names of the package are looked up lazily; the import is not to be counted as loading.
        self.load_model, self.create_session, self.eval_batch = dl.load_model, dl.create_session, dl.eval_batch
        self._streams: dict[int, SessionStreams] = {}

    def about(self) -> dict:
        import dasllama_torch
        from dasllama_torch import ops

        names = ("dasllama-torch", "torch", "numpy")
        versions = {name: version(name) for name in names}
        return {"versions": versions, "kernels": self.isa, "build": build(dasllama_torch, ops)}

    def load(self, path: str, n_ctx: int) -> None:
        self.model, self.n_ctx = self.load_model(path), n_ctx

    def tokenizer(self) -> None:
        """Build the tokenizer once more, as `load` did."""
        type(self.model.tokenizer).from_metadata(self.model.metadata)

    def tokenize(self, text: str) -> list[int]:
        return list(self.model.encode(text))

    def work(self) -> dict | None:
        """What a token costs, as `report.Work` has it; None for mixtures of experts, where it depends on the tokens."""
        from dasllama_torch.modules.linear import Linear

        layers, head = self.model.config.layers, self.model.lm_head
        if any(layer.moe for layer in layers):
            return None
        matrices = [m for m in self.model.modules() if isinstance(m, Linear) and m is not head]
        return {
            "weights": sum(m.out_features * m.in_features for m in matrices),
            "weight_bytes": sum(m.qweight.nbytes for m in matrices),
            "head_weights": head.out_features * head.in_features,
            "head_bytes": head.qweight.nbytes,
            "attention": [[2 * 2 * a.n_kv_heads * a.head_dim, a.window] for a in layers if a.delta is None],
        }

    def ceilings(self) -> dict:
        """What the machine can do just now, as `report.Ceiling` has it."""
        from dasllama_torch.bench import Ceilings

        found = Ceilings.measure()
        return {"ops": 1e9 * found.dot, "bytes": 1e9 * found.read}

    def streams(self, n: int) -> "SessionStreams":
        return self._streams.setdefault(n, SessionStreams(self, n))

    def served(self) -> dict:
        """Calls by op and kernel since the process began."""
        from dasllama_torch.ops import report

        return report()


class SessionStreams(Streams):
    def __init__(self, engine: DasllamaTorch, n: int):
        self.engine, self.n, self.sessions = engine, n, []

    def clear(self) -> None:
        super().clear()
        for session in self.sessions:
            session.close()
        engine = self.engine
        self.sessions = [engine.create_session(engine.model, kv_dtype="f16", n_ctx=engine.n_ctx) for _ in range(self.n)]

    def feed(self, ids: list[list[int]]) -> list[int]:
        return [int(logits.numpy().argmax()) for logits in self.engine.eval_batch(self.sessions, ids)]

    def mark(self) -> None:
        for session in self.sessions:
            session.checkpoint()
        self.marks = [session.n_past for session in self.sessions]

    def rewind(self) -> None:
        for session, mark in zip(self.sessions, self.marks, strict=True):
            session.truncate(mark)


class LlamaCpp:
    """llama-cpp-python, through the low-level calls; contexts are made once for each number of streams and setting."""

    def __init__(self, threads: int):
        import llama_cpp.llama_cpp as lib

        self.lib, self.threads = lib, threads
        self._streams: dict[tuple[int, bool], ContextStreams] = {}
        # The callback must live as long as the library may call it.
        self.quiet = lib.llama_log_callback(lambda level, text, user_data: None)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()

    def about(self) -> dict:
        names = ("llama-cpp-python", "numpy")
        versions = {name: version(name) for name in names}
        kernels = self.lib.llama_print_system_info().decode().strip(" |")
        return {"versions": versions, "kernels": kernels, "build": build(self.lib)}

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

    def streams(self, n: int, flash: bool = True) -> "ContextStreams":
        if (n, flash) not in self._streams:
            self._streams[n, flash] = ContextStreams(self, n, flash)
        return self._streams[n, flash]


class ContextStreams(Streams):
    def __init__(self, engine: LlamaCpp, n: int, flash: bool):
        self.lib, self.n_vocab, self.n = engine.lib, engine.n_vocab, n
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = engine.n_ctx * n, n  # the cells are divided among the streams
        params.n_batch, params.n_outputs_max = engine.n_ctx, n
        params.n_threads = params.n_threads_batch = engine.threads
        params.flash_attn_type = (
            self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = self.lib.GGML_TYPE_F16
        params.swa_full = False  # layers with a window keep no more than it, as in llama.cpp's own programs
        self.context = self.lib.llama_init_from_model(engine.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {n} times {engine.n_ctx} tokens")
        self.memory = self.lib.llama_get_memory(self.context)

    def clear(self) -> None:
        super().clear()
        self.lib.llama_memory_clear(self.memory, True)
        self.past = [0] * self.n

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

    def mark(self) -> None:
        self.marks = list(self.past)

    def rewind(self) -> None:
        # Layers with a window keep it and a batch of 512 more: enough to go back the few tokens of a measurement.
        for seq, mark in enumerate(self.marks):
            if not self.lib.llama_memory_seq_rm(self.memory, seq, mark, -1):
                raise RuntimeError(f"llama.cpp cannot go back from {self.past[seq]} tokens to {mark}")
        self.past = list(self.marks)


def prefill(engine, prompts: list[list[int]], **setting) -> dict:
    """Evaluate prompts in empty streams, all in one batch, up to and with the choice of their first tokens.

    Returns seconds and ids, the chosen token of the first stream."""
    streams = engine.streams(len(prompts), **setting)
    streams.clear()
    streams.feed([prompt[:1] for prompt in prompts])  # wakes the threads and draws the weights back into the caches
    streams.clear()
    begin = time.perf_counter()
    tokens = streams.feed(prompts)
    return {"seconds": time.perf_counter() - begin, "ids": tokens[:1]}


def decode(engine, prompts: list[list[int]], steps: int, **setting) -> dict:
    """Continue streams greedily behind their prompts, `steps` evaluations of one token per stream.

    Returns seconds and ids, the tokens of the first stream, the one after its prompt included."""
    streams = engine.streams(len(prompts), **setting)
    tokens = streams.after(prompts)
    streams.feed([[token] for token in tokens])  # wakes the threads and draws the weights back into the caches
    streams.rewind()
    ids, begin = [tokens[0]], time.perf_counter()
    for _ in range(steps):
        tokens = streams.feed([[token] for token in tokens])
        ids.append(tokens[0])
    return {"seconds": time.perf_counter() - begin, "ids": ids}


def memory() -> dict:
    """Resident bytes of this process, now and at their peak (Linux)."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {"now": int(lines["VmRSS"].split()[0]) * 1024, "peak": int(lines["VmHWM"].split()[0]) * 1024}


def timed(call, **arguments) -> dict:
    begin = time.perf_counter()
    call(**arguments)
    return {"seconds": time.perf_counter() - begin}


COMMANDS = {
    "load": lambda engine, **arguments: timed(engine.load, **arguments),
    "tokenizer": lambda engine: timed(engine.tokenizer),
    "tokenize": lambda engine, text: {"ids": engine.tokenize(text)},
    "prefill": prefill,
    "decode": decode,
    "ceilings": lambda engine: engine.ceilings(),
    "work": lambda engine: {"work": engine.work()},
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
        reply({"memory": memory()} | engine.about())  # before the code's bytes are read for their hash
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
    name, threads, *isa = sys.argv[1:]
    serve(lambda: ENGINES[name](int(threads), *isa), sys.stdin, answers)
