"""Temperature of queries at positions beyond the context that a model was trained on."""

import torch
from torch import Tensor

from dasllama_torch.ops.registry import define


@define(fake=lambda positions, beta, original: positions.new_empty(positions.shape, dtype=torch.float32))
def query_temperature(positions: Tensor, beta: float, original: int) -> Tensor:
    """1 + beta * ln(1 + floor(positions / original)) of positions int32 or int64 [T], 0 or more -> f32 [T].

    Queries are multiplied by it (Llama 4's attention scaling, of which Ministral 3 uses this form); original > 0.
    """
    turns = torch.div(positions, original, rounding_mode="floor").double()
    return 1 + beta * torch.log1p(turns).float()
