"""Typed reads of a model's metadata, with a record of what was read.

    md.int("llama.block_count", min=1)             # required: a missing key raises
    md.arch.float("rope.freq_base", 10000.0)       # md.arch: the same metadata seen below "llama."
    md.arch.ints("attention.head_count_kv", length=n_layers, min=0)   # one value for all layers, or one for each
    md.arch.expect("use_parallel_residual", False) # anything else is not implemented: UnsupportedModel
    md.arch.unread()                               # keys that no read has touched

A read that finds another type or an impossible value raises GGUFError with the key, what was found and what was
wanted. There is no silent default for what a file must carry: a default is given by the caller, at the read, or the
key is required.
"""

import builtins
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.values import StringArray, quote

REQUIRED: Any = object()  # as a default: the key must be there
_ABSENT = object()

_SHORT = {"uint": "u", "int": "i", "float": "f"}


class Metadata(Mapping[str, Any]):
    """Read-only mapping key -> value, in file order, of a GGUF file or of a plain dict (for tests and other sources).

    `md[key]` is a Python int, float, bool or str, a numpy array, a sequence of str (`StringArray`), or a list of
    arrays. Reading through the mapping is looking, not using: only typed reads and `expect` count as reads for
    `unread`.
    """

    def __init__(self, values: Mapping[str, Any], origin: str = "metadata"):
        self.origin = origin  # the file, for messages
        self._values = dict(values)
        self._read: set[str] = set()
        self._prefix = ""

    def scoped(self, prefix: str) -> "Metadata":
        """The keys that start with `prefix`, named without it. Values and the record of reads are shared."""
        view = object.__new__(Metadata)
        view.origin, view._values, view._read, view._prefix = (
            self.origin,
            self._values,
            self._read,
            self._prefix + prefix,
        )
        return view

    @property
    def architecture(self) -> str:
        """`general.architecture`, which every model must name."""
        return self.str("general.architecture")

    @property
    def arch(self) -> "Metadata":
        """The architecture's own keys: `md.arch.int("block_count")` reads `<architecture>.block_count`."""
        return self.scoped(self.architecture + ".")

    def __getitem__(self, key: builtins.str) -> Any:
        return _plain(self.typed(key))

    def __iter__(self) -> Iterator[builtins.str]:
        return (key.removeprefix(self._prefix) for key in self._values if key.startswith(self._prefix))

    def __len__(self) -> builtins.int:
        return sum(1 for _ in self)

    def __repr__(self) -> builtins.str:
        return f"Metadata({self.origin!r}, {len(self)} keys{f' below {self._prefix!r}' if self._prefix else ''})"

    def typed(self, key: builtins.str) -> Any:
        """The value with the file's own width: a numpy scalar where `md[key]` is a number. For writing it to another
        file unchanged."""
        return self._values[self._prefix + key]

    def type_name(self, key: builtins.str) -> builtins.str:
        """The value's type for people: `u32`, `f32`, `bool`, `string`, `i32[300]`, `string[300]`, `array[2]`."""
        return _type_name(self.typed(key))

    def int(self, key, default=REQUIRED, *, min=None, max=None) -> builtins.int:
        """An integer of any width, within [min, max] where given."""
        return self._number(key, default, _is_int, "an integer", min, max)

    def float(self, key, default=REQUIRED, *, min=None, max=None, positive=False) -> builtins.float:
        """A finite f32 or f64, within [min, max] where given; positive: above 0."""
        return self._number(key, default, _is_float, "a finite float", min, max, positive)

    def bool(self, key, default=REQUIRED) -> builtins.bool:
        return self._scalar(key, default, _is_bool, "a bool")

    def str(self, key, default=REQUIRED) -> builtins.str:
        """A string; bytes that are not UTF-8 are lone surrogates (see `values.decode`)."""
        return self._scalar(key, default, _is_str, "a string")

    def ints(self, key, default=REQUIRED, *, length=None, min=None, max=None) -> tuple[builtins.int, ...]:
        """Integers: an array, of `length` elements where given; a single number then stands for `length` equal
        ones."""
        return self._numbers(key, default, _is_int, "integers", length, min, max)

    def floats(
        self, key, default=REQUIRED, *, length=None, min=None, max=None, positive=False
    ) -> tuple[builtins.float, ...]:
        """Finite floats, as `ints`."""
        return self._numbers(key, default, _is_float, "finite floats", length, min, max, positive)

    def bools(self, key, default=REQUIRED, *, length=None) -> tuple[builtins.bool, ...]:
        """Bools, as `ints`."""
        return self._list(key, default, _is_bool, "bools", length)

    def strings(self, key, default=REQUIRED, *, length=None) -> Sequence[builtins.str]:
        """An array of strings, of `length` elements where given. Strings of a file are decoded when they are asked
        for."""
        value = self._find(key, default)
        if value is _ABSENT:
            return default
        if not isinstance(value, StringArray) and not (isinstance(value, list | tuple) and all(map(_is_str, value))):
            raise self._wrong(key, value, "an array of strings")
        self._check_length(key, value, length)
        return value

    def expect(self, key: builtins.str, *allowed: Any, required: builtins.bool = False) -> None:
        """Refuse with UnsupportedModel a value other than those `allowed`, which are all that is implemented. A file
        that lacks the key passes unless `required`."""
        value = self._find(key, REQUIRED if required else None)
        if value is not _ABSENT and not any(_equal(value, wanted) for wanted in allowed):
            wanted = " or ".join(map(repr, allowed))
            raise UnsupportedModel(
                f"{self.origin}: {self._describe(key, value)}, wanted {wanted}: nothing else is implemented"
            )

    def unread(self, prefix: builtins.str = "") -> list[builtins.str]:
        """Full names of the keys below this view and `prefix` that no typed read and no `expect` has touched, in file
        order."""
        return [key for key in self._values if key.startswith(self._prefix + prefix) and key not in self._read]

    def _find(self, key: builtins.str, default: Any) -> Any:
        """The stored value, or _ABSENT if the caller has a default; marks the key as read."""
        full = self._prefix + key
        self._read.add(full)
        value = self._values.get(full, _ABSENT)
        if value is _ABSENT and default is REQUIRED:
            raise GGUFError(f"{self.origin}: key {quote(full)} is missing, and the model cannot do without it")
        return value

    def _scalar(self, key, default, is_wanted, wanted):
        value = self._find(key, default)
        if value is _ABSENT:
            return default
        if not is_wanted(value):
            raise self._wrong(key, value, wanted)
        return _plain(value)

    def _number(self, key, default, is_wanted, wanted, low, high, positive=False):
        wanted += _range_text(low, high, positive)
        return self._scalar(key, default, lambda v: is_wanted(v) and _in_range(v, low, high, positive), wanted)

    def _list(self, key, default, is_wanted, wanted, length):
        value = self._find(key, default)
        if value is _ABSENT:
            return default
        if length is not None and is_wanted(value):
            return (_plain(value),) * length
        # one element tells for a numpy array, whose elements are of one type
        sample = value[:1] if isinstance(value, np.ndarray) else value if isinstance(value, list | tuple) else [None]
        if not all(map(is_wanted, sample)):
            raise self._wrong(key, value, f"an array of {wanted}")
        self._check_length(key, value, length)
        return tuple(value.tolist() if isinstance(value, np.ndarray) else value)

    def _numbers(self, key, default, is_wanted, wanted, length, low, high, positive=False):
        values = self._list(key, default, is_wanted, wanted, length)
        if values is not default:
            for i, value in enumerate(values):
                if not _in_range(value, low, high, positive):
                    where = f"{self.origin}: key {quote(self._prefix + key)} holds {value} at index {i}"
                    raise GGUFError(f"{where}, wanted {wanted}{_range_text(low, high, positive)}")
        return values

    def _check_length(self, key, value, length):
        if length is not None and len(value) != length:
            raise self._wrong(key, value, f"{length} elements")

    def _describe(self, key, value) -> builtins.str:
        shown = quote(value) if _is_str(value) else str(value) if np.isscalar(value) else ""
        return f"key {quote(self._prefix + key)} is {_type_name(value)} {shown}".rstrip()

    def _wrong(self, key, value, wanted) -> GGUFError:
        return GGUFError(f"{self.origin}: {self._describe(key, value)}, wanted {wanted}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(
        value, bool
    )  # Python's bool is an int, numpy's is not


def _is_float(value: Any) -> bool:
    return isinstance(value, float | np.floating)


def _in_range(value, low, high, positive) -> bool:
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and not (positive and value <= 0)
    )


def _range_text(low, high, positive) -> str:
    parts = [f">= {low}"] * (low is not None) + [f"<= {high}"] * (high is not None) + ["> 0"] * positive
    return " " + " and ".join(parts) if parts else ""


def _equal(value: Any, wanted: Any) -> bool:
    """Equality of one kind: a bool is no number, and an f32 equals the number that rounds to it."""
    if isinstance(value, np.float32) and _is_float(wanted):
        return bool(value == np.float32(wanted))
    return any(
        is_kind(wanted) and is_kind(value) and bool(value == wanted)
        for is_kind in (_is_bool, _is_int, _is_float, _is_str)
    )


def _type_name(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        kind = (
            value.dtype.name
            if value.dtype == bool
            else _SHORT[value.dtype.name.rstrip("0123456789")] + str(8 * value.dtype.itemsize)
        )
        return kind if isinstance(value, np.generic) else f"{kind}[{len(value)}]"
    if isinstance(value, str):
        return "string"
    if isinstance(value, StringArray):
        return f"string[{len(value)}]"
    return f"array[{len(value)}]" if isinstance(value, list | tuple) else type(value).__name__
