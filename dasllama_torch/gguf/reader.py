"""Reader of GGUF files, version 2 and 3, little-endian: memory-mapped, bounds-checked, no copy of any tensor unless
`read_tensors` asks for one.

    file = GGUFFile("model.gguf")                    # or any shard of a set
    file.metadata.arch.int("block_count")
    file.tensors["blk.0.attn_q.weight"].data         # uint8 [rows, row_bytes], a view of the file

Files may come from anyone. Whatever they say is compared with the file's size, and with the limits of `values.py`,
before it is used; what does not fit raises GGUFError with the file, the key or tensor, what was found and what was
wanted. Source of the layout: the GGUF specification (ggml/docs/gguf.md).
"""

import mmap
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from dasllama_torch.errors import GGUFError
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.shards import check_shards, shard_paths
from dasllama_torch.gguf.values import Cursor, quote
from dasllama_torch.memory import huge_pages
from dasllama_torch.ops.ggml_types import GGML_TYPES
from dasllama_torch.threads import usable_cores

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 20  # bytes; files in use have 32, some 64 or 4096
DEFAULT_ALIGNMENT = 32
READ_BYTES = 8 << 20  # at a time
MAX_READERS = 4  # threads; more do not make memory come faster
MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name length, name, type, the shortest value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # name length, name, number of dimensions, type, offset


@dataclass(frozen=True, eq=False, slots=True)
class GGUFTensor:
    """One tensor, as the file holds it.

    shape: PyTorch's order, slowest first (the reverse of the file's). qtype: ggml's type number, a key of
    `GGML_TYPES`. data: uint8 [*shape[:-1], row_bytes], a view of the mapped file. offset: of the first byte, from the
    start of the file at path.
    """

    name: str
    shape: tuple[int, ...]
    qtype: int
    data: np.ndarray
    offset: int
    path: Path

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One parsed file: a whole model or a shard. `values` are as `values.py` describes them."""

    path: Path
    version: int
    alignment: int
    nbytes: int
    values: dict[str, Any]
    tensors: list[GGUFTensor]


class ModelFile:
    """What is read of a model's file: `path` as given, `paths` of all files in order, `nbytes` of them together,
    `metadata`, and `tensors`, name -> GGUFTensor in file order.

    The mappings live as long as any tensor's data does.
    """

    path: Path
    paths: list[Path]
    nbytes: int
    metadata: Metadata
    tensors: dict[str, GGUFTensor]

    def read_tensors(self, done: Callable[[int], object] = lambda nbytes: None) -> None:
        """Read the data of all tensors into memory, in huge pages where there are any, instead of mapping it.

        Mapped data costs no time to load and is shared between processes, but lies in small pages, which are slow to
        read for who reads all of it for every token. Tensors that were taken out before stay mapped. done: called with
        the bytes read since the last call. Raises GGUFError if the files are no longer what they were.
        """
        for path in self.paths:
            held = {name: tensor for name, tensor in self.tensors.items() if tensor.path == path}
            if held:
                self.tensors.update(_read_tensors(path, held, done))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.tensors)} tensors, {self.nbytes} bytes)"


class GGUFFile(ModelFile):
    """A GGUF model: one file, or a set of shards opened from any of its members.

    version, alignment, metadata: of the first file. Raises GGUFError.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.paths = shard_paths(self.path)
        parts = [read_part(p) for p in self.paths]
        check_shards(parts)
        first = parts[0]
        self.version = first.version
        self.alignment = first.alignment
        self.nbytes = sum(part.nbytes for part in parts)
        self.metadata = Metadata(first.values, origin=str(first.path))
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise GGUFError(f"{part.path}: tensor {quote(tensor.name)} appears twice in the model, wanted once")
                self.tensors[tensor.name] = tensor


def read_part(path: Path) -> Part:
    """Parse one file without looking at its siblings."""
    buffer = map_file(path)
    cursor = Cursor(buffer, path)
    version = _version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of keys")
    cursor.claim("keys", n_keys, MIN_KEY_BYTES, "the metadata")
    values: dict[str, Any] = {}
    for i in range(n_keys):
        key = cursor.name(f"key {i} of {n_keys}")
        if key in values:
            raise cursor.error(f"key {quote(key)} appears twice, wanted once")
        values[key] = cursor.value(f"key {quote(key)}")
    alignment = _alignment(cursor, values)
    cursor.claim("tensors", n_tensors, MIN_TENSOR_BYTES, "the tensor table")
    infos = [_tensor_info(cursor, i, n_tensors, alignment) for i in range(n_tensors)]
    start = -(-cursor.pos // alignment) * alignment
    tensors = [_place(buffer, path, start, *info) for info in infos]
    _check_overlaps(path, tensors)
    return Part(path, version, alignment, len(buffer), values, tensors)


def map_file(path: Path) -> np.ndarray:
    """The file as uint8 [size]. The mapping is copy-on-write: torch refuses to promise that it never writes to an
    array and warns about read-only ones, so the array must be writable; a write would go to a private page and never
    to the file."""
    try:
        if not os.path.isfile(path):  # opening a pipe would wait for its other end
            raise GGUFError(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
        with path.open("rb") as file:
            if sys.platform == "linux":
                # Without MAP_NORESERVE Linux counts a private writable mapping as memory in use, and refuses files
                # larger than memory.
                no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
                flags, prot = mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE
                return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=prot), np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except (OSError, ValueError) as e:  # ValueError: an empty file
        raise GGUFError(f"{path}: cannot be opened: {e}") from e


def _read_tensors(
    path: Path, tensors: Mapping[str, GGUFTensor], done: Callable[[int], object]
) -> dict[str, GGUFTensor]:
    """The tensors of one file with their data in memory. Offsets keep their places within a page."""
    begin = min(tensor.offset for tensor in tensors.values()) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max(tensor.offset + tensor.nbytes for tensor in tensors.values())
    try:
        memory = huge_pages(end - begin)
        with memoryview(memory) as view, ExitStack() as opened:
            # Most of the time goes into giving the process memory, not into the disk: cores share that well.
            files: SimpleQueue[BinaryIO] = SimpleQueue()
            readers = min(MAX_READERS, usable_cores())
            for _ in range(readers):
                files.put(opened.enter_context(path.open("rb", buffering=0)))

            def read(at: int) -> int:
                file = files.get()
                try:
                    n = _fill(view[at : at + READ_BYTES], file, begin + at)
                    if n < min(READ_BYTES, len(view) - at):
                        raise GGUFError(f"{path}: truncated while it was read: {begin + at + n} bytes, wanted {end}")
                    return n
                finally:
                    files.put(file)

            pool = opened.enter_context(ThreadPoolExecutor(readers))
            for n in pool.map(read, range(0, len(view), READ_BYTES)):
                done(n)
    except (OSError, ValueError) as e:
        raise GGUFError(f"{path}: cannot be read: {e}") from e
    buffer = np.frombuffer(memory, np.uint8)
    return {
        name: replace(tensor, data=buffer[tensor.offset - begin :][: tensor.nbytes].reshape(tensor.data.shape))
        for name, tensor in tensors.items()
    }


def _fill(piece: memoryview, file: BinaryIO, at: int) -> int:
    """Read a piece that begins at a place of the file: how many bytes of it there were."""
    file.seek(at)
    filled = 0
    while filled < len(piece) and (n := file.readinto(piece[filled:])):
        filled += n
    return filled


def _version(cursor: Cursor) -> int:
    magic = cursor.raw(4, "the magic number")
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, wanted {b'GGUF'!r}")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cursor.error(f"a big-endian GGUF file (version {swapped}), wanted a little-endian one")
    raise cursor.error(f"GGUF version {version}, wanted 2 or 3")


def _alignment(cursor: Cursor, values: dict[str, Any]) -> int:
    value = values.get("general.alignment", np.uint32(DEFAULT_ALIGNMENT))
    # 8 is the specification's smallest step, and what f64 data needs
    if isinstance(value, np.uint32) and 8 <= value <= MAX_ALIGNMENT and int(value).bit_count() == 1:
        return int(value)
    wanted = f"uint32, a power of two from 8 to {MAX_ALIGNMENT}"
    raise cursor.error(f"key 'general.alignment' is {type(value).__name__} {quote(str(value))}, wanted {wanted}")


def _tensor_info(cursor: Cursor, index: int, count: int, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape (slowest first), qtype, offset from the start of the data."""
    name = cursor.name(f"the name of tensor {index} of {count}")
    what = f"tensor {quote(name)}"
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions, wanted at most {MAX_DIMS}")
    shape = tuple(cursor.u64(f"dimension {i} of {what}") for i in range(n_dims))[::-1]
    if 0 in shape:
        raise cursor.error(f"{what} has shape {list(shape)}, wanted no dimension of 0")
    qtype = cursor.u32(f"the type of {what}")
    if qtype not in GGML_TYPES:
        raise cursor.error(f"{what} has tensor type {qtype}, wanted one of {sorted(GGML_TYPES)}")
    kind = GGML_TYPES[qtype]
    row = prod(shape[-1:])  # of a tensor without dimensions: 1
    if row % kind.block:
        wanted = f"a multiple of {kind.block} for type {kind.name}"
        raise cursor.error(f"{what} has rows of {row} elements, wanted {wanted}")
    offset = cursor.u64(f"the offset of {what}")
    if offset % alignment:
        raise cursor.error(f"{what} is at offset {offset}, wanted a multiple of the alignment {alignment}")
    return name, shape, qtype, offset


def _place(
    buffer: np.ndarray, path: Path, start: int, name: str, shape: tuple[int, ...], qtype: int, offset: int
) -> GGUFTensor:
    kind = GGML_TYPES[qtype]
    row_bytes = prod(shape[-1:]) // kind.block * kind.bytes
    nbytes = prod(shape[:-1]) * row_bytes  # Python integers: no product can wrap
    begin, size = start + offset, len(buffer)
    if begin + nbytes > size:
        raise GGUFError(
            f"{path}: truncated or corrupt: tensor {quote(name)} {list(shape)} {kind.name} needs {nbytes} bytes"
            f" from byte {begin}, found {max(0, size - begin)} to the end of the file"
        )
    data = buffer[begin : begin + nbytes].reshape(*shape[:-1], row_bytes)
    return GGUFTensor(name, shape, qtype, data, begin, path)


def _check_overlaps(path: Path, tensors: list[GGUFTensor]) -> None:
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    for a, b in zip(by_offset, by_offset[1:], strict=False):
        if a.offset + a.nbytes > b.offset:
            raise GGUFError(
                f"{path}: tensor {quote(b.name)} starts at byte {b.offset}, wanted {a.offset + a.nbytes} or later,"
                f" where tensor {quote(a.name)} ends"
            )
