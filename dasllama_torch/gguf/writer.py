"""Writes GGUF files through the `gguf` package's writer: version 3, little-endian.

    tensors = {"output_norm.weight": (float32_array, F32), "output.weight": (packed_rows, Q4_K)}
    write_gguf("new.gguf", "llama", {"llama.block_count": 2}, tensors)

What was read can be written again as it was, with `{key: md.typed(key) for key in md}` and `{t.name: (t.data,
t.qtype) for t in tensors}`, except empty arrays and arrays of arrays, which that writer does not write: they are
refused.
"""

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from dasllama_torch.errors import GGUFError
from dasllama_torch.gguf.shards import shard_name
from dasllama_torch.gguf.values import SCALARS, StringArray, quote
from dasllama_torch.ops.ggml_types import GGML_TYPES

Tensors = Mapping[str, tuple[np.ndarray, int]]

_VALUE_TYPES = {dtype: GGUFValueType(number) for number, dtype in SCALARS.items()}


def write_gguf(path: str | os.PathLike, arch: str, metadata: Mapping[str, Any], tensors: Tensors) -> None:
    """Write one file.

    arch: `general.architecture`. metadata: a numpy scalar or array keeps its width; a plain int is written as u32,
    i32, u64 or i64, the first that holds it; float as f32; bool; str; a list as an array of one of these.
    `general.alignment` sets the alignment of the tensors. tensors: name -> (array, qtype), in this order; the array
    holds numbers of the type's size (float32 for F32, uint16 for BF16), or the packed rows, uint8 [..., row_bytes].
    Raises GGUFError for what cannot be written.
    """
    infos = {name: (_shape(path, name, array, qtype), qtype) for name, (array, qtype) in tensors.items()}
    write_gguf_stream(path, arch, metadata, infos, (array for array, _ in tensors.values()))


def write_gguf_stream(
    path: str | os.PathLike,
    arch: str,
    metadata: Mapping[str, Any],
    infos: Mapping[str, tuple[tuple[int, ...], int]],
    data: Iterable[np.ndarray],
) -> None:
    """`write_gguf` for tensors that are made one by one, as they are written.

    infos: name -> (shape in elements, qtype), in the order of `data`, whose arrays are as there.
    """
    writer = GGUFWriter(path, arch)
    try:
        for key, value in metadata.items():
            if key == "general.alignment":
                writer.add_custom_alignment(int(value))
            elif key != "general.architecture":
                writer.add_key_value(key, *_typed(path, key, value))
        for name, (shape, qtype) in infos.items():
            kind = GGML_TYPES[qtype]
            nbytes = prod(shape) // kind.block * kind.bytes
            # The writer derives the shape itself from uint8 rows, but only for the types it knows: so it is told the
            # shape, and any other dtype.
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in data:
            writer.write_tensor_data(array)
    finally:
        writer.close()


def write_shards(
    stem: str | os.PathLike, arch: str, metadata: Mapping[str, Any], tensors: Tensors, count: int
) -> list[Path]:
    """Write the model as `count` files `<stem>-00001-of-<count>.gguf` and so on, the metadata in the first, and
    return their paths.

    stem: path without number and suffix. The tensors are dealt out in order, the same number to each file but for the
    rest."""
    stem, names = Path(stem), list(tensors)
    paths = []
    for i in range(count):
        mine = names[len(names) * i // count : len(names) * (i + 1) // count]
        keys = {"split.no": np.uint16(i), "split.count": np.uint16(count), "split.tensors.count": np.int32(len(names))}
        paths.append(stem.with_name(shard_name(stem.name, i + 1, count)))
        write_gguf(paths[-1], arch, {**metadata, **keys} if i == 0 else keys, {name: tensors[name] for name in mine})
    return paths


def _typed(path, key: str, value: Any) -> tuple[Any, GGUFValueType] | tuple[Any, GGUFValueType, GGUFValueType]:
    """The value as the writer takes it, its type and, for an array, its elements' type."""
    if isinstance(value, str):
        return _encode(value), GGUFValueType.STRING
    listed = isinstance(value, StringArray | list | tuple)
    if listed and len(value) and all(isinstance(v, str) for v in value):
        return list(map(_encode, value)), GGUFValueType.ARRAY, GGUFValueType.STRING
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    else:
        array = _narrowest(value) if listed else _narrowest([value]).reshape(())
    kind = _VALUE_TYPES.get(array.dtype)
    if kind is not None and array.size and array.ndim <= 1:
        return (array.tolist(), GGUFValueType.ARRAY, kind) if array.ndim else (array.item(), kind)
    wanted = "a number, bool, string or a non-empty array of one of them"
    raise GGUFError(f"{path}: key {quote(key)} is {type(value).__name__} {quote(repr(value))}, wanted {wanted}")


def _encode(text: str) -> bytes:
    """The inverse of `values.decode`."""
    return text.encode("utf-8", "surrogateescape")


def _narrowest(values: StringArray | list | tuple) -> np.ndarray:
    """Python numbers as an array of the type that `write_gguf` promises; of dtype object if they are not of one
    kind."""
    if all(isinstance(v, bool | np.bool_) for v in values):
        return np.array(values, np.bool_)
    if all(isinstance(v, float | np.floating) for v in values):
        return np.array(values, np.float32)
    if all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values):
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            if np.iinfo(dtype).min <= min(values) and max(values) <= np.iinfo(dtype).max:
                return np.array(values, dtype)
    return np.empty(len(values), object)


def _shape(path, name: str, array: np.ndarray, qtype: int) -> tuple[int, ...]:
    """The tensor's shape in elements."""
    kind = GGML_TYPES.get(qtype)
    if kind is None:
        raise GGUFError(f"{path}: tensor {quote(name)} has type {qtype}, wanted one of {sorted(GGML_TYPES)}")
    if kind.block == 1 and array.dtype.itemsize == kind.bytes:
        return array.shape
    if array.dtype == np.uint8 and array.ndim and array.shape[-1] % kind.bytes == 0:
        return (*array.shape[:-1], array.shape[-1] // kind.bytes * kind.block)
    found = f"{array.dtype} {list(array.shape)}"
    raise GGUFError(
        f"{path}: tensor {quote(name)} is {found}, wanted uint8 rows of {kind.bytes}-byte blocks for type {kind.name}"
    )
