"""Captured steps: a forward of single rows on a GPU, captured as a graph of its work and replayed, so that the host
launches one thing in place of hundreds."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.engine.step_buffers import HandedOut, StepBuffers
from dasllama_torch.modules import base
from dasllama_torch.ops import registry

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

MAX_LOGITS = 4  # pieces of memory for logits; a stream needs two, as its logits last until the next are there


class CapturedStep:
    """A graph from a step's tensors to logits, which are copied to the host.

    refused: why there is none, or "". The first `run` evaluates the step by its modules, which compiles what kernels
    are still missing, and captures it afterwards.
    """

    def __init__(self, model: "CausalLM", pool: "KVPool", rows: int, blocks: int):
        self.buffers = StepBuffers(pool, rows, blocks)
        self.refused = ""
        self._device = pool.device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None  # [rows, V], where the graph writes them
        self._calls: Counter[tuple[str, str]] = Counter()  # of ops within it
        self._handed: list[HandedOut] = []
        self._held = [*model.parameters(), *model.buffers()]
        self._places = [tensor.data_ptr() for tensor in self._held]
        for module in model.modules():
            base.watch(module)

    def serves(self, sessions: Sequence["Session"]) -> bool:
        """Whether the weights lie where they lay (of their `data` no epoch tells), and there is room for all pages."""
        return self.buffers.fits(sessions) and [tensor.data_ptr() for tensor in self._held] == self._places

    @torch.inference_mode()
    def run(self, model: "CausalLM", sessions: Sequence["Session"], ids: Sequence[int]) -> list[Tensor]:
        """Logits f32 [V] after ids[i] at the end of sessions[i]."""
        with torch.cuda.device(self._device):
            self.buffers.write(sessions, ids)
            if self._graph is None:
                registry.count_call("step", "eager")
                rows = HandedOut(self._forward(model).cpu()).rows
                self._capture(model)
                return rows[: len(ids)]
            registry.count_call("step", "captured")
            registry.count_calls(self._calls)
            self._graph.replay()
            handed = next((each for each in self._handed if each.is_free), None) or self._more()
            handed.memory.copy_(self._logits, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return handed.rows[: len(ids)]

    def _forward(self, model: "CausalLM") -> Tensor:
        step = self.buffers.step
        with registry.fusing(self._device):
            hidden = model.get_decoder()(model.get_input_embeddings()(step.input_ids), step)
            logits = model.compute_logits(hidden)[0].float()
        step.forget()
        return logits

    def _capture(self, model: "CausalLM") -> None:
        graph = torch.cuda.CUDAGraph()
        with registry.counting() as self._calls:
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._logits = self._forward(model)
            except RuntimeError as error:  # an op that waits for the GPU, or allocates past torch
                torch.cuda.synchronize(self._device)
                self.refused = f"the GPU's work cannot be captured: {error}"
                return
        self._graph = graph

    def _more(self) -> "_Pinned":
        if len(self._handed) == MAX_LOGITS:
            del self._handed[0]
        self._handed.append(_Pinned(self._logits.shape))
        return self._handed[-1]


class _Pinned(HandedOut):
    """Logits in memory that the GPU writes to directly. memory: [rows, V]."""

    def __init__(self, shape: torch.Size):
        self.memory = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        super().__init__(self.memory)
