"""Rows of packed tables: dequantized rows are the oracle (held against gguf-py in test_dequantize)."""

import pytest
import torch

from dasllama_torch import ops
from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.dequantize import dequantize
from dasllama_torch.ops.embedding import embedding
from dasllama_torch.ops.ggml_types import GGML_TYPES, Q4_0, Q6_K, WEIGHT_TYPES
from dasllama_torch.ops.quantize import quantize


def name(value) -> str:
    return GGML_TYPES[value].name if value in GGML_TYPES else str(value)


def random_table(qtype: int, V: int) -> torch.Tensor:
    """u8 [V, row_bytes] of 3 blocks per row, any pattern of bytes."""
    generator = torch.Generator().manual_seed(qtype)
    return torch.randint(0, 256, (V, 3 * GGML_TYPES[qtype].bytes), dtype=torch.uint8, generator=generator)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal, with NaN (from random scales) equal to NaN."""
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=name)
def test_rows(qtype, isa):
    table = random_table(qtype, 11)
    rows = dequantize.reference(table, qtype)
    ids = torch.tensor([[3, 10, 0], [0, 7, 3]])
    ops.reset_report()
    assert_equal(embedding(ids, table, qtype, 1.0), rows[ids])
    assert ops.report() == {"embedding": {f"cpu/{isa}": 1}}
    assert_equal(embedding.reference(ids, table, qtype, 1.0), rows[ids])
    scale = 2048**0.5  # not a power of two in f32
    assert_equal(embedding(ids, table, qtype, scale), rows[ids] * scale)
    assert_equal(embedding.reference(ids, table, qtype, scale), rows[ids] * scale)


def test_id_shapes_and_dtypes(isa):
    table = quantize(torch.randn(40, 96), Q4_0)
    rows = dequantize(table, Q4_0)
    ids = torch.randint(0, 40, (6, 10))
    for view in (ids, ids[::2, 1::3], ids.t(), ids[:0], ids[0, 0], ids.int()):
        found = embedding(view, table, Q4_0, 1.0)
        assert torch.equal(found, rows[view.long()])
        assert found.is_contiguous()


def test_results_do_not_depend_on_threads(isa):
    table, ids = quantize(torch.randn(500, 1024), Q4_0), torch.randint(0, 500, (300,))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(embedding(ids, table, Q4_0, 0.3))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("bad", [-1, 11, 2**40, -(2**62)])
def test_an_id_outside_the_table_is_named(bad, isa):
    table = random_table(Q6_K, 11)
    for op in (embedding, embedding.reference):
        with pytest.raises(RuntimeError, match=rf"dasllama::embedding: id {bad} is outside the table of 11 rows"):
            op(torch.tensor([1, bad, 2]), table, Q6_K, 1.0)


TABLE = torch.zeros(4, 36, dtype=torch.uint8)
IDS = torch.tensor([0])
WRONG = [
    (IDS.float(), TABLE, Q4_0, "ids must be int64 or int32"),
    (IDS.to(torch.int16), TABLE, Q4_0, "ids must be int64 or int32"),
    (IDS, TABLE[:, :35], Q4_0, r"uint8 \[\.\.\., a multiple of 18\]"),
    (IDS, TABLE.to(torch.int8), Q4_0, "uint8"),
    (IDS, TABLE[0], Q4_0, r"contiguous \[N, row_bytes\]"),
    (IDS, TABLE[::2], Q4_0, "strided"),
    (IDS, TABLE, ggml_types.Q8_1, "Q8_1"),
    (IDS, TABLE, 5, "qtype 5"),
]


@pytest.mark.parametrize(("ids", "table", "qtype", "text"), WRONG)
def test_wrong_input_is_refused_everywhere_alike(ids, table, qtype, text):
    for op in (embedding, embedding.reference):
        with pytest.raises(RuntimeError, match=f"dasllama::embedding: .*{text}"):
            op(ids, table, qtype, 1.0)


def test_tensors_of_two_devices_are_refused():
    for ids, table in ((IDS, TABLE.to("meta")), (IDS.to("meta"), TABLE)):
        with pytest.raises(RuntimeError, match="ids must be int64 or int32 on"):
            embedding(ids, table, Q4_0, 1.0)


@pytest.mark.parametrize("qtype", [ggml_types.F16, Q4_0, Q6_K], ids=name)
def test_opcheck(qtype):
    table = quantize(torch.randn(8, 256), qtype) if qtype != Q6_K else torch.zeros(8, 210, dtype=torch.uint8)
    for ids in (torch.tensor([[1, 2], [7, 0]]), torch.tensor([3], dtype=torch.int32)):
        torch.library.opcheck(embedding, (ids, table, qtype, 1.5))
