"""How far two distributions over the next token are apart. T rows, V tokens of the vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16  # at a time: in f64, 16 rows of 262,144 tokens take 34 MB


class Divergence(NamedTuple):
    """Of each row, f64 [T]. kl: KL(reference || found) in nats (Kullback and Leibler 1951). top1: 1 where both have the
    same likeliest token, else 0. overlap: how much of the reference's k likeliest tokens is among the other's k.
    """

    kl: Tensor
    top1: Tensor
    overlap: Tensor


def divergence(found: Tensor, reference: Tensor, k: int) -> Divergence:
    """Of logits [T, V] of any float type; the arithmetic is f64."""
    parts = zip(found.split(ROWS), reference.split(ROWS), strict=True)
    return Divergence(*map(torch.cat, zip(*(_rows(a, b, k) for a, b in parts), strict=True)))


def _rows(found: Tensor, reference: Tensor, k: int) -> Divergence:
    found, reference = found.double(), reference.double()
    p, q = reference.log_softmax(-1), found.log_softmax(-1)
    ours, theirs = found.topk(k, -1).indices, reference.topk(k, -1).indices
    return Divergence(
        kl=(p.exp() * (p - q)).sum(-1),
        top1=(ours[:, 0] == theirs[:, 0]).double(),
        overlap=(ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).double().mean(-1),
    )
