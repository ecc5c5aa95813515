"""Typed reads: what they give, what they refuse and with which words, and what is left unread."""

import math

import numpy as np
import pytest

from dasllama_torch.errors import GGUFError, UnsupportedModel
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf

VALUES = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": np.uint32(2),
    "llama.negative": np.int16(-3),
    "llama.epsilon": np.float32(1e-5),
    "llama.double": np.float64(0.1),
    "llama.nan": np.float32(math.nan),
    "llama.infinite": np.float32(math.inf),
    "llama.zero": np.float32(0),
    "llama.flag": np.bool_(True),
    "llama.heads": np.array([4, 0, 2], np.int32),
    "llama.factors": np.array([1.0, 2.5, 8.0], np.float32),
    "llama.with_nan": np.array([1.0, math.nan], np.float32),
    "llama.pattern": np.array([True, False, True]),
    "llama.words": ["a", "b"],
    "llama.empty": np.array([], np.uint32),
    "llama.rope.scaling.type": "linear",
}


@pytest.fixture(params=["dict", "file"])
def md(request, tmp_path) -> Metadata:
    """The same metadata from a dict, and from a file (without the empty array, which the writer does not write)."""
    if request.param == "dict":
        return Metadata(VALUES, origin="tiny.gguf")
    written = {key: value for key, value in VALUES.items() if key != "llama.empty"}
    write_gguf(tmp_path / "tiny.gguf", "llama", written, {})
    return GGUFFile(tmp_path / "tiny.gguf").metadata


def refused(message, read, *args, error=GGUFError, **kwargs):
    with pytest.raises(error) as caught:
        read(*args, **kwargs)
    assert "tiny.gguf: key 'llama." in str(caught.value)
    assert message in str(caught.value)


def test_scalars(md):
    assert md.int("llama.block_count") == 2
    assert md.int("llama.negative", min=-3, max=-3) == -3
    assert md.float("llama.epsilon", positive=True) == float(np.float32(1e-5))
    assert md.float("llama.double", min=0.0, max=1.0) == 0.1
    assert md.bool("llama.flag") is True
    assert md.str("general.name") == "tiny"
    for value, kind in (
        (md.int("llama.block_count"), int),
        (md.float("llama.epsilon"), float),
        (md.bool("llama.flag"), bool),
    ):
        assert type(value) is kind


def test_missing_keys(md):
    for read in (md.int, md.float, md.bool, md.str, md.ints, md.floats, md.bools, md.strings):
        with pytest.raises(GGUFError, match=r"tiny.gguf: key 'llama\.absent' is missing"):
            read("llama.absent")
        assert read("llama.absent", None) is None
    assert md.int("llama.absent", -1, min=0) == -1  # the caller's own default is not checked
    assert md.ints("llama.absent", (), length=3) == ()
    with pytest.raises(GGUFError, match=r"key 'general\.architecture' is missing"):
        _ = Metadata({}).architecture


def test_wrong_types(md):
    refused("is f32 1e-05, wanted an integer", md.int, "llama.epsilon")
    refused("is bool True, wanted an integer >= 1", md.int, "llama.flag", min=1)
    refused("is string 'linear', wanted an integer", md.int, "llama.rope.scaling.type")
    refused("is i32[3], wanted an integer", md.int, "llama.heads")
    refused("is u32 2, wanted a finite float", md.float, "llama.block_count")
    refused("is u32 2, wanted a bool", md.bool, "llama.block_count")
    refused("is bool True, wanted a string", md.str, "llama.flag")
    refused("wanted a string", md.str, "llama.words")


def test_ranges(md):
    refused("is u32 2, wanted an integer >= 3", md.int, "llama.block_count", min=3)
    refused("is u32 2, wanted an integer >= 0 and <= 1", md.int, "llama.block_count", min=0, max=1)
    refused("is i16 -3, wanted an integer >= 0", md.int, "llama.negative", min=0)
    refused("is f32 nan, wanted a finite float", md.float, "llama.nan")
    refused("is f32 inf, wanted a finite float > 0", md.float, "llama.infinite", positive=True)
    refused("is f32 0.0, wanted a finite float > 0", md.float, "llama.zero", positive=True)
    refused("is f64 0.1, wanted a finite float >= 0.5", md.float, "llama.double", min=0.5)
    assert md.float("llama.zero") == 0.0


def test_arrays(md):
    assert md.ints("llama.heads") == md.ints("llama.heads", length=3, min=0, max=4) == (4, 0, 2)
    assert md.ints("llama.block_count", length=3, min=1) == (2, 2, 2)
    assert md.floats("llama.factors", length=3, positive=True) == (1.0, 2.5, 8.0)
    assert md.floats("llama.zero", length=2) == (0.0, 0.0)
    assert md.bools("llama.pattern", length=3) == (True, False, True)
    assert md.bools("llama.flag", length=2) == (True, True)
    assert list(md.strings("llama.words", length=2)) == ["a", "b"]
    assert {type(v) for v in md.ints("llama.heads")} == {int}
    assert {type(v) for v in md.floats("llama.factors")} == {float}
    assert {type(v) for v in md.bools("llama.pattern")} == {bool}


def test_wrong_arrays(md):
    refused("is i32[3], wanted 4 elements", md.ints, "llama.heads", length=4)
    refused("[2], wanted 3 elements", md.strings, "llama.words", length=3)
    refused("holds 0 at index 1, wanted integers >= 1", md.ints, "llama.heads", min=1)
    refused("holds 4 at index 0, wanted integers <= 3", md.ints, "llama.heads", max=3)
    refused("holds nan at index 1, wanted finite floats", md.floats, "llama.with_nan")
    refused("holds -3 at index 0, wanted integers >= 1", md.ints, "llama.negative", length=2, min=1)
    refused("is u32 2, wanted an array of integers", md.ints, "llama.block_count")
    refused("is f32[3], wanted an array of integers", md.ints, "llama.factors")
    refused("is i32[3], wanted an array of finite floats", md.floats, "llama.heads", length=3)
    refused("is bool[3], wanted an array of integers", md.ints, "llama.pattern", length=3)
    refused("is i32[3], wanted an array of bools", md.bools, "llama.heads", length=3)
    refused("is i32[3], wanted an array of strings", md.strings, "llama.heads")
    refused("wanted an array of integers", md.ints, "llama.words")
    refused("is string 'linear', wanted an array of strings", md.strings, "llama.rope.scaling.type")


def test_empty_and_nested_arrays():
    md = Metadata({**VALUES, "llama.nested": [np.array([1, 2], np.uint32), np.array([3], np.uint32)]}, "tiny.gguf")
    assert md.ints("llama.empty") == ()
    refused("is u32[0], wanted 2 elements", md.ints, "llama.empty", length=2)
    assert md.type_name("llama.nested") == "array[2]"
    refused("is array[2], wanted an array of integers", md.ints, "llama.nested")
    refused("is array[2], wanted an array of strings", md.strings, "llama.nested")


def test_plain_dicts():
    md = Metadata({"a": 3, "b": 0.5, "c": True, "d": [1, 2], "e": (False,)})
    assert (md.int("a"), md.float("b"), md.bool("c"), md.ints("d"), md.bools("e")) == (3, 0.5, True, (1, 2), (False,))
    with pytest.raises(GGUFError, match="metadata: key 'c' is bool True, wanted an integer"):
        md.int("c")


def test_architecture_view(md):
    assert md.architecture == "llama"
    assert md.arch.int("block_count") == 2
    assert md.arch.scoped("rope.").str("scaling.type") == "linear"
    refused("llama.absent' is missing", md.arch.int, "absent")
    refused("'llama.block_count' is u32 2, wanted a string", md.arch.str, "block_count")
    assert "block_count" in md.arch
    assert "llama.block_count" not in md.arch
    assert len(md.arch) == len([key for key in md if key.startswith("llama.")])
    assert md.arch["block_count"] == 2
    assert list(md.arch)[:2] == ["block_count", "negative"]


def test_mapping(md):
    assert md["llama.block_count"] == 2
    assert type(md["llama.block_count"]) is int
    assert md.get("llama.absent") is None
    assert md.get("general.name") == "tiny"
    assert dict(md)["llama.flag"] is True
    assert type(md.typed("llama.negative")) is np.int16
    with pytest.raises(KeyError):
        md["llama.absent"]
    with pytest.raises(TypeError):
        md["llama.block_count"] = 3


def test_expect(md):
    md.arch.expect("rope.scaling.type", "none", "linear")
    md.arch.expect("absent", "anything")
    md.arch.expect("epsilon", 1e-5)  # as f32
    md.arch.expect("double", 0.1)
    md.arch.expect("flag", True)
    refused(
        "is string 'linear', wanted 'none' or 'yarn'",
        md.arch.expect,
        "rope.scaling.type",
        "none",
        "yarn",
        error=UnsupportedModel,
    )
    refused("is bool True, wanted False", md.arch.expect, "flag", False, error=UnsupportedModel)
    refused("is bool True, wanted 1", md.arch.expect, "flag", 1, error=UnsupportedModel)
    refused("is u32 2, wanted True or 2.0", md.arch.expect, "block_count", True, 2.0, error=UnsupportedModel)
    refused("is f32 1e-05, wanted 0.0001", md.arch.expect, "epsilon", 1e-4, error=UnsupportedModel)
    refused("is i32[3], wanted 4", md.arch.expect, "heads", 4, error=UnsupportedModel)
    refused("is missing", md.arch.expect, "absent", 1, required=True)


def test_unread(md):
    everything = [key for key in md if key.startswith("llama.")]
    assert md.unread("llama.") == md.arch.unread() == everything
    md.get("llama.block_count")  # looking is not using
    assert "llama.block_count" in md
    assert md.arch.unread() == everything
    md.int("llama.block_count")
    md.arch.float("epsilon")
    md.arch.ints("heads")
    md.arch.strings("words")
    md.arch.scoped("rope.").expect("scaling.type", "linear")
    with pytest.raises(GGUFError):
        md.arch.float("nan")
    read = {"block_count", "epsilon", "heads", "words", "rope.scaling.type", "nan"}
    left = [key for key in everything if key.removeprefix("llama.") not in read]
    assert md.unread("llama.") == md.arch.unread() == left
    assert md.arch.unread("with") == ["llama.with_nan"]
    assert md.unread()[0] == "general.name"


def test_hostile_text_is_quoted():
    md = Metadata({"k\x1b[2J": "\udcff" + "x" * 1000}, "f\x00")
    with pytest.raises(GGUFError) as caught:
        md.int("k\x1b[2J")
    assert r"'k\x1b[2J' is string '\udcffxxx" in str(caught.value)
    assert "(1001 characters)" in str(caught.value)
