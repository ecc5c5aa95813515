"""llama.cpp's quantizer: one file in, one file with every matrix in one type out. Runs in the peer's interpreter.

    python requantize.py < ORDER

ORDER is JSON: source, target, type (ggml's name) and columns, the number of columns of each matrix by its name. Types
that are refused without an importance matrix are given one of ones, that is, all columns count the same.
"""

import ctypes
import json
import os
import sys

import llama_cpp.llama_cpp as lib

# The file types whose default, which `pure` gives to every matrix, is the type; of a K-type's mixes, S.
FILE_TYPES = {
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": lib.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q5_0": lib.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q3_K": lib.LLAMA_FTYPE_MOSTLY_Q3_K_S,
    "Q4_K": lib.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q5_K": lib.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "Q6_K": lib.LLAMA_FTYPE_MOSTLY_Q6_K,
    "IQ4_XS": lib.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "IQ2_XS": lib.LLAMA_FTYPE_MOSTLY_IQ2_XS,
}
NEED_IMPORTANCE = {"IQ2_XS"}


def importance_of_ones(columns: dict[str, int]) -> ctypes.Array:
    """One entry a matrix, ended by one without a name. The ones are shared."""
    widest = max(columns.values())
    ones = (ctypes.c_float * widest)(*[1.0] * widest)
    entries = (lib.llama_model_imatrix_data * (len(columns) + 1))()
    for entry, (name, size) in zip(entries, columns.items(), strict=False):
        entry.name, entry.data, entry.size = name.encode(), ones, size
    return entries


def main() -> None:
    order = json.load(sys.stdin)
    quiet = lib.llama_log_callback(lambda level, text, user_data: None)  # a line or two for each tensor otherwise
    lib.llama_log_set(quiet, None)
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.pure = FILE_TYPES[order["type"]], True
    if order["type"] in NEED_IMPORTANCE:
        params.imatrix = importance_of_ones(order["columns"])
    status = lib.llama_model_quantize(os.fsencode(order["source"]), os.fsencode(order["target"]), params)
    if status != 0:
        sys.exit(f"llama_model_quantize returned {status} for {order['target']}")


if __name__ == "__main__":
    main()
