"""Decoding of every type: gguf-py and published examples are the oracle, kernels and reference must give their bits."""

import json
import zlib
from functools import cache

import gguf
import numpy as np
import pytest
import torch

from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.ggml_types import GGML_TYPES, WEIGHT_TYPES

# gguf-py has no decoder for these; golden files made with ggml's own stand in.
NOT_IN_GGUF_PY = {ggml_types.Q1_0, ggml_types.Q2_0}
IN_GGUF_PY = [qtype for qtype in WEIGHT_TYPES if qtype not in NOT_IN_GGUF_PY]


def name(qtype) -> str:
    return GGML_TYPES[qtype].name if qtype in GGML_TYPES else str(qtype)


def random_blocks(qtype: int, n: int, seed: int = 0) -> torch.Tensor:
    """u8 [n, bytes] of any pattern: scales may be huge, subnormal, infinite or NaN."""
    generator = torch.Generator().manual_seed(seed + qtype)
    return torch.randint(0, 256, (n, GGML_TYPES[qtype].bytes), dtype=torch.uint8, generator=generator)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal as bits, signs of zeros included; a NaN equals any NaN."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == torch.float32
    same = found.contiguous().view(torch.int32) == wanted.contiguous().view(torch.int32)
    assert (same | (found.isnan() & wanted.isnan())).all()


def by_gguf_py(blocks: torch.Tensor, qtype: int) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(qtype))))


@cache  # one for all instruction sets
def all_bytes(qtype: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, and what gguf-py makes of them; the reference agrees."""
    blocks = random_blocks(qtype, 500)
    wanted = by_gguf_py(blocks, qtype)
    assert_same_bits(dequantize.reference(blocks, qtype), wanted)
    return blocks, wanted


@pytest.mark.parametrize("qtype", IN_GGUF_PY, ids=name)
def test_all_bytes_give_what_gguf_py_gives(qtype, isa):
    blocks, wanted = all_bytes(qtype)
    assert_same_bits(dequantize(blocks, qtype), wanted)


@pytest.mark.parametrize("qtype", sorted(NOT_IN_GGUF_PY), ids=name)
def test_types_without_another_decoder(qtype, isa):
    """Element by element after block_q1_0 and block_q2_0 of ggml-common.h: d * (2 field - 1) and d * (field - 1)."""
    blocks = random_blocks(qtype, 64)
    d = blocks[:, :2].clone().view(torch.float16).float()
    bits, count = (1, 128) if qtype == ggml_types.Q1_0 else (2, 64)
    fields = torch.tensor(
        [
            [int(block[2 + i * bits // 8]) >> i * bits % 8 & (1 << bits) - 1 for i in range(count)]
            for block in blocks.tolist()
        ]
    )
    wanted = d * ((2 * fields - 1) if bits == 1 else (fields - 1)).float()
    assert_same_bits(dequantize(blocks, qtype), wanted)
    assert_same_bits(dequantize.reference(blocks, qtype), wanted)


@pytest.mark.parametrize("qtype", WEIGHT_TYPES[1:], ids=name)  # there is no file of F32, which is its own bytes
def test_whole_tensors_of_golden_files(qtype, isa, oracle):
    case = json.loads((oracle / "quant" / "index.json").read_text())["models"][name(qtype)]
    file = GGUFFile(oracle / "quant" / f"llama-{name(qtype).lower()}.gguf")
    for tensor, golden in case["checksums"].items():
        y = dequantize(torch.from_numpy(file.tensors[tensor].data.copy()), qtype)
        assert list(y.shape) == golden["shape"]
        assert zlib.crc32(y.numpy().tobytes()) == golden["crc32_f32le"]


# ---- published examples ---------------------------------------------------------------------------------------------

# Byte i holds i in its low and i + 1 in its high nibble: a reader of the wrong order shows at once.
NIBBLES = [i | (i + 1) % 16 << 4 for i in range(16)]


def f16(value: float) -> list[int]:
    return list(np.float16(value).tobytes())


def both(qtype: int, block: list[int]) -> list[float]:
    """The block by the kernel, after checking that the reference agrees."""
    blocks = torch.tensor([block], dtype=torch.uint8)
    y = dequantize(blocks, qtype)
    assert_same_bits(y, dequantize.reference(blocks, qtype))
    return y[0].tolist()


def test_mxfp4_is_split_not_interleaved(isa):
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert both(ggml_types.MXFP4, [127, *NIBBLES]) == half + half[1:] + half[:1]


def test_mxfp4_exponents_at_both_ends(isa):
    """Exponent 0 gives subnormals, which must not become 0; 254 and 255 are numbers, though OCP makes 255 a NaN."""
    assert both(ggml_types.MXFP4, [0, *NIBBLES])[1] == 2.0**-128
    assert both(ggml_types.MXFP4, [1, *NIBBLES])[1] == 2.0**-127
    assert both(ggml_types.MXFP4, [254, *NIBBLES])[7] == float("inf")
    assert both(ggml_types.MXFP4, [254, *NIBBLES])[1] == 2.0**126
    assert both(ggml_types.MXFP4, [255, *NIBBLES])[1] == 2.0**127


def test_q4_0_is_excess_eight_and_split(isa):
    assert both(ggml_types.Q4_0, f16(1) + NIBBLES) == [*range(-8, 8), *range(-7, 8), -8]


def test_q4_1_has_two_scales(isa):
    wanted = [i + 0.5 for i in range(16)]
    assert both(ggml_types.Q4_1, f16(1) + f16(0.5) + NIBBLES) == wanted + wanted[1:] + wanted[:1]


def test_q5_0_and_q5_1_take_bit_i_to_element_i(isa):
    y = both(ggml_types.Q5_0, f16(1) + [1, 0, 1, 0] + NIBBLES)
    assert (y[0], y[16], y[1], y[31]) == (0, 1, -15, -16)
    y = both(ggml_types.Q5_1, f16(1) + f16(0.5) + [1, 0, 0, 0x80] + NIBBLES)
    assert (y[0], y[31], y[15]) == (16.5, 16.5, 15.5)


@pytest.mark.parametrize(
    ("scales", "wanted"),
    [
        ("C1428304 45C60788 21436587", [-2.5, -1, -3.5, 0, -9, -7, -3, -13]),
        ("01020304 05060708 21436587", [-2.5, -1, -3.5, 0, -1, 1, -3, 3]),
    ],
)
def test_q4_k_packs_six_bit_scales_and_minima(scales, wanted, isa):
    block = f16(1) + f16(0.5) + list(bytes.fromhex(scales)) + [0x10] * 128
    assert both(ggml_types.Q4_K, block)[::32] == wanted


def test_q6_k_layout(isa):
    block = [0x21] * 128 + [0xE4] * 64 + list(range(1, 17)) + f16(1)
    wanted = [-31, -62, -45, -60, 10, 12, 126, 144, -279, -310, -165, -180, 26, 28, 270, 288]
    assert both(ggml_types.Q6_K, block)[::16] == wanted


def test_iq4_nl_is_split(isa):
    values = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    assert both(ggml_types.IQ4_NL, f16(1) + NIBBLES) == values + values[1:] + values[:1]


def test_bf16_words(isa):
    words = torch.tensor([0x3F80, 0xC000, 0x7F80, 0x0001], dtype=torch.int32).to(torch.int16)
    y = dequantize(words.view(torch.uint8), ggml_types.BF16).tolist()
    assert y == [1.0, -2.0, float("inf"), 2.0**-133]


# ---- shapes, views, refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=name)
def test_shapes_and_views(qtype, isa):
    row = GGML_TYPES[qtype]
    blocks = random_blocks(qtype, 3 * 5 * 7)
    flat = dequantize.reference(blocks, qtype)
    cube = blocks.view(3, 5, 7 * row.bytes)
    assert_same_bits(dequantize(cube, qtype), flat.view(3, 5, 7 * row.block))
    assert_same_bits(dequantize(cube[1:, ::2], qtype), flat.view(3, 5, 7 * row.block)[1:, ::2])
    assert_same_bits(dequantize(blocks[0], qtype), flat[0])
    assert dequantize(blocks[:0], qtype).shape == (0, row.block)
    # Mapped files align tensors, but a view may begin at any byte.
    shifted = torch.cat([torch.full((1,), 255, dtype=torch.uint8), blocks.flatten()])[1:].view(blocks.shape)
    assert_same_bits(dequantize(shifted, qtype), flat)


WRONG = [
    (torch.zeros(2, 17, dtype=torch.uint8), ggml_types.Q4_0, r"uint8 \[\.\.\., a multiple of 18\] for Q4_0"),
    (torch.zeros(2, 18, dtype=torch.int8), ggml_types.Q4_0, "uint8"),
    (torch.zeros(2, 18), ggml_types.Q4_0, "uint8"),
    (torch.zeros((), dtype=torch.uint8), ggml_types.F32, "uint8"),
    (torch.zeros(2, 36, dtype=torch.uint8), ggml_types.Q8_1, r"\(Q8_1\) is no weight type"),
    (torch.zeros(2, 36, dtype=torch.uint8), 4, "qtype 4 is unknown"),
    (torch.zeros(2, 36, dtype=torch.uint8), 2**40, "is unknown"),
    (torch.zeros(2, 36, dtype=torch.uint8), -1, "is unknown"),
]


@pytest.mark.parametrize(("qweight", "qtype", "text"), WRONG)
def test_wrong_input_is_refused_everywhere_alike(qweight, qtype, text):
    for op in (dequantize, dequantize.reference):
        with pytest.raises(RuntimeError, match=f"dasllama::dequantize: .*{text}"):
            op(qweight, qtype)
    with pytest.raises(RuntimeError, match=text):
        dequantize(qweight.to("meta"), qtype)


@pytest.mark.parametrize("qtype", [ggml_types.F16, ggml_types.Q4_0, ggml_types.IQ1_M], ids=name)
def test_opcheck(qtype):
    torch.library.opcheck(dequantize, (random_blocks(qtype, 6).view(2, -1), qtype))
    torch.library.opcheck(dequantize, (random_blocks(qtype, 6)[::2], qtype))
