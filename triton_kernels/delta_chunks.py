"""The gated delta rule in chunks (Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464), for prompts: products of
matrices on the tensor cores in place of a step for each row. The formula is that of `ops.gated_delta_rule`.

Within a tile of at most BT rows of one sequence, with unit k and q, c_i = g_0 + ... + g_i, the state M before the tile
and "tril" for the part on and below the diagonal, what the rows take in is u, their results y, and the next state M':

    A_ij = beta_i e^(c_i - c_j) k_i k_j for j < i;    u = (1 + A)^-1 beta (v - e^c k M)
    y = e^c q M + tril(e^(c_i - c_j) q_i k_j) u;      M' = e^(c_last) M + sum over i of e^(c_last - c_i) k_i u_i

`tiles_kernel` makes the matrices before u, all tiles at once; `scan_kernel` goes through the tiles of a sequence, and a
program owns BV columns of a head's state. Everything is f32: the tensor cores get each number as three of bf16, which
hold its 24 bits. Sums c are f64, as differences of large ones are exponents. (1 + A)^-1 is put together from the
inverses of blocks of 1, 2, 4, ... rows, none of whose elements exceeds 1 where beta does not:
[[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]].

Rows are taken in the order of their slots, T of them, G key heads, H value heads; `cut_kernel` cuts them into tiles. A
slot out of range gives NaN, and nothing is written for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dasllama_torch.ops import gated_delta_rule as formulas
from dasllama_torch.triton_kernels import launch
from dasllama_torch.triton_kernels.functions import exp
from dasllama_torch.triton_kernels.launch import on_device

EPS, INTERPRETED = tl.constexpr(formulas.EPS), tl.constexpr(launch.INTERPRETED)
ROWS = 64  # of a tile
COLUMNS = 16  # of a state that a program owns
PROGRAMS = 16  # for a head's columns, which share its sequences
CHUNK = 1024
WIDEST = 256  # key dims: the tiles of more do not fit in shared memory


@triton.jit
def cut_kernel(counts, tiles, runs, slots, T, BT: tl.constexpr, CHUNK: tl.constexpr):
    """Cuts sorted slots [T] where they change and at multiples of BT: tile i is [tiles[i], tiles[i + 1]). A run is what
    lies between changes, of tiles [runs[i], runs[i + 1]). counts: of tiles, of runs. One program does it all."""
    n_tiles, n_runs = 0, 0
    for first in range(0, T, CHUNK):
        i = first + tl.arange(0, CHUNK)
        slot = tl.load(slots + i, mask=i < T, other=0)
        begins = (i < T) & ((i == 0) | (slot != tl.load(slots + i - 1, mask=(i > 0) & (i < T), other=0)))
        cut = begins | ((i < T) & (i % BT == 0))
        tile = n_tiles + tl.cumsum(cut.to(tl.int32), 0) - 1
        run = n_runs + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(tiles + tile, i, mask=cut)
        tl.store(runs + run, tile, mask=begins)
        n_tiles += tl.sum(cut.to(tl.int32), 0)
        n_runs += tl.sum(begins.to(tl.int32), 0)
    tl.store(tiles + n_tiles, T)
    tl.store(runs + n_runs, n_tiles)
    tl.store(counts, n_tiles)
    tl.store(counts + 1, n_runs)


@triton.jit
def _parts(x):
    """Three bf16 whose sum is x, by rounding, which leaves less to the products that are left out."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a, b, sums):
    if INTERPRETED:  # which has no products of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums)


@triton.jit
def _dot(a, b):
    """The f32 product of matrices in parts, without what is below 2^-24 of it."""
    sums = tl.zeros([a[0].shape[0], b[0].shape[1]], tl.float32)
    sums = _product(a[1], b[1], sums)
    sums = _product(a[2], b[0], sums)
    sums = _product(a[0], b[2], sums)
    sums = _product(a[1], b[0], sums)
    sums = _product(a[0], b[1], sums)
    return _product(a[0], b[0], sums)


@triton.jit
def _turned(a):
    return tl.trans(a[0]), tl.trans(a[1]), tl.trans(a[2])


@triton.jit
def _read(x, step, at, mask):
    """A matrix of zeros where the mask is not set, in parts, each `step` elements behind the one before."""
    first = tl.load(x + at, mask=mask, other=0.0)
    return first, tl.load(x + step + at, mask=mask, other=0.0), tl.load(x + 2 * step + at, mask=mask, other=0.0)


@triton.jit
def _write(x, step, at, v, mask):
    first, second, third = _parts(v)
    tl.store(x + at, first, mask=mask)
    tl.store(x + step + at, second, mask=mask)
    tl.store(x + 2 * step + at, third, mask=mask)


@triton.jit
def units_kernel(unit, step, x, x_row, x_head, order, T, D, scale, DP: tl.constexpr, BT: tl.constexpr):
    """unit [3, G, T, DP]: parts of x / |x| * scale, rows sorted, zeros from D on. A program owns BT rows of a head."""
    head = tl.program_id(1)
    c = tl.arange(0, DP)
    entry = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = entry < T
    t = tl.load(order + entry, mask=there, other=0)
    inside = there[:, None] & (c < D)[None, :]
    v = tl.load(x + (t * x_row + head * x_head)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v = v / tl.sqrt_rn(tl.sum(v * v, 1) + EPS)[:, None] * scale
    _write(unit, step, ((head * T + entry) * DP)[:, None] + c[None, :], v, there[:, None])


@triton.jit
def tiles_kernel(
    solve, score, step, fades, keys, queries, unit_step, g, g_row, beta, beta_row, order, slots, counts, tiles,
    T, S, G, H, DKP: tl.constexpr, BT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """solve [3, H, T, BT]: (1 + A)^-1 beta; score [3, H, T, BT]: what u is multiplied by for y; fades [H, 2, T]: e^c
    and e^(c_last - c). BT = 2^LEVELS."""
    h = tl.program_id(1)
    group = h // (H // G)
    i, c = tl.arange(0, BT), tl.arange(0, DKP)
    row, column = i[:, None], i[None, :]
    for tile in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        first = tl.load(tiles + tile)
        slot = tl.load(slots + first)
        if (slot >= 0) & (slot < S):
            entry = first.to(tl.int64) + i
            there = entry < tl.load(tiles + tile + 1)
            t = tl.load(order + entry, mask=there, other=0)
            gain = tl.load(beta + t * beta_row + h, mask=there, other=0.0).to(tl.float32)
            fade = tl.load(g + t * g_row + h, mask=there, other=0.0).to(tl.float64)
            fade = tl.where(fade < -1e4, -1e4, fade)  # forgets as much as -inf, whose differences are NaN
            past = tl.cumsum(fade, 0)
            of_row = fades + h.to(tl.int64) * 2 * T + entry
            tl.store(of_row, exp(past.to(tl.float32)), mask=there)
            tl.store(of_row + T, exp((tl.sum(fade, 0) - past).to(tl.float32)), mask=there)
            decay = tl.where(row >= column, past[:, None] - past[None, :], 0.0).to(tl.float32)
            decay = tl.where(row >= column, exp(decay), 0.0)

            at = ((group * T + entry) * DKP)[:, None] + c[None, :]
            key = _read(keys, unit_step, at, there[:, None])
            turned = _turned(key)
            within = tl.where(row > column, _dot(key, turned) * decay * gain[:, None], 0.0)
            solved = tl.where(row == column, 1.0, tl.where(row ^ column == 1, -within, 0.0))
            for level in range(1, LEVELS):  # from blocks of 2^level rows to such of twice as many
                siblings = (row >> level) ^ (column >> level) == 1
                known = _parts(solved)
                solved -= _dot(known, _parts(_dot(_parts(tl.where(siblings, within, 0.0)), known)))
            to = ((h * T + entry) * BT)[:, None] + column
            _write(solve, step, to, solved * gain[None, :], there[:, None])
            _write(score, step, to, _dot(_read(queries, unit_step, at, there[:, None]), turned) * decay, there[:, None])


@triton.jit
def scan_kernel(
    y, v, v_row, v_head, solve, score, step, fades, keys, queries, unit_step, state, order, slots, counts, tiles, runs,
    T, S, G, H, Dk, Dv, DKP: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """All is transposed here: columns of the state, of v and y lie along the first axis, which may have 16 of them."""
    h = tl.program_id(1)
    group = h // (H // G)
    i, c = tl.arange(0, BT), tl.arange(0, DKP)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    of_head = fades + h.to(tl.int64) * 2 * T
    for run in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        begin, end = tl.load(runs + run), tl.load(runs + run + 1)
        slot = tl.load(slots + tl.load(tiles + begin))
        if (slot < 0) | (slot >= S):
            none = tl.where(slot < 0, 0.0, float("nan")) + tl.zeros([BV], tl.float32)
            for entry in range(tl.load(tiles + begin), tl.load(tiles + end)):
                at = (tl.load(order + entry) * H + h) * Dv + j
                tl.store(y + at, none.to(y.dtype.element_ty), mask=j < Dv)
        else:
            own = state + ((slot.to(tl.int64) * H + h) * Dk + c[None, :]) * Dv + j[:, None]
            inside = (c < Dk)[None, :] & (j < Dv)[:, None]
            M = tl.load(own, mask=inside, other=0.0)
            for tile in range(begin, end):
                stop = tl.load(tiles + tile + 1).to(tl.int64)
                entry = tl.load(tiles + tile).to(tl.int64) + i
                there = entry < stop
                t = tl.load(order + entry, mask=there, other=0)
                live = there[None, :] & (j < Dv)[:, None]
                value = tl.load(v + (t * v_row + h * v_head)[None, :] + j[:, None], mask=live, other=0.0)
                past = tl.load(of_head + entry, mask=there, other=0.0)[None, :]
                left = tl.load(of_head + T + entry, mask=there, other=0.0)[None, :]
                whole = tl.load(of_head + (stop - 1))

                at = ((group * T + entry) * DKP)[:, None] + c[None, :]
                to = ((h * T + entry) * BT)[:, None] + i[None, :]
                key, before = _read(keys, unit_step, at, there[:, None]), _parts(M)
                missing = value.to(tl.float32) - past * _dot(before, _turned(key))
                out = past * _dot(before, _turned(_read(queries, unit_step, at, there[:, None])))
                taken = _dot(_parts(missing), _turned(_read(solve, step, to, there[:, None])))
                out += _dot(_parts(taken), _turned(_read(score, step, to, there[:, None])))
                M = whole * M + _dot(_parts(left * taken), key)
                tl.store(y + ((t * H + h) * Dv)[None, :] + j[:, None], out.to(y.dtype.element_ty), mask=live)
            tl.store(own, M, mask=inside)


def delta_chunks(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor
) -> None:
    """`gated_delta_update` into y, contiguous, of q, k [T, G, Dk], v [T, H, Dv] with contiguous heads and g, beta
    [T, H] with contiguous rows."""
    (T, G, Dk), (H, Dv) = k.shape, v.shape[1:]
    dkp = max(16, triton.next_power_of_2(Dk))
    slots, order = slots.sort(stable=True)
    counts, tiles, runs = (torch.empty(n, dtype=torch.int32, device=v.device) for n in (2, T + 1, T + 1))
    keys, queries = (torch.empty((3, G, T, dkp), dtype=torch.bfloat16, device=v.device) for _ in range(2))
    solve, score = (torch.empty((3, H, T, ROWS), dtype=torch.bfloat16, device=v.device) for _ in range(2))
    fades = torch.empty((H, 2, T), dtype=torch.float32, device=v.device)
    made = solve, score, solve.stride(0), fades, keys, queries, keys.stride(0)
    with on_device(v):
        cut_kernel[(1,)](counts, tiles, runs, slots, T, ROWS, CHUNK)
        for unit, x, scale in ((keys, k, 1.0), (queries, q, Dk**-0.5)):
            units_kernel[(triton.cdiv(T, 32), G)](
                unit, unit.stride(0), x, *x.stride()[:2], order, T, Dk, scale, dkp, 32
            )
        tiles_kernel[(triton.cdiv(T, ROWS) + 1, H)](
            *made, g, g.stride(0), beta, beta.stride(0), order, slots, counts, tiles,
            T, len(state), G, H, dkp, ROWS, ROWS.bit_length() - 1, num_warps=4, num_stages=1,
        )  # fmt: skip
        scan_kernel[(PROGRAMS, H, triton.cdiv(Dv, COLUMNS))](
            y, v, *v.stride()[:2], *made, state, order, slots, counts, tiles, runs,
            T, len(state), G, H, Dk, Dv, dkp, ROWS, COLUMNS, num_warps=4, num_stages=1,
        )  # fmt: skip
