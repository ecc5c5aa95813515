"""Where tests of Triton kernels run: on a GPU if there is one, else in Triton's interpreter on tensors of the CPU.

Tests call the functions of `dasllama_torch.triton_kernels`, which take tensors of either; what ops dispatch to is
tested on a GPU alone.
"""

import importlib.util

import torch
from conftest import absent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if importlib.util.find_spec("triton") is None:
    absent("Triton absent: pip install triton", whole_file=True)


def cases(all_of_them: list, *names: object) -> list:
    """All on a GPU; in the interpreter, which takes up to a second for each, those of these names."""
    if DEVICE == "cuda":
        return all_of_them
    return [case for case in all_of_them if getattr(case, "name", case) in names]


def guarded(t: torch.Tensor, *, before: int = 16, after: int = 16) -> torch.Tensor:
    """A copy on DEVICE with rows of NaN (bytes of ones) before and after it in memory."""
    size = t.element_size() * t[0].numel() if len(t) else 0
    memory = torch.full((before + after + len(t), size), 255, dtype=torch.uint8, device=DEVICE)
    view = memory[before : before + len(t)].view(t.dtype).view(t.shape)
    return view.copy_(t)


def ragged(t: torch.Tensor) -> torch.Tensor:
    """A copy on DEVICE whose rows, of the last dimension, have NaN between them."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 16), float("nan"), dtype=t.dtype, device=DEVICE)
    wide[..., : t.shape[-1]] = t.to(DEVICE)
    return wide[..., : t.shape[-1]]
