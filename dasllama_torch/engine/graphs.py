"""Recorded steps: a forward of 1, 2, 4 or 8 single rows is recorded once and then run again by the threads of the CPU
library, without Python or dispatcher between its ops.

A recorded step is what the modules did, op for op, on tensors that stay where they are: the step's inputs, which are
written anew for each step, the weights, the cache. Fewer rows than it has are filled up with inert ones. It serves as
long as the modules are what they were (`modules.base.epoch`) and the weights lie where they lay. Hooks, dispatch modes
and modules from elsewhere mean that the modules themselves run; so does an op that cannot be recorded. `ops.report()`
counts both under "step", as "recorded" and "eager". Logits are handed out where they were written; that memory is
written again once nobody can see it.

What a recorded step leaves out that the modules do: roundings of an activation that the op before has rounded already.
Prompts leave out the same (`sharing`), under the same conditions; their modules run as they are.

On a GPU the step is captured instead (`captured.py`), of up to 64 rows, under the same conditions and "captured" in the
report. What it launches depends on the room that it has for pages, so there is one for sessions that hold little, and
others for those that hold four times as much, and so on.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dasllama_torch.engine import captured
from dasllama_torch.engine.captured import CapturedStep
from dasllama_torch.engine.step_buffers import HandedOut, StepBuffers
from dasllama_torch.modules import base
from dasllama_torch.ops import registry
from dasllama_torch.ops.program import Program, recording
from dasllama_torch.ops.quant_linear import shared_activations

if TYPE_CHECKING:
    from dasllama_torch.cache.pool import KVPool
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

MAX_ROWS = 8  # of a recorded step; with more of them, what lies between the ops hardly counts
MAX_CAPTURED_ROWS = 64  # of a captured one
MAX_STEPS = 32  # recorded steps of one model that are kept: of seven numbers of rows in four rooms, and some more
LEAST_ROOM = 8  # pages of each of a captured step's sequences; the next rooms are four times as large each
MAX_HEADS = 4  # of a recorded step; a stream needs two, as its logits last until the next are there

enabled = True  # False: the modules themselves run, always
_profiles: list[list[tuple[str, float]]] | None = None
_models: weakref.WeakKeyDictionary["CausalLM", "RecordedSteps"] = weakref.WeakKeyDictionary()


def run(
    sessions: Sequence["Session"], ids: Sequence[int], record: bool = True, on_device: bool = False
) -> list[Tensor] | None:
    """Evaluate ids[i] at the end of sessions[i], whose pages reach that far: logits f32 [V] of each, on the CPU, or
    on_device where they were made.

    None, and nothing done, if no recorded step may do it, or without `record` if none stands ready. The results are
    those of the modules, to the bit.
    """
    model, pool = sessions[0].model, sessions[0].pool
    on_cpu = pool.device.type == "cpu"
    if not enabled or len(ids) > (MAX_ROWS if on_cpu else MAX_CAPTURED_ROWS) or is_watched():
        return None
    return sessions[0].steps.run(model, pool, sessions, ids, record, on_device)


def begin(
    sessions: Sequence["Session"], tokens: Tensor
) -> tuple[list[Tensor], Callable[[Sequence["Session"]], bool]] | None:
    """Begin, on a GPU, the step of tokens int64 [n] there, each at the end of a session, whose pages reach that far:
    logits f32 [V] of each, and whether those of some sessions may be used once the host knows the tokens. None, and
    nothing begun, if no captured step stands ready."""
    if not enabled or is_watched():
        return None
    steps = sessions[0].steps
    if not steps.lock.acquire(blocking=False):
        return None
    try:
        steps.refresh()
        step = steps.steps.get((sessions[0].pool, *_size(sessions)))
        if not isinstance(step, CapturedStep) or not step.serves(sessions):
            return None
        epoch, (logits, in_force) = steps.epoch, step.begin(sessions, tokens)
    finally:
        steps.lock.release()

    def is_as_ever(those: Sequence["Session"]) -> bool:
        return enabled and not is_watched() and (base.epoch(), registry.isa_epoch) == epoch and in_force(those)

    return logits, is_as_ever


@contextlib.contextmanager
def sharing(model: "CausalLM", rehearse: Callable[[], object] | None = None):
    """Context for a forward by the modules themselves: where nothing but their ops happens, one rounding of an
    activation serves all weights that take it (`quant_linear.shared_activations`), and `rehearse` may do the forward
    for kernels that are missing (`registry.preparing`)."""
    with contextlib.ExitStack() as stack:
        if _is_clear(model):
            stack.enter_context(shared_activations())
            if rehearse is not None:
                stack.enter_context(registry.preparing(model.device, rehearse))
        yield


def rehearse_step(sessions: Sequence["Session"]) -> None:
    """Do, on inert rows, the step that would evaluate a token at the end of each of the sessions, on a GPU."""
    if enabled and len(sessions) <= MAX_CAPTURED_ROWS:
        captured.rehearse(sessions[0].model, sessions[0].pool, *_size(sessions))


def _size(sessions: Sequence["Session"]) -> tuple[int, int]:
    """Rows, and pages of each, of the recorded step that serves the sessions; the CPU's serve any number of pages that
    they have room for: 0."""
    pool, rows = sessions[0].pool, 1 << (len(sessions) - 1).bit_length()
    if pool.device.type == "cpu":
        return rows, 0
    held = max([len(table) for session in sessions for table in session.sequence.tables], default=0)
    return rows, _room(held, _most(sessions))


def _most(sessions: Sequence["Session"]) -> int:
    """Pages that each of the sessions may come to hold."""
    return sessions[0].pool.blocks(max([session.n_ctx for session in sessions]))


def _room(held: int, most: int) -> int:
    """Pages that a captured step has room for whose sequences hold so many, and may come to hold `most`."""
    room = LEAST_ROOM
    while room < held:
        room *= 4
    return room if room == LEAST_ROOM else min(room, max(held, most))


def _is_clear(model: "CausalLM") -> bool:
    """Whether nothing but ops happens in the model's modules."""
    if not enabled or is_watched():
        return False
    steps = steps_of(model)
    if not steps.lock.acquire(blocking=False):
        return False
    try:
        steps.refresh()
        if not steps.clear and steps.obstacle is None:  # `run` looks again for what goes without an epoch that tells
            steps.look_at(model)
        return steps.clear
    finally:
        steps.lock.release()


def steps_of(model: "CausalLM") -> "RecordedSteps":
    """What `run` asks a session for: looking it up takes longer, after weights have swept the caches."""
    steps = _models.get(model)
    return _models.setdefault(model, RecordedSteps()) if steps is None else steps


def forget(model: "CausalLM") -> None:
    """Let go of the model's recorded steps, and of the weights that they hold on to."""
    steps_of(model).steps = {}


def _forget_all() -> None:
    for steps in list(_models.values()):
        steps.steps = {}


base.when_moving.append(_forget_all)


@contextlib.contextmanager
def profiled():
    """Context: each recorded step also appends its ops' names and seconds, in order, to the list that this yields."""
    global _profiles
    before, _profiles = _profiles, []
    try:
        yield _profiles
    finally:
        _profiles = before


def why_not(model: "CausalLM") -> str:
    """What about the model kept its last step of single rows from being recorded, or ""."""
    if model not in _models:
        return "no step has been evaluated"
    obstacle = _models[model].obstacle
    return obstacle.text if obstacle else ""


@dataclass(frozen=True)
class _Obstacle:
    """Why a step cannot be recorded. lasting: until the epoch changes; others may go without an epoch that tells."""

    text: str
    lasting: bool = True


class RecordedSteps:
    """The recorded steps of one model, by pool and `_size`, all of one epoch."""

    def __init__(self):
        self.steps: dict[tuple[KVPool, int, int], _RecordedStep | CapturedStep] = {}
        self.epoch = None
        self.obstacle: _Obstacle | None = None
        self.clear = False  # the modules were looked at in this epoch, and are our own and free of hooks
        self.lock = threading.Lock()  # the steps' tensors serve one thread at a time

    def run(self, model, pool, sessions, ids, record, on_device) -> list[Tensor] | None:
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self.refresh()
            size = _size(sessions)
            step = self.steps.get((pool, *size))
            if step is not None and step.serves(sessions):
                found = step.run(model, sessions, ids, on_device)
                if found is not None:
                    return found
            return self._record(model, pool, sessions, ids, size, on_device) if record else None
        finally:
            self.lock.release()

    def refresh(self) -> None:
        """Forget what was found out about modules that have changed."""
        epoch = base.epoch(), registry.isa_epoch
        if epoch != self.epoch:
            self.epoch, self.obstacle, self.clear, self.steps = epoch, None, False, {}

    def look_at(self, model) -> None:
        self.obstacle = find_obstacle(model)
        self.clear = self.obstacle is None

    def _record(self, model, pool, sessions, ids, size: tuple[int, int], on_device: bool) -> list[Tensor] | None:
        if self.obstacle and self.obstacle.lasting:
            return None
        self.look_at(model)
        if not self.clear:
            return None
        kind, steps = _RecordedStep if pool.device.type == "cpu" else CapturedStep, self.steps
        rows, blocks = size
        step = kind(model, pool, rows, blocks or _most(sessions))
        logits = step.run(model, sessions, ids, on_device)
        if step.refused:
            self.obstacle = _Obstacle(step.refused)
        else:
            if len(steps) == MAX_STEPS:
                steps.pop(next(iter(steps)))
            steps[pool, rows, blocks] = step  # forgotten with the others if modules have moved meanwhile
        return logits


class _Head(HandedOut):
    """A program from a step's hidden states to logits. rows: f32 [V] of each row, where the program writes them."""

    def __init__(self, program: Program, logits: Tensor):
        self.program = program
        super().__init__(logits)


class _RecordedStep:
    """Programs, and the tensors that they read their step from.

    body: from ids to the hidden states that the head takes, [1, rows, C]. heads: from these to logits, each into memory
    of its own. Logits are handed out where they were written, so a head serves again once they have been dropped.
    """

    def __init__(self, model: "CausalLM", pool: "KVPool", rows: int, blocks: int):
        self.buffers = StepBuffers(pool, rows, blocks)
        self.refused = ""
        self.body: Program | None = None
        self.hidden: Tensor | None = None
        self.heads: list[_Head] = []
        for module in model.modules():
            base.watch(module)

    def serves(self, sessions: Sequence["Session"]) -> bool:
        """Whether the weights lie where they lay (of their `data` no epoch tells), and there is room for all pages."""
        return self.buffers.fits(sessions) and self.body.in_place

    def run(
        self, model: "CausalLM", sessions: Sequence["Session"], ids: Sequence[int], on_device: bool = False
    ) -> list[Tensor]:
        """Logits f32 [V] after ids[i] at the end of sessions[i]. The first time the modules evaluate them. The device
        is the CPU."""
        self.buffers.write(sessions, ids)
        if self.body is None:
            registry.count_call("step", "eager")
            self.record_body(model)
            head = self.record_head(model)
            self.refused = self.body.refused or head.program.refused
            return head.rows[: len(ids)]
        registry.count_call("step", "recorded")
        free = None
        for head in self.heads:
            if head.is_free:
                free = head
                break
        if _profiles is not None:
            head = free or self.record_head(model)
            _profiles.append(self.body.profile() + head.program.profile())
            return head.rows[: len(ids)]
        self.body.run(free and free.program)
        return (free or self.record_head(model)).rows[: len(ids)]

    @torch.inference_mode()
    def record_body(self, model: "CausalLM") -> None:
        """Evaluate the step up to the head by the modules, so that `body` can do it again."""
        with shared_activations(), recording([*model.parameters(), *model.buffers()]) as self.body:
            step = self.buffers.step
            self.hidden = model.get_decoder()(model.get_input_embeddings()(step.input_ids), step)

    @torch.inference_mode()
    def record_head(self, model: "CausalLM") -> _Head:
        """Evaluate the head by its modules, so that it can be done again; the oldest of many heads is given up."""
        with recording() as program:
            logits = model.compute_logits(self.hidden)[0]
        if len(self.heads) == MAX_HEADS:
            del self.heads[0]
        self.heads.append(_Head(program, logits))
        return self.heads[-1]


def find_obstacle(model: nn.Module) -> _Obstacle | None:
    """What forbids to record a step of the modules as they are."""
    if placement := getattr(model, "placement", None):
        return _Obstacle(f"the model lies on two devices: {placement}")
    foreign_method = functools.cache(_foreign_method)  # a model has few classes and many modules
    for name, module in model.named_modules():
        name = name or "the model"
        # Others may do more than ops, and do not tell of their changes.
        if not isinstance(module, base.Watched) or not _is_ours(type(module).__module__):
            return _Obstacle(f"{name} is a {type(module).__name__}, which is not of this package")
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return _Obstacle(f"a hook of {name}", lasting=False)  # no epoch tells of its removal
        if foreign := foreign_method(type(module)):
            return _Obstacle(f"{name} has a {foreign} that is not of this package")
        own = [key for key, value in module.__dict__.items() if callable(value) and hasattr(type(module), key)]
        if own:
            return _Obstacle(f"{name} has a {own[0]} of its own")
        if module._compiled_call_impl is not None:
            return _Obstacle(f"{name} is compiled")
    return None


def _foreign_method(cls: type) -> str:
    """A method of a class of this package that others have put there, or ""."""
    for base_class in filter(lambda c: _is_ours(c.__module__), cls.__mro__):
        for name, method in vars(base_class).items():
            # A wrapper may have taken over the name of the module, but not its globals.
            home = getattr(method, "__globals__", {}).get("__name__", "")
            if callable(method) and not isinstance(method, type) and not _is_ours(home):
                return name
    return ""


def _is_ours(module: str) -> bool:
    return module.startswith("dasllama_torch.")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_watched() -> bool:
    """Whether somebody watches the ops or modules of this thread."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or nn.modules.module._has_any_global_hook()
