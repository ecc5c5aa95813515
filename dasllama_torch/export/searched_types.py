"""Floats to types whose scales are searched for, K-types and IQ4_NL: the formulas of ggml's quantizers without an
importance matrix (`quantize_row_q2_K_ref` to `quantize_row_q6_K_ref` and `quantize_iq4_nl` in ggml-quants.c), for many
blocks at once.

A block of a K-type is 16 groups of 16 or 8 of 32. Each group gets a scale, or a scale and a minimum, that make its
weighted squared error small; these are rounded to codes of the block's two f16, and the elements then to codes of what
came of that. Sums are folded in another order than ggml's, so a block may rarely get another of two equally good
scales. m blocks, g groups, n elements of a group.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dasllama_torch.ops import ggml_types as t
from dasllama_torch.ops.codebooks import IQ4_VALUES

_AT_ONCE = 1 << 18  # elements: what a search goes through many times stays in the processor's cache
_EPS = 1e-15  # below it a group is all zero


def pack(x: Tensor, qtype: int) -> Tensor:
    """x f32 [..., K] -> u8 [..., row_bytes] of a type of `SEARCHED`. K: a multiple of its block."""
    block = t.GGML_TYPES[qtype].block
    parts = [_PACKERS[qtype](part) for part in x.reshape(-1, block).split(_AT_ONCE // block)]
    return torch.cat(parts).reshape(*x.shape[:-1], t.row_bytes(qtype, x.shape[-1]))


# ---- searches -------------------------------------------------------------------------------------------------------


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / b)


def _top(x: Tensor) -> Tensor:
    """The element of largest magnitude of each group, the first of equals. [m, g, n] -> [m, g, 1]."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _search(x: Tensor, targets: Iterable[float], nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """The scale [m, g] of elements [m, g, n], each weighted by its square, that leaves the least error. A try brings
    the largest element of a group to one of the targets, takes the codes that are nearest, and fits the scale to
    these; of equals the first counts. nearest: what the codes of scaled elements stand for."""
    weights, top = x * x, _top(x)
    scale = best = torch.zeros_like(x[..., 0])
    for target in targets:
        found = nearest(x * (target / top))
        lx, ll = (weights * x * found).sum(-1), (weights * found * found).sum(-1)
        better = (ll > 0) & (lx * lx > best * ll)
        scale, best = torch.where(better, lx / ll, scale), torch.where(better, lx / ll * lx, best)
    return torch.where(top.squeeze(-1).abs() < _EPS, 0.0, scale)


def _scale(x: Tensor, levels: int) -> Tensor:
    """The scale [m, g] of codes -levels ... levels - 1, the best of 19 tries around the one that the largest element
    suggests (`make_qx_quants`)."""
    targets = (-(levels + 0.1 * step) for step in (0, *range(-9, 0), *range(1, 10)))
    return _search(x, targets, lambda scaled: scaled.round().clamp(-levels, levels - 1))


def _scale_by_turns(x: Tensor, levels: int) -> Tensor:
    """The scale [m, g] of codes -levels ... levels - 1, elements weighted by their squares: codes change one by one as
    long as that helps, five rounds at most (`make_q3_quants`)."""
    weights, top = x * x, _top(x)
    codes = (x * (-levels / top)).round().clamp(-levels, levels - 1)
    lx, ll = (weights * x * codes).sum(-1), (weights * codes * codes).sum(-1)
    for _ in range(5):
        for i in range(x.shape[-1]):
            w, v, code = weights[..., i], x[..., i], codes[..., i]
            rest_lx, rest_ll = lx - w * v * code, ll - w * code * code
            new = (v * rest_ll / rest_lx).round().clamp(-levels, levels - 1)
            new_lx, new_ll = rest_lx + w * v * new, rest_ll + w * new * new
            better = (rest_lx > 0) & (new != code) & (new_ll > 0) & (new_lx * new_lx * ll > lx * lx * new_ll)
            codes[..., i] = torch.where(better, new, code)
            lx, ll = torch.where(better, new_lx, lx), torch.where(better, new_ll, ll)
    return torch.where(top.squeeze(-1).abs() < _EPS, 0.0, _ratio(lx, ll))


def _scale_and_minimum(
    x: Tensor, weights: Tensor, levels: int, first: float, tries: int, absolute: bool
) -> tuple[Tensor, Tensor]:
    """Scale and minimum, [m, g] each, both at least 0, such that x is about scale * code - minimum with codes 0 ...
    levels: the best of tries at (first + 0.1 * try + levels) steps from the best minimum so far to the largest
    element, each followed by a least-squares fit (`make_qkx2_quants`). absolute: errors count by magnitude, else by
    their squares."""
    low, high = x.amin(-1).clamp(max=0), x.amax(-1)
    total, total_x = weights.sum(-1), (weights * x).sum(-1)

    def codes_at(steps: float, minimum: Tensor) -> Tensor:
        inverse = steps / (high - minimum)
        return ((x - minimum.unsqueeze(-1)) * inverse.unsqueeze(-1)).round().clamp(0, levels)

    def error(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        apart = scale.unsqueeze(-1) * codes + minimum.unsqueeze(-1) - x
        return (weights * (apart.abs() if absolute else apart * apart)).sum(-1)

    scale, minimum = (high - low) / levels, low
    best = error(codes_at(levels, low), scale, low)
    for step in range(tries):
        codes = codes_at(first + 0.1 * step + levels, minimum)
        lw, ll, lx = (weights * codes).sum(-1), (weights * codes * codes).sum(-1), (weights * codes * x).sum(-1)
        determinant = total * ll - lw * lw
        new_minimum = (ll * total_x - lw * lx) / determinant
        above = new_minimum > 0
        new_scale = torch.where(above, lx / ll, (total * lx - total_x * lw) / determinant)
        new_minimum = new_minimum.clamp(max=0)
        found = error(codes, new_scale, new_minimum)
        better = (determinant > 0) & (found < best)
        scale, minimum = torch.where(better, new_scale, scale), torch.where(better, new_minimum, minimum)
        best = torch.where(better, found, best)
    flat = high == low
    return torch.where(flat, 0.0, scale), -torch.where(flat, low, minimum)


# ---- types ----------------------------------------------------------------------------------------------------------


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _codes_of(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Positive values [m, g] of each group as codes 0 ... levels of one f16 for the block: codes, and the f16 [m,
    1].
    """
    largest = values.amax(-1, keepdim=True).clamp(min=0)
    codes = (values * _ratio(torch.tensor(float(levels)), largest)).round().clamp(max=levels)
    return codes, (largest / levels).half()


def _with_minimum(x: Tensor, scale: Tensor, minimum: Tensor, levels: int) -> Tensor:
    """Codes u8 [m, 256] of elements in groups [m, g, n], where each has scale and minimum [m, g]."""
    codes = ((x + minimum.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, levels).nan_to_num(nan=0.0)
    return codes.flatten(1).to(torch.uint8)


def _signed(x: Tensor, scale: Tensor, levels: int) -> Tensor:
    """Codes u8 [m, 256] of elements in groups [m, g, n] with scale [m, g]: -levels ... levels - 1, plus levels."""
    codes = (x / scale.unsqueeze(-1)).round().clamp(-levels, levels - 1).nan_to_num(nan=0.0)
    return (codes.flatten(1) + levels).to(torch.uint8)


def _two_bits(codes: Tensor) -> Tensor:
    """u8 [m, 256], 2 bits each -> [m, 64]: of each 128, byte l holds elements l, l + 32, l + 64 and l + 96."""
    a, b, c, d = codes.unflatten(1, (2, 4, 32)).unbind(2)
    return (a | b << 2 | c << 4 | d << 6).flatten(1)


def _q2_k(x: Tensor) -> Tensor:
    x = x.unflatten(1, (16, 16))
    scales, minima = _scale_and_minimum(x, x.abs(), 3, -0.5, 16, absolute=True)
    (s, d), (m, d_min) = _codes_of(scales, 15), _codes_of(minima, 15)
    codes = _with_minimum(x, d.float() * s, d_min.float() * m, 3)
    return torch.cat([s.to(torch.uint8) | m.to(torch.uint8) << 4, _two_bits(codes), _bytes(d), _bytes(d_min)], 1)


def _q3_k(x: Tensor) -> Tensor:
    x = x.unflatten(1, (16, 16))
    scales = _scale_by_turns(x, 4)
    inverse = _ratio(torch.tensor(-32.0), scales.gather(1, scales.abs().argmax(1, keepdim=True)))
    s = (scales * inverse).round().clamp(-32, 31)
    d = _ratio(torch.tensor(1.0), inverse).half()
    codes = _signed(x, d.float() * s, 4)
    bits = (codes >> 2).unflatten(1, (8, 32))  # the third bit of each, bit j of byte l for element 32 j + l
    high = sum(bits[:, j] << j for j in range(8))
    # Scales of 6 bits: the low 4 of 8 and 8, then the high 2, four to a byte.
    u = (s + 32).to(torch.uint8)
    low = (u[:, :8] & 15) | (u[:, 8:] & 15) << 4
    tops = u >> 4
    top = tops[:, :4] | tops[:, 4:8] << 2 | tops[:, 8:12] << 4 | tops[:, 12:] << 6
    return torch.cat([high, _two_bits(codes & 3), low, top, _bytes(d)], 1)


def _fine(x: Tensor, levels: int, first: float, tries: int) -> tuple[Tensor, Tensor]:
    """What Q4_K and Q5_K share: the header u8 [m, 16], two f16 and 8 scales and 8 minima of 6 bits, and codes u8
    [m, 8, 32]."""
    x = x.unflatten(1, (8, 32))
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    scales, minima = _scale_and_minimum(x, weights, levels, first, tries, absolute=False)
    (s, d), (m, d_min) = _codes_of(scales, 63), _codes_of(minima, 63)
    codes = _with_minimum(x, d.float() * s, d_min.float() * m, levels)
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    first4 = torch.cat([s[:, :4] | (s[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6], 1)
    last4 = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return torch.cat([_bytes(d), _bytes(d_min), first4, last4], 1), codes.unflatten(1, (8, 32))


def _nibbles(codes: Tensor) -> Tensor:
    """u8 [m, 8, 32], 4 bits each -> [m, 128]: groups 0 and 1 share bytes, 2 and 3, and so on."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).flatten(1)


def _q4_k(x: Tensor) -> Tensor:
    header, codes = _fine(x, 15, -1.0, 21)
    return torch.cat([header, _nibbles(codes)], 1)


def _q5_k(x: Tensor) -> Tensor:
    header, codes = _fine(x, 31, -0.5, 16)
    high = sum((codes[:, j] >> 4) << j for j in range(8))
    return torch.cat([header, high, _nibbles(codes & 15)], 1)


def _q6_k(x: Tensor) -> Tensor:
    x = x.unflatten(1, (16, 16))
    scales = _scale(x, 32)
    inverse = _ratio(torch.tensor(-128.0), scales.gather(1, scales.abs().argmax(1, keepdim=True)))
    s = (scales * inverse).round().clamp(max=127)
    d = _ratio(torch.tensor(1.0), inverse).half()
    codes = _signed(x, d.float() * s, 32).unflatten(1, (2, 4, 32))  # of each 128, four runs of 32
    a, b, c, e = codes.unbind(2)
    low = torch.stack([(a & 15) | (c & 15) << 4, (b & 15) | (e & 15) << 4], 2).flatten(1)
    high = (a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (e >> 4) << 6).flatten(1)
    return torch.cat([low, high, _bytes(s.to(torch.int8)), _bytes(d)], 1)


def _iq4_nl(x: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    middles = (values[1:] + values[:-1]) / 2

    def codes_of(scaled: Tensor) -> Tensor:
        return torch.bucketize(scaled, middles, right=True)

    targets = (-IQ4_VALUES[0], *(IQ4_VALUES[0] + step for step in range(-7, 8)))
    scale = _search(x, targets, lambda scaled: values[codes_of(scaled)]).unsqueeze(-1)
    codes = codes_of(x * _ratio(torch.tensor(1.0), scale)).to(torch.uint8)
    return torch.cat([_bytes(scale.half()), codes[:, :16] | codes[:, 16:] << 4], 1)


_PACKERS: dict[int, Callable[[Tensor], Tensor]] = {
    t.Q2_K: _q2_k,
    t.Q3_K: _q3_k,
    t.Q4_K: _q4_k,
    t.Q5_K: _q5_k,
    t.Q6_K: _q6_k,
    t.IQ4_NL: _iq4_nl,
}
SEARCHED = tuple(_PACKERS)
