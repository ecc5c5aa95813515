"""The type table and the codebooks against gguf-py, which states them independently."""

import subprocess
import sys

import gguf
import pytest

from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.ops import codebooks, ggml_types


def test_sizes_are_those_of_gguf_py():
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        row = ggml_types.GGML_TYPES[int(kind)]
        # gguf-py has the size of an older Q8_1, whose two scales were f32; no file holds that type.
        assert (row.name, row.block, row.bytes) == (kind.name, *((32, 36) if kind.name == "Q8_1" else sizes))


def test_every_type_of_gguf_py_is_known_and_q2_0_beside():
    assert set(ggml_types.GGML_TYPES) == {int(kind) for kind in gguf.GGMLQuantizationType} | {ggml_types.Q2_0}


def test_constants_and_names_agree():
    for row in ggml_types.GGML_TYPES.values():
        assert getattr(ggml_types, row.name) == row.id
        assert ggml_types.by_name(row.name) is row


def test_weight_types_have_a_lattice_whose_blocks_fit():
    assert len(ggml_types.WEIGHT_TYPES) == 28
    for qtype in ggml_types.WEIGHT_TYPES:
        row = ggml_types.GGML_TYPES[qtype]
        lattice = ggml_types.GGML_TYPES[row.lattice]
        assert row.block % lattice.block == 0
        assert lattice is row or not row.is_float


def test_row_bytes():
    assert ggml_types.row_bytes(ggml_types.Q4_K, 512) == 288
    assert ggml_types.bits_per_weight(ggml_types.Q4_K) == 4.5
    with pytest.raises(UnsupportedModel, match=r"Q4_K: a row of 300 .* block of 256"):
        ggml_types.row_bytes(ggml_types.Q4_K, 300)


@pytest.mark.parametrize(("qtype", "text"), [(4, "unknown tensor type 4"), (-1, "-1"), (26, "I32"), (9, "Q8_1")])
def test_what_is_no_weight_type_is_refused_by_name(qtype, text):
    with pytest.raises(UnsupportedModel, match=text):
        ggml_types.weight_type(qtype)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'Q7_K'.*Q6_K"):
        ggml_types.by_name("Q7_K")


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids_are_those_of_gguf_py(name):
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    assert getattr(codebooks, f"{name}_GRID").points() == theirs.grid[0, 0].astype(int).tolist()


def test_value_lists_are_those_of_gguf_py():
    assert gguf.quants.IQ4_NL.kvalues == codebooks.IQ4_VALUES
    assert gguf.quants.MXFP4.kvalues == gguf.quants.NVFP4.kvalues == codebooks.FP4_VALUES


def test_the_table_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from dasllama_torch.ops import codebooks, ggml_types; "
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
