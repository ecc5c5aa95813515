"""Metadata values of a GGUF file and the bounds-checked cursor that reads them.

Layout of a value (GGUF specification, ggml/docs/gguf.md): scalars are little-endian; a string is a u64 length and its
bytes; an array is a u32 element type, a u64 count and its elements, which may be strings or arrays again.

In memory: scalars are numpy scalars (they keep the file's width and sign), strings are `str`, arrays of scalars are
read-only numpy views of the file, arrays of strings are `StringArray`, arrays of arrays are lists.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dasllama_torch.errors import GGUFError

MAX_KEY_BYTES = 65_535  # of a key or tensor name; the specification's limit for keys
MAX_DEPTH = 4  # arrays within arrays; files in use have 1
# How many of each one file may hold, beside what its size allows: each costs time or an object. Large files in use
# have about 60 keys, 2**11 tensors (2**16 with experts unmerged), 2**20 strings (tokens and merges) and no inner
# arrays.
LIMITS = {"keys": 1 << 16, "tensors": 1 << 18, "strings": 1 << 24, "inner arrays": 1 << 16}

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def decode(raw: bytes) -> str:
    """Text of a string value. Bytes that are not UTF-8 (a vocabulary may hold them) become lone surrogates, as Python
    does for file names: `text.encode("utf-8", "surrogateescape")` gives the file's bytes back."""
    return raw.decode("utf-8", "surrogateescape")


class StringArray(Sequence):
    """An array of strings, decoded (see `decode`) when an element is asked for.

    data: uint8 [n], the array's bytes from the first length field on; ends: int64 [count], where in `data` each
    string ends.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray):
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of an array of {len(self)}")
        index %= len(self)
        start = 8 + (int(self._ends[index - 1]) if index else 0)
        return decode(self._data[start : int(self._ends[index])].tobytes())

    def __iter__(self) -> Iterator[str]:
        raw = self._data.tobytes()
        start = 8
        for end in self._ends.tolist():
            yield raw[start:end].decode("utf-8", "surrogateescape")  # `decode`, without a call for each of 262,144
            start = end + 8

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


def quote(name: str, limit: int = 100) -> str:
    """repr of text that comes from a file, cut to `limit` characters: safe to print, whatever it holds."""
    return repr(name) if len(name) <= limit else f"{name[:limit]!r}... ({len(name)} characters)"


class Cursor:
    """Walks a header front to back. A read is checked against the end of the file before a byte is touched or memory
    is set aside."""

    def __init__(self, buffer: np.ndarray, path: Path):
        self.path = path
        self.pos = 0
        self.end = len(buffer)
        self._buffer = buffer
        self._bytes = memoryview(buffer)
        self._left = dict(LIMITS)

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.pos:
            raise self.error(
                f"truncated or corrupt: {what} at byte {self.pos} needs {nbytes} bytes,"
                f" found {self.end - self.pos} to the end of the file"
            )

    def claim(self, things: str, count: int, each: int, what: str) -> None:
        """`what` claims that `count` of `things` (a key of LIMITS) of at least `each` bytes follow: refuse what
        cannot be."""
        self.need(count * each, f"{what} ({count} {things})")
        self._left[things] -= count
        if self._left[things] < 0:
            raise self.error(
                f"{what} at byte {self.pos} has {count} {things}, wanted at most {LIMITS[things]} in one file"
            )

    def u32(self, what: str) -> int:
        return self._unpack(_U32, what)

    def u64(self, what: str) -> int:
        return self._unpack(_U64, what)

    def _unpack(self, packed: struct.Struct, what: str) -> int:
        self.need(packed.size, what)
        (value,) = packed.unpack_from(self._bytes, self.pos)
        self.pos += packed.size
        return value

    def raw(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        value = bytes(self._bytes[self.pos : self.pos + nbytes])
        self.pos += nbytes
        return value

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, valid UTF-8, at most MAX_KEY_BYTES."""
        at = self.pos
        size = self.u64(f"the length of {what}")
        if not 1 <= size <= MAX_KEY_BYTES:
            raise self.error(f"{what} at byte {at} has {size} bytes, wanted 1 to {MAX_KEY_BYTES}")
        raw = self.raw(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"{what} at byte {at} is not UTF-8: found {raw[:100]!r}") from e

    def value(self, what: str) -> Any:
        """One typed metadata value; `what` names its key in errors."""
        kind = self.u32(f"the type of {what}")
        if kind in SCALARS:
            return self._scalars(kind, 1, what)[0]
        if kind == STRING:
            return decode(self.raw(self.u64(f"the length of {what}"), what))
        if kind == ARRAY:
            return self._array(what, depth=1)
        raise self.error(f"{what} has value type {kind}, wanted 0 to 12")

    def _array(self, what: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"{what} nests arrays more than {MAX_DEPTH} deep")
        kind = self.u32(f"the element type of {what}")
        count = self.u64(f"the length of {what}")
        if kind in SCALARS:
            return self._scalars(kind, count, what)
        if kind == STRING:
            return self._strings(count, what)
        if kind == ARRAY:
            self.claim("inner arrays", count, 12, what)
            return [self._array(what, depth + 1) for _ in range(count)]
        raise self.error(f"{what} has element type {kind}, wanted 0 to 12")

    def _scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = SCALARS[kind]
        nbytes = count * dtype.itemsize
        self.need(nbytes, f"{what} ({count} x {dtype})")
        raw = self._buffer[self.pos : self.pos + nbytes]
        if kind == BOOL and nbytes and raw.max() > 1:
            raise self.error(f"{what} is a bool with value {raw.max()}, wanted 0 or 1")
        self.pos += nbytes
        values = raw.view(dtype)
        values.flags.writeable = False
        return values

    def _strings(self, count: int, what: str) -> StringArray:
        self.claim("strings", count, 8, what)
        unpack, data, end, first = _U64.unpack_from, self._bytes, self.end, self.pos
        pos, ends = first, array("q")
        for i in range(count):
            if end - pos >= 8:
                pos += 8 + unpack(data, pos)[0]
            else:
                pos = end + 1
            if pos > end:
                raise self.error(
                    f"truncated or corrupt: string {i} of {count} in {what} ends after the file, which has {end} bytes"
                )
            ends.append(pos - first)
        self.pos = pos
        return StringArray(self._buffer[first:pos], np.array(ends, np.int64))
