"""Kernels that a forward misses are compiled together. Skipped without a GPU; `make test-cuda` runs it."""

from types import ModuleType

import pytest
import torch
from conftest import absent_gpu
from test_invariants import text

import dasllama_torch as dl
from dasllama_torch.engine import graphs
from dasllama_torch.ops import report, reset_report

absent_gpu()

PARAMS = dl.SamplingParams(temp=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


@pytest.fixture
def forget_kernels():
    """Have every kernel looked for again, in Triton's cache on the disk, except those of modules that are named."""
    from triton.runtime.jit import JITFunction

    from dasllama_torch import triton_kernels

    def forget(*kept):
        for module in vars(triton_kernels).values():
            for kernel in vars(module).values() if isinstance(module, ModuleType) else ():
                if isinstance(kernel, JITFunction) and kernel.__module__.rpartition(".")[2] not in kept:
                    kernel.device_caches.clear()

    return forget


@pytest.mark.parametrize("kept", [(), ("grouped_rows", "delta_chunks", "quantize_activation", "causal_conv1d")])
@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3moe", "gemma4_moe"])
def test_kernels_are_made_together(name, kept, oracle, forget_kernels, monkeypatch):
    """Those of a prompt and of the step behind it, and those of a draw; whichever are there already."""
    from triton import knobs

    model = dl.load_model(oracle / "tiny" / f"{name}.gguf", device="cuda")

    def run():
        graphs.forget(model)
        with dl.create_session(model) as session:
            first = session.eval(text(5, 30))
            reset_report()
            rows = [first, session.eval(text(6, 80)), *(session.eval([token]) for token in text(7, 3))]
            counts = report()
            return torch.stack(rows), counts, [token for token, _ in session.generate((), PARAMS, 4)]

    run()
    wanted = run()
    made, alone = [], []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, is_manual_warmup, fn, **_: (
        (made if is_manual_warmup else alone).append(fn.name)
    ))  # fmt: skip
    forget_kernels(*kept)
    found = run()
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]
    # Of each forward, and of the draw, the first that is missing; and it finds itself made.
    assert len(alone) <= 4
    assert len(made) > 10
