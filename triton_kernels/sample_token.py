"""Draws of tokens, one for each row of logits; formula in ops/sample_token.py.

A program owns BLOCK logits of a row, and what has to be known of all of them goes through memory: the best of each
block, then where top-k and top-p cut, then what is left of each block, among which one program draws. Nothing is
sorted. A cut is a place in the order of all floats, largest first, which is found digit by digit: the elements whose
place begins with the digits found so far are weighed by their next one (`weigh_kernel`), and the digit at which the
running sum reaches what is wanted is that of the cut (`settle_kernel`).

Masses are whole multiples of 2^-40 of the likeliest token's: sums are exact in whatever order they are made, so a draw
repeats. A token less likely than that has none, which takes less than 3e-7 from the probability of the others together.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops.registry import count_call, implement
from dasllama_torch.ops.sample_token import _check as check
from dasllama_torch.ops.sample_token import _check_rows as check_rows
from dasllama_torch.ops.sample_token import sample_token as op
from dasllama_torch.ops.sample_token import sample_tokens as op_rows
from dasllama_torch.triton_kernels.functions import exp
from dasllama_torch.triton_kernels.launch import on_device
from dasllama_torch.triton_kernels.ordering import LAST, of_order, ordered, rank
from dasllama_torch.triton_kernels.rehearsal import rehearsed

BLOCK = 4096
SEEN = 64  # of the tokens seen, a program's
DIGITS = ((21, 11), (10, 11), (0, 10))  # of a place: shift, bits
BINS = 1 << 11
COPIES = 4  # of the bins, so that fewer programs wait for each other

UNIT = tl.constexpr(2.0**40)
PLACES = tl.constexpr(1 << 32)
INFINITE = tl.constexpr(0x7F800000)  # `ordered` of +infinity; of -infinity: -1 less this


@triton.jit
def _best(tops, n_blocks, PARTS: tl.constexpr):
    """The rank of the likeliest of all."""
    b = tl.arange(0, PARTS)
    return tl.max(tl.load(tops + b, mask=b < n_blocks, other=LAST), 0)


@triton.jit
def _value(best):
    return of_order((best >> 32).to(tl.int32))


@triton.jit
def _place(v):
    """int64 below 2^32: larger floats come first."""
    return 0x7FFFFFFF - ordered(v).to(tl.int64)


@triton.jit
def _value_at(place):
    return of_order((0x7FFFFFFF - place).to(tl.int32))


@triton.jit
def _likelihood(v, top, scale):
    """f32, of the likeliest token 1. What is no number counts as that, too: then nothing is drawn."""
    return exp(tl.minimum(v - top, 0.0) * scale)


@triton.jit
def _mass(likelihood):
    return (likelihood * UNIT).to(tl.int64)


@triton.jit
def _row(size):
    """The first of a row's `size` elements; rows are the grid's second dimension."""
    return tl.program_id(1).to(tl.int64) * size


@triton.jit
def _share(total, high, low):
    """The part of total int64 that a number in [0, 1) is, given as the upper 22 and lower 31 bits of its 53."""
    number = (high.to(tl.uint64) << 42) | (low.to(tl.uint64) << 11)
    return tl.umulhi(total.to(tl.uint64), number).to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def penalize_kernel(out, x, seen, n, V, repetition, presence, frequency, TILE: tl.constexpr):
    """out: a copy of x [rows, V]. seen: int64 [rows, n]; equal ids write the same number. An id outside of x is left
    alone."""
    out, x, seen = out + _row(V), x + _row(V), seen + _row(n)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    id_ = tl.load(seen + i, mask=i < n, other=-1)
    count = tl.zeros([TILE], tl.int32)
    for first in range(0, n, TILE):
        j = first + tl.arange(0, TILE)
        others = tl.load(seen + j, mask=j < n, other=-1)
        count += tl.sum((id_[:, None] == others[None, :]).to(tl.int32), 1)
    known = (id_ >= 0) & (id_ < V)
    v = tl.load(x + id_, mask=known, other=0.0)
    v = tl.where(v > 0, v / repetition, v * repetition) - presence - frequency * count.to(tl.float32)
    tl.store(out + id_, v, mask=known)


@triton.jit
def top_kernel(tops, x, V, BLOCK: tl.constexpr):
    """tops: int64 [rows, blocks], the rank of each one's likeliest token: the lower id first among equals."""
    tops, x = tops + _row(tl.num_programs(0)), x + _row(V)
    b = tl.program_id(0)
    i = b * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < V, other=0.0)
    tl.store(tops + b, tl.max(tl.where(i < V, rank(v, i), LAST), 0))


@triton.jit
def _store_token(token, id_, best):
    """id, or -1 where the best rank says that the logits are no distribution."""
    key = best >> 32
    tl.store(token, tl.where((key < INFINITE) & (key > -1 - INFINITE), id_, -1).to(tl.int64))


@triton.jit
def greedy_kernel(token, tops, n_blocks, PARTS: tl.constexpr):
    best = _best(tops + _row(n_blocks), n_blocks, PARTS)
    _store_token(token + tl.program_id(1), 0x7FFFFFFF - (best & 0x7FFFFFFF), best)


@triton.jit
def weigh_kernel(
    bins, cut, within, tops, x, n_blocks, V, scale,
    SHIFT: tl.constexpr, BITS: tl.constexpr, BY_MASS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """bins: int64 [rows, COPIES, BINS], where masses, or numbers, of elements are added by the next digit of their
    place if it begins as cut[0] of the row does. within: the cut before, as `settle_kernel` leaves it in the end, or
    None."""
    bins, cut, tops, x = bins + _row(COPIES * BINS), cut + _row(2), tops + _row(n_blocks), x + _row(V)
    b = tl.program_id(0)
    i = b * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < V, other=0.0)
    place, prefix = _place(v), tl.load(cut)
    taken = (i < V) & (place >> (SHIFT + BITS) == prefix)
    bins += b % COPIES * BINS
    weight = tl.full([BLOCK], 1, tl.int64)
    if BY_MASS:
        top = _value(_best(tops, n_blocks, PARTS))
        weight = _mass(_likelihood(v, top, scale))
        if within is not None:
            last, count = tl.load(within + _row(2)), tl.load(within + _row(2) + 1)
            taken &= place < last
            rest = count * _mass(_likelihood(_value_at(last), top, scale))  # of the equals at the cut before
            here = (b == 0) & (last >> (SHIFT + BITS) == prefix)
            tl.atomic_add(bins + (last >> SHIFT & ((1 << BITS) - 1)), rest, mask=here, sem="relaxed")
    tl.atomic_add(bins + (place >> SHIFT & ((1 << BITS) - 1)), weight, mask=taken & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize=["k", "high", "low"])
def settle_kernel(
    cut, bins, tops, n_blocks, scale, k, high, low,
    SHIFT: tl.constexpr, BITS: tl.constexpr, BY_MASS: tl.constexpr, PARTS: tl.constexpr,
    BINS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """One program to a row. cut: int64 [rows, 2], digits found so far, and what the elements behind them have to weigh:
    in the beginning k of them, or the share (high, low) of all mass; in the end how many of those that have the cut's
    place stay. Leaves the bins empty."""
    cut, bins, tops = cut + _row(2), bins + _row(COPIES * BINS), tops + _row(n_blocks)
    d = tl.arange(0, BINS)
    at = tl.arange(0, COPIES)[:, None] * BINS + d[None, :]
    weight = tl.sum(tl.load(bins + at), 0)
    tl.store(bins + at, tl.zeros([COPIES, BINS], tl.int64))
    prefix, wanted = tl.load(cut), tl.load(cut + 1)
    if SHIFT + BITS == 32:
        wanted = tl.maximum(_share(tl.sum(weight, 0), high, low), 1) if BY_MASS else k.to(tl.int64)
    digit = tl.sum((tl.cumsum(weight, 0) < wanted).to(tl.int64), 0)
    wanted -= tl.sum(tl.where(d < digit, weight, 0), 0)
    place = prefix << BITS | digit
    if BY_MASS and SHIFT == 0:
        each = _mass(_likelihood(_value_at(place), _value(_best(tops, n_blocks, PARTS)), scale))
        wanted = (wanted + each - 1) // tl.maximum(each, 1)
    tl.store(cut, place)
    tl.store(cut + 1, wanted)


@triton.jit
def _left(x, first, V, top, scale, floor, cut, BLOCK: tl.constexpr):
    """Of BLOCK elements from `first` on: masses of those before the cut, or of all, and 1 for each at the cut; nothing
    for those less likely than floor."""
    i = first + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < V, other=0.0)
    likelihood = _likelihood(v, top, scale)
    stays = (i < V) & (likelihood >= floor)
    last = PLACES if cut is None else tl.load(cut)
    place = _place(v)
    return tl.where(stays & (place < last), _mass(likelihood), 0), (stays & (place == last)).to(tl.int64)


@triton.jit
def parts_kernel(
    parts, tops, cut, x, n_blocks, V, scale, floor, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """parts: int64 [rows, blocks, 2], the sums of what `_left` gives."""
    parts, tops, x = parts + _row(2 * n_blocks), tops + _row(n_blocks), x + _row(V)
    if cut is not None:
        cut += _row(2)
    b = tl.program_id(0)
    mass, equal = _left(x, b * BLOCK, V, _value(_best(tops, n_blocks, PARTS)), scale, floor, cut, BLOCK)
    tl.store(parts + 2 * b, tl.sum(mass, 0))
    tl.store(parts + 2 * b + 1, tl.sum(equal, 0))


@triton.jit(do_not_specialize=["high", "low"])
def draw_kernel(
    token, parts, tops, cut, x, n_blocks, V, scale, floor, high, low, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program to a row: the element that the number (high, low) falls on, in the running sum of all masses that are
    left. numbers: int64 [rows, 2], each row's own, or None."""
    parts, tops, x = parts + _row(2 * n_blocks), tops + _row(n_blocks), x + _row(V)
    if cut is not None:
        cut += _row(2)
    if numbers is not None:
        high, low = tl.load(numbers + _row(2)), tl.load(numbers + _row(2) + 1)
    b = tl.arange(0, PARTS)
    best = _best(tops, n_blocks, PARTS)
    top = _value(best)
    mass = tl.load(parts + 2 * b, mask=b < n_blocks, other=0)
    if cut is not None:  # of those at the cut the first ones stay
        each = _mass(_likelihood(_value_at(tl.load(cut)), top, scale))
        equals = tl.load(parts + 2 * b + 1, mask=b < n_blocks, other=0)
        kept = tl.load(cut + 1) - (tl.cumsum(equals, 0) - equals)
        kept = tl.minimum(tl.maximum(kept, 0), equals)
        mass += kept * each
    goal = _share(tl.sum(mass, 0), high, low)
    block = tl.sum((tl.cumsum(mass, 0) <= goal).to(tl.int32), 0)
    goal -= tl.sum(tl.where(b < block, mass, 0), 0)
    masses, equal = _left(x, block * BLOCK, V, top, scale, floor, cut, BLOCK)
    if cut is not None:
        stay = tl.cumsum(equal, 0) <= tl.sum(tl.where(b == block, kept, 0), 0)
        masses += tl.where(stay, equal * each, 0)
    chosen = tl.sum((tl.cumsum(masses, 0) <= goal).to(tl.int32), 0)
    _store_token(token + tl.program_id(1), block * BLOCK + chosen, best)


@implement(op, "CUDA")
@rehearsed
def sample_token(
    logits: Tensor,
    seen: Tensor,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draw: float,
) -> Tensor:
    check(logits, seen, temp, top_k, top_p, min_p, draw)
    count_call("sample_token", "triton")
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    return _draw(logits[None], seen[None], penalties, temp, top_k, top_p, min_p, _bits(draw))[0]


@implement(op_rows, "CUDA")
@rehearsed
def sample_tokens(
    logits: Tensor,
    seen: Tensor,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draws: Sequence[float],
) -> Tensor:
    check_rows(logits, seen, temp, top_k, top_p, min_p, draws)
    count_call("sample_tokens", "triton")
    penalties, numbers = (repetition_penalty, presence_penalty, frequency_penalty), None
    if temp > 0:
        numbers = torch.tensor(list(map(_bits, draws)), dtype=torch.int64).to(logits.device, non_blocking=True)
    return _draw(logits, seen, penalties, temp, top_k, top_p, min_p, numbers)


def _draw(
    logits: Tensor,
    seen: Tensor,
    penalties: tuple[float, float, float],
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    number: tuple[int, int] | Tensor | None,
) -> Tensor:
    """Ids int64 [rows]. number: that of all rows, as `_bits` has it, or int64 [rows, 2] of them, or None for temp 0."""
    given, (rows, V) = logits.contiguous(), logits.shape
    shared, own = (number, None) if isinstance(number, tuple) else ((0, 0), number)
    n_blocks = triton.cdiv(V, BLOCK)
    PARTS = triton.next_power_of_2(max(n_blocks, 2))
    token, tops = seen.new_empty(rows), seen.new_empty(rows, n_blocks)
    with on_device(given):
        x = given
        if n := seen.shape[1]:
            x = given.clone()
            penalize_kernel[(triton.cdiv(n, SEEN), rows)](
                x, given, seen.contiguous(), n, V, *penalties, SEEN, num_warps=4
            )
        top_kernel[(n_blocks, rows)](tops, x, V, BLOCK, num_warps=8)
        if temp == 0:
            greedy_kernel[(1, rows)](token, tops, n_blocks, PARTS, num_warps=1)
            return token
        # Neither 0 nor infinity, whose products with infinity and 0 are no numbers.
        scale = min(max(1 / temp, 2.0**-126), torch.finfo(torch.float32).max)
        cut, bins = None, None
        for by_mass in (False, True):
            if by_mass and top_p < 1 or not by_mass and 0 < top_k < V:
                within, cut = cut, seen.new_zeros(rows, 2)
                bins = seen.new_zeros(rows, COPIES, BINS) if bins is None else bins
                for digit in DIGITS:
                    weigh_kernel[(n_blocks, rows)](
                        bins, cut, within, tops, x, n_blocks, V, scale, *digit, by_mass, PARTS, BLOCK, BINS, COPIES,
                        num_warps=8,
                    )  # fmt: skip
                    settle_kernel[(1, rows)](
                        cut, bins, tops, n_blocks, scale, top_k, *_bits(top_p), *digit, by_mass, PARTS, BINS, COPIES,
                        num_warps=8,
                    )  # fmt: skip
        parts = seen.new_empty(rows, n_blocks, 2)
        parts_kernel[(n_blocks, rows)](parts, tops, cut, x, n_blocks, V, scale, min_p, PARTS, BLOCK, num_warps=8)
        draw_kernel[(1, rows)](
            token, parts, tops, cut, x, n_blocks, V, scale, min_p, *shared, own, PARTS, BLOCK, num_warps=8
        )
    return token


def _bits(number: float) -> tuple[int, int]:
    """A number in [0, 1) to 53 bits, the upper 22 and the lower 31."""
    return divmod(int(min(number, 1 - 2**-53) * 2**53), 1 << 31)
