"""Decoding in Triton: for every type the bits that gguf-py gives, also in rows of a table."""

import pytest
import torch
from packed import FLOATS, TYPES, UNKNOWN_TO_GGUF
from test_dequantize import assert_same_bits, by_gguf_py, random_blocks
from triton_device import DEVICE, cases, guarded

from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize as op
from dasllama_torch.triton_kernels.dequantize import dequantize, unpack
from dasllama_torch.triton_kernels.embedding import embedding

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's numpy, of NaN


def by_name(row) -> str:
    return row.name


SOME = "F16", "Q4_K", "Q6_K", "IQ3_S"


def rows_of(row, n: int, blocks: int) -> torch.Tensor:
    """u8 [n, row_bytes] of any bytes."""
    return random_blocks(row.id, n * blocks).view(n, -1)


@pytest.mark.parametrize("row", TYPES, ids=by_name)
def test_all_bytes_give_what_gguf_py_gives(row):
    packed = rows_of(row, 37 if DEVICE == "cuda" else 5, 3)
    wanted = op.reference(packed, row.id) if row.name in UNKNOWN_TO_GGUF else by_gguf_py(packed, row.id)
    assert_same_bits(dequantize(guarded(packed), row.id).cpu(), wanted)


@pytest.mark.parametrize("row", cases(TYPES, *SOME), ids=by_name)
def test_rows_of_a_table(row):
    table = rows_of(row, 11, 3)
    ids = torch.tensor([[3, 10, 0], [0, -1, 11]], device=DEVICE)
    rows = op.reference(table, row.id) * 1.7
    found = embedding(ids, guarded(table), row.id, 1.7).cpu()
    assert_same_bits(found[0], rows[[3, 10, 0]])
    assert_same_bits(found[1, :1], rows[:1])
    assert found[1, 1:].isnan().all()  # ids that no row has


@pytest.mark.parametrize("row", [ggml_types.by_name(name) for name in SOME], ids=by_name)
def test_views_and_nothing(row):
    packed = rows_of(row, 9, 2)
    memory = torch.empty(packed.numel() + 1, dtype=torch.uint8, device=DEVICE)
    odd = memory[1:].view(packed.shape).copy_(packed)  # at an odd address
    wanted = op.reference(packed, row.id)
    for view, rows in ((odd, wanted), (odd[::2], wanted[::2]), (odd[3:4], wanted[3:4]), (odd[:0], wanted[:0])):
        assert_same_bits(dequantize(view, row.id).cpu(), rows)
    ids = torch.tensor([8, 0], dtype=torch.int32, device=DEVICE)
    assert_same_bits(embedding(ids, odd, row.id, 1.0).cpu(), wanted[[8, 0]])
    assert embedding(ids[:0], odd, row.id, 1.0).shape == (0, wanted.shape[1])


@pytest.mark.parametrize("row", cases([row for row in TYPES if row.id not in FLOATS], *SOME), ids=by_name)
def test_decoded_to_f16_is_rounded_once(row):
    packed = rows_of(row, 5, 2)
    found = unpack(packed.to(DEVICE), row.id, torch.float16).cpu()
    assert_same_bits(found.float(), op.reference(packed, row.id).half().float())
