"""The model that a command line names, and the threads that it runs on."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .options import Mode
from .output import status

if TYPE_CHECKING:
    from dasllama_torch.modules.causal_lm import CausalLM


def resolve(model: str) -> Path:
    """The file of a `ModelArgument`, fetched if need be."""
    from dasllama_torch import hub

    return hub.resolve(model)


def start_torch(threads: int | None) -> None:
    """Import torch and set the number of threads: the one that was asked for; else torch's own
    choice, or fewer where the process is given fewer cores."""
    with status("starting torch"):
        import torch

        from dasllama_torch.threads import usable_cores
    if threads is not None:
        torch.set_num_threads(threads)
    elif not os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))


def load(model: str, mode: Mode = Mode.native, device: str = "cpu") -> tuple["CausalLM", Path]:
    """The model that a `ModelArgument` names, and its file."""
    import dasllama_torch as dl

    path = resolve(model)
    with status(f"loading {path.name}"):
        return dl.load_model(path, mode=mode.value, device=device, progress=False), path  # the status line shows it
