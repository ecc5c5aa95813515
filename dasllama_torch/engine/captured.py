"""Captured steps: a forward of single rows on a GPU, captured as a graph of its work and replayed, so that the host
launches one thing in place of hundreds."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.engine.step_buffers import HandedOut, StepBuffers
from dasllama_torch.modules import base
from dasllama_torch.ops import registry
from dasllama_torch.step import Step

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

MAX_LOGITS = 4  # pieces of memory for logits; a stream needs two, as its logits last until the next are there


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given; there is nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def rehearse(model: "CausalLM", pool: "KVPool", rows: int, blocks: int) -> None:
    """Do what a step of `rows` single rows does, on rows that are inert: nothing that stays is changed."""
    buffers = StepBuffers(pool, rows, blocks)
    buffers.write((), ())
    _forward(model, buffers.step)


def _forward(model: "CausalLM", step: Step) -> Tensor:
    """Logits f32 [rows, V]."""
    with registry.fusing(step.positions.device):
        hidden = model.get_decoder()(model.get_input_embeddings()(step.input_ids), step)
        logits = model.compute_logits(hidden)[0].float()
    step.forget()
    return logits


class CapturedStep:
    """A graph from a step's tensors to logits, which are copied to the host, or on the GPU where nobody there asks.

    refused: why there is none, or "". The first `run` evaluates the step by its modules, which compiles what kernels
    are still missing, and captures it afterwards. It holds on to the weights' memory until modules move or a step finds
    them elsewhere.
    """

    def __init__(self, model: "CausalLM", pool: "KVPool", rows: int, blocks: int):
        self.buffers = StepBuffers(pool, rows, blocks)
        self.refused = ""
        self._device, self._ids = pool.device, self.buffers.step.input_ids[0]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None  # [rows, V], where the graph writes them
        self._calls: Counter[tuple[str, str]] = Counter()  # of ops within it
        self._handed: list[HandedOut] = []
        self._held = [*model.parameters(), *model.buffers()]
        self._places = [tensor.data_ptr() for tensor in self._held]
        self._memory = [tensor.untyped_storage() for tensor in self._held]  # which `run` may read once more
        for module in model.modules():
            base.watch(module)

    def serves(self, sessions: Sequence["Session"]) -> bool:
        """Whether there is room for all pages and, where a step cannot be taken back, `is_in_place`."""
        return self.buffers.fits(sessions) and (not self.buffers.step.cache.states or self.is_in_place)

    @property
    def is_in_place(self) -> bool:
        """Whether the weights lie where they lay: of their `data` no epoch tells."""
        return list(map(torch.Tensor.data_ptr, self._held)) == self._places

    @torch.inference_mode()
    def run(
        self, model: "CausalLM", sessions: Sequence["Session"], ids: Sequence[int], on_device: bool = False
    ) -> list[Tensor] | None:
        """Logits f32 [V] after ids[i] at the end of sessions[i], on the CPU; or on_device, which waits for nothing.

        None if the weights are elsewhere now: then only a row of keys and values behind those that count was written.
        """
        with torch.cuda.device(self._device):
            self.buffers.write(sessions, ids, waits=not on_device)
            if self._graph is None:
                registry.count_call("step", "eager")
                step = self.buffers.step
                again = functools.partial(rehearse, model, step.cache, step.n_seqs, self.buffers.blocks)
                with registry.preparing(self._device, again):
                    logits = _forward(model, step)
                rows = logits.unbind() if on_device else HandedOut(logits.cpu()).rows
                self._capture(model)
                return list(rows[: len(ids)])
            self._graph.replay()
            # While the GPU works the host does what it would have to do before.
            if not self.is_in_place:
                torch.cuda.current_stream().synchronize()
                return None
            registry.count_call("step", "captured")
            registry.count_calls(self._calls)
            if on_device:
                return list(self._logits[: len(ids)].clone())
            handed = next((each for each in self._handed if each.is_free), None) or self._more()
            handed.memory.copy_(self._logits, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return handed.rows[: len(ids)]

    @torch.inference_mode()
    def begin(
        self, sessions: Sequence["Session"], tokens: Tensor
    ) -> tuple[list[Tensor], Callable[[Sequence["Session"]], bool]]:
        """Logits f32 [V] on the GPU after tokens int64 [n] there, each at the end of a session, and whether the weights
        are still what they were, for some of the sessions. Waits for nothing; a step that counts is counted then."""
        n = len(sessions)
        with torch.cuda.device(self._device):
            self.buffers.write(sessions, [0] * n, waits=False)
            self._ids[:n].copy_(tokens)
            self._graph.replay()
            logits = list(self._logits[:n].clone())
        # Who keeps what was begun keeps no weights, and no other session.
        versions, begun, counted = self._versions(), weakref.ref(self), False

        def in_force(those: Sequence["Session"]) -> bool:
            nonlocal counted
            step = begun()
            if step is None or step._versions() != versions or not step.buffers.fits(those) or not step.is_in_place:
                return False
            if not counted:
                registry.count_call("step", "captured")
                registry.count_calls(step._calls)
            counted = True
            return True

        return logits, in_force

    def _versions(self) -> int:
        """Grows when somebody writes to a weight."""
        return sum(0 if tensor.is_inference() else tensor._version for tensor in self._held)

    def _capture(self, model: "CausalLM") -> None:
        graph = torch.cuda.CUDAGraph()
        with registry.counting() as self._calls:
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._logits = _forward(model, self.buffers.step)
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
