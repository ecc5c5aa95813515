"""Rotary tables against float64 formulas and transformers; rotation against transformers, bit for bit."""

import math

import pytest
import torch
from tolerances import ROPE_TABLE
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dasllama_torch import ops
from dasllama_torch.ops.query_temperature import query_temperature
from dasllama_torch.ops.rope import rope
from dasllama_torch.ops.rope_tables import long_rope_tables, rope_tables


def frequencies(R: int, theta: float = 10000.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, R, 2).float() / R)


def random_tables(T: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(torch.randint(0, 30000, (T,)), frequencies(2 * half), 1.0)


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("R", [2, 32, 50, 64, 256])
def test_tables_are_cosines_of_f32_angles(R, dtype, isa):
    positions = torch.tensor([0, 1, 2, 77, 4095, 20001, 131071, 1000003], dtype=dtype)
    inv_freq = frequencies(R)
    ops.reset_report()
    cos, sin = rope_tables(positions, inv_freq, 1.0)
    assert ops.report() == {"rope_tables": {f"cpu/{isa}": 1}}
    assert cos.shape == sin.shape == (8, R // 2)
    for t, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(inv_freq.tolist()):
            angle = torch.tensor(float(position)).mul(torch.tensor(frequency)).item()  # rounded to f32
            assert abs(cos[t, i].item() - math.cos(angle)) <= ROPE_TABLE
            assert abs(sin[t, i].item() - math.sin(angle)) <= ROPE_TABLE


def test_tables_equal_their_reference(isa):
    positions, inv_freq = torch.randint(0, 200000, (300,)), frequencies(96, 1e6)
    for scale in (1.0, 1.138629436):
        for found, wanted in zip(
            rope_tables(positions, inv_freq, scale), rope_tables.reference(positions, inv_freq, scale), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=ROPE_TABLE)


def test_scale_multiplies_both_tables():
    positions, inv_freq = torch.arange(40), frequencies(64)
    for plain, scaled in zip(
        rope_tables(positions, inv_freq, 1.0), rope_tables(positions, inv_freq, 1.25), strict=True
    ):
        assert torch.equal(scaled, plain * 1.25)


def test_tables_of_views_and_of_nothing():
    positions, inv_freq = torch.arange(60), frequencies(64)
    found = rope_tables(positions[5::3], inv_freq[1::2], 1.0)
    wanted = rope_tables(positions[5::3].contiguous(), inv_freq[1::2].contiguous(), 1.0)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert rope_tables(positions[:0], inv_freq, 1.0)[0].shape == (0, 32)


def test_table_errors():
    inv_freq = frequencies(64)
    with pytest.raises(RuntimeError, match="rope_tables: positions must be int32 or int64"):
        rope_tables(torch.zeros(3), inv_freq, 1.0)
    with pytest.raises(RuntimeError, match=r"rope_tables: positions must be int32 or int64 \[T\] or \[T, A\], found"):
        rope_tables(torch.zeros(1, 3, 1, dtype=torch.int64), inv_freq, 1.0)
    with pytest.raises(RuntimeError, match="rope_tables: inv_freq must be f32"):
        rope_tables(torch.arange(3), inv_freq.double(), 1.0)


# ---- several positions a row, two sets of frequencies ---------------------------------------------------------------


def test_each_axis_turns_its_own_frequencies(isa):
    positions, inv_freq = torch.randint(0, 5000, (9, 3)), frequencies(24)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 0], dtype=torch.int32)
    for found, reference, *parts in zip(
        rope_tables(positions, inv_freq, 1.25, axes),
        rope_tables.reference(positions, inv_freq, 1.25, axes),
        *(rope_tables(positions[:, axis], inv_freq, 1.25) for axis in range(3)),
        strict=True,
    ):
        for i, axis in enumerate(axes.tolist()):
            assert torch.equal(found[:, i], parts[axis][:, i])
        torch.testing.assert_close(found, reference, rtol=0, atol=ROPE_TABLE)


def test_equal_positions_on_all_axes_are_one_position(isa):
    positions, inv_freq = torch.arange(50, 59), frequencies(24)
    axes = torch.arange(12, dtype=torch.int32) % 3
    wanted = rope_tables(positions, inv_freq, 1.0)
    for found in (
        rope_tables(positions, inv_freq, 1.0, axes),
        rope_tables(positions.unsqueeze(1).expand(-1, 3), inv_freq, 1.0, axes),
    ):
        assert all(map(torch.equal, found, wanted))


def test_axis_errors():
    positions, inv_freq = torch.zeros(4, 3, dtype=torch.int64), frequencies(8)
    with pytest.raises(RuntimeError, match=r"rope_tables: positions \[T, A\] need axes, int32 \[4\]"):
        rope_tables(positions, inv_freq, 1.0)
    for axes in (torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="need axes"):
            rope_tables(positions, inv_freq, 1.0, axes)
    for axis in (-1, 3):
        axes = torch.tensor([0, 0, axis, 0], dtype=torch.int32)
        with pytest.raises(RuntimeError, match=f"axes must be below 3, found {axis}"):
            rope_tables(positions, inv_freq, 1.0, axes)
        with pytest.raises(ValueError, match="below 3"):
            rope_tables.reference(positions, inv_freq, 1.0, axes)


def test_long_sequences_have_frequencies_of_their_own(isa):
    positions, lengths = torch.randint(0, 9000, (40,)), torch.randint(250, 262, (40,))
    short, long = frequencies(48), frequencies(48) / torch.linspace(1, 14, 24)
    ops.reset_report()
    found = long_rope_tables(positions, lengths, short, long, 256, 1.1902)
    assert ops.report() == {"long_rope_tables": {f"cpu/{isa}": 1}}
    reference = long_rope_tables.reference(positions, lengths, short, long, 256, 1.1902)
    for table, oracle, few, many in zip(
        found, reference, rope_tables(positions, short, 1.1902), rope_tables(positions, long, 1.1902), strict=True
    ):
        assert torch.equal(table, torch.where((lengths > 256)[:, None], many, few))
        torch.testing.assert_close(table, oracle, rtol=0, atol=2 * ROPE_TABLE)


def test_long_rope_errors():
    positions, freq = torch.arange(4), frequencies(8)
    with pytest.raises(RuntimeError, match=r"long_rope_tables: lengths must be \[4\] as positions are, found \[3\]"):
        long_rope_tables(positions, positions[:3], freq, freq, 256, 1.0)
    with pytest.raises(RuntimeError, match=r"long_rope_tables: long must be \[4\] as short is, found \[3\]"):
        long_rope_tables(positions, positions, freq, freq[:3], 256, 1.0)
    with pytest.raises(RuntimeError, match="long_rope_tables: positions must be int32 or int64"):
        long_rope_tables(positions.float(), positions, freq, freq, 256, 1.0)
    with pytest.raises(RuntimeError, match=r"long_rope_tables: short must be f32 \[R / 2\]"):
        long_rope_tables(positions, positions, freq.double(), freq, 256, 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_query_temperature(dtype, isa):
    positions = torch.tensor([0, 1, 63, 64, 65, 127, 128, 8191, 131072], dtype=dtype)
    ops.reset_report()
    found = query_temperature(positions, 0.1, 64)
    assert ops.report() == {"query_temperature": {f"cpu/{isa}": 1}}
    wanted = [1 + 0.1 * math.log(1 + p // 64) for p in positions.tolist()]
    assert found.tolist() == pytest.approx(wanted, rel=1e-7)
    torch.testing.assert_close(query_temperature.reference(positions, 0.1, 64), found, rtol=1e-7, atol=0)
    assert found[:3].tolist() == [1.0, 1.0, 1.0]


def test_query_temperature_errors():
    with pytest.raises(RuntimeError, match="query_temperature: original must be above 0, found 0"):
        query_temperature(torch.arange(3), 0.1, 0)
    with pytest.raises(RuntimeError, match="query_temperature: positions must be int32 or int64"):
        query_temperature(torch.zeros(3), 0.1, 64)


# ---- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [2, 16, 40, 64, 80, 96, 112, 128, 256])
def test_rotates_as_transformers_does(D, isa):
    B, T, H, G = 2, 7, 6, 2
    q, k = torch.randn(B, T, H, D), torch.randn(B, T, G, D)
    cos, sin = random_tables(B * T, D // 2)
    full = [torch.cat([table, table], -1).view(B, T, D) for table in (cos, sin)]
    wanted = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *full)
    ops.reset_report()
    for x, want in zip((q, k), wanted, strict=True):
        found = rope(x, cos, sin)
        assert torch.equal(found, want.transpose(1, 2))
        assert torch.equal(rope.reference(x, cos, sin), found)
        assert found.is_contiguous()
    assert ops.report() == {"rope": {f"cpu/{isa}": 2}}


@pytest.mark.parametrize(("D", "R"), [(64, 32), (96, 40), (80, 2), (64, 0), (256, 64)])
def test_dims_past_the_rotated_ones_are_copied(D, R, isa):
    x = torch.randn(5, 3, D)
    cos, sin = random_tables(5, R // 2)
    y = rope(x, cos, sin)
    assert torch.equal(y[..., R:], x[..., R:])
    if R:
        assert torch.equal(y[..., :R], rope(x[..., :R].contiguous(), cos, sin))
        assert not torch.equal(y[..., :R], x[..., :R])


def test_views(isa):
    """Slices of a fused projection inside NaN, broadcast and transposed heads: the same values, the same result."""
    T, H, D = 6, 3, 32
    cos, sin = random_tables(T, D // 2)
    fused = torch.full((2, 3, 5 + 2 * H * D), float("nan"))
    fused[..., 5 : 5 + H * D] = torch.randn(2, 3, H * D)
    views = [
        fused[..., 5 : 5 + H * D].unflatten(-1, (H, D)),
        torch.randn(H, T, D).transpose(0, 1),
        torch.randn(T, D, H).transpose(1, 2),
        torch.randn(2, H, 3, D).transpose(1, 2),
        torch.randn(3, 2, H, D).transpose(0, 1),  # leading dims that do not flatten
        torch.randn(T, 1, D).expand(T, H, D),
        torch.randn(T * H * D + 3)[3:].view(T, H, D),
    ]
    for view in views:
        assert torch.equal(rope(view, cos, sin), rope(view.contiguous(), cos, sin))
    assert not rope(views[0], cos, sin).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rotated_in_f32_and_rounded_once(dtype, isa):
    x = torch.randn(4, 2, 48).to(dtype)
    cos, sin = random_tables(4, 24)
    found = rope(x, cos, sin)
    assert found.dtype == dtype
    assert torch.equal(found, rope(x.float(), cos, sin).to(dtype))


def test_results_do_not_depend_on_threads(threads):
    x = torch.randn(400, 9, 64)
    cos, sin = random_tables(400, 32)
    threads(1)
    alone = rope(x, cos, sin)
    for n in (2, 5):
        threads(n)
        assert torch.equal(rope(x, cos, sin), alone)


def test_gradient_is_the_inverse_rotation(isa):
    T, H, D = 5, 3, 40
    cos, sin = random_tables(T, 16)
    x, grad = torch.randn(T, H, D), torch.randn(T, H, D)
    twin = x.double().requires_grad_()
    rope_parts = twin[..., :16], twin[..., 16:32], twin[..., 32:]
    c, s = cos.double()[:, None], sin.double()[:, None]
    a, b, rest = rope_parts
    torch.cat([a * c - b * s, b * c + a * s, rest], -1).backward(grad.double())
    ours = x.clone().requires_grad_()
    rope(ours, cos, sin).backward(grad)
    torch.testing.assert_close(ours.grad.double(), twin.grad, rtol=1e-6, atol=1e-6)


def test_no_rows():
    cos, sin = random_tables(0, 16)
    assert rope(torch.randn(0, 4, 32), cos, sin).shape == (0, 4, 32)
    assert rope(torch.randn(2, 0, 4, 32), cos, sin).shape == (2, 0, 4, 32)


def test_rotation_errors():
    cos, sin = random_tables(4, 16)
    x = torch.randn(4, 2, 32)
    with pytest.raises(RuntimeError, match="rope: x must be a floating tensor"):
        rope(x.int(), cos, sin)
    with pytest.raises(RuntimeError, match="rope: cos and sin must be f32"):
        rope(x, cos.double(), sin.double())
    with pytest.raises(RuntimeError, match=r"x has 4 rows of heads of 32, found \[3, 16\]"):
        rope(x, cos[:3], sin[:3])
    with pytest.raises(RuntimeError, match=r"x has 4 rows of heads of 30, found \[4, 16\]"):
        rope(x[..., :30], cos, sin)
    with pytest.raises(RuntimeError, match=r"found \[4, 8\]"):
        rope(x, cos, sin[:, :8])


def test_opcheck():
    torch.library.opcheck(rope_tables, (torch.arange(9), frequencies(64), 1.1))
    axes = torch.arange(32, dtype=torch.int32) % 3
    torch.library.opcheck(rope_tables, (torch.arange(27).view(9, 3), frequencies(64), 1.1, axes))
    torch.library.opcheck(
        long_rope_tables, (torch.arange(9), torch.arange(9), frequencies(64), frequencies(64), 4, 1.1)
    )
    torch.library.opcheck(query_temperature, (torch.arange(9), 0.1, 4))
    cos, sin = random_tables(6, 16)
    torch.library.opcheck(rope, (torch.randn(2, 3, 4, 48, requires_grad=True), cos, sin))
    torch.library.opcheck(rope, (torch.randn(4, 6, 48).transpose(0, 1), cos, sin))
