"""Files that lie: each is refused at once, with an error that names what is wrong, and without setting memory aside.

Files are put together byte by byte here, by the specification (ggml/docs/gguf.md), and by no code of the package.
"""

import os
import struct
import sys
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dasllama_torch as dl
from dasllama_torch.errors import DasllamaError, GGUFError
from dasllama_torch.gguf import values
from dasllama_torch.gguf.reader import GGUFFile

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
TYPE_F32, TYPE_Q4_0, TYPE_Q4_K = 0, 2, 12


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return u64(len(raw)) + raw


def key(name, kind, payload):
    return text(name) + u32(kind) + payload


def tensor(name, dims, qtype=TYPE_F32, offset=0, n_dims=None):
    """dims: fastest first, as in the file."""
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + u32(n_dims) + b"".join(map(u64, dims)) + u32(qtype) + u64(offset)


ARCH = key("general.architecture", STRING, text("llama"))


def build(keys=(ARCH,), tensors=(), data=b"", *, head=b"GGUF\3\0\0\0", n_keys=None, n_tensors=None, alignment=32):
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_keys = len(keys) if n_keys is None else n_keys
    header = head + u64(n_tensors) + u64(n_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


@pytest.fixture
def refuse(tmp_path):
    """refuse(content, *parts): the file is refused within a second and a megabyte, and the message holds the parts."""

    def check(content, *parts, name="model.gguf"):
        path = tmp_path / name
        path.write_bytes(content)
        tracemalloc.start()
        start = time.process_time()
        try:
            with pytest.raises(GGUFError) as caught:
                GGUFFile(path)
            seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        for part in (name, *parts):
            assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
        assert seconds < 1
        assert peak < 1 << 20
        assert len(str(caught.value)) < 1000

    return check


def test_the_builder_builds_good_files(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build(tensors=[tensor("a", (4, 2))], data=np.arange(8, dtype=np.float32).tobytes()))
    file = GGUFFile(path)
    assert file.metadata.architecture == "llama"
    assert file.tensors["a"].shape == (2, 4)
    assert file.tensors["a"].data.view(np.float32).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- the head of the file


def test_not_gguf(refuse):
    refuse(b"", "empty")
    refuse(b"GG", "truncated", "needs 4 bytes", "found 2")
    refuse(b"<!DOCTYPE html>" * 10, "not a GGUF file", "<!DO")
    refuse(b"ggjt" + u32(3) + bytes(100), "not a GGUF file", "ggjt")


def test_versions(refuse):
    refuse(build(head=b"GGUF" + u32(1)), "GGUF version 1, wanted 2 or 3")
    refuse(build(head=b"GGUF" + u32(4)), "GGUF version 4, wanted 2 or 3")
    refuse(build(head=b"GGUF" + u32(0)), "GGUF version 0, wanted 2 or 3")


def test_big_endian(refuse):
    refuse(b"GGUF" + bytes.fromhex("00000003") + struct.pack(">QQ", 1, 1) + bytes(200), "big-endian", "version 3")
    refuse(b"GGUF" + bytes.fromhex("00000002") + bytes(200), "big-endian", "version 2")


def test_big_endian_file_of_the_gguf_package(refuse, tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse((tmp_path / "big.gguf").read_bytes(), "big-endian")


@pytest.mark.parametrize("count", [99, 1 << 31, 1 << 58, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_counts_beyond_the_file(refuse, count):
    refuse(build(n_keys=count), "truncated or corrupt", f"{count} keys")
    refuse(build(n_tensors=count), "truncated or corrupt", f"{count} tensors")


def test_counts_within_the_file_and_beyond_reason(refuse, monkeypatch):
    monkeypatch.setattr(values, "LIMITS", {"keys": 4, "tensors": 3, "strings": 5, "inner arrays": 2})
    small = [key(f"k{i}", U8, b"\0") for i in range(6)]
    refuse(build(keys=small), "6 keys", "wanted at most 4")
    refuse(build(tensors=[tensor(str(i), (1,)) for i in range(4)]), "4 tensors", "wanted at most 3")
    strings = u32(STRING) + u64(3) + 3 * text("s")
    refuse(build(keys=[key("a", ARRAY, strings), key("b", ARRAY, strings)]), "key 'b'", "3 strings", "wanted at most 5")
    inner = u32(U8) + u64(0)
    refuse(build(keys=[key("a", ARRAY, u32(ARRAY) + u64(3) + 3 * inner)]), "3 inner arrays", "wanted at most 2")


# --- keys and values


def test_key_names(refuse):
    refuse(build(keys=[key("", U8, b"\0")]), "key 0 of 1", "0 bytes, wanted 1 to 65535")
    refuse(build(keys=[ARCH, key(b"a\xff", U8, b"\0")]), "key 1 of 2", "not UTF-8")
    refuse(build(keys=[ARCH, key("a" * 65536, U8, b"\0")]), "65536 bytes, wanted 1 to 65535")
    refuse(build(keys=[u64(1 << 63) + b"general" + bytes(100)]), f"{1 << 63} bytes")
    refuse(build(keys=[ARCH, ARCH]), "'general.architecture' appears twice")


@pytest.mark.parametrize("size", [1 << 31, 2_000_000_000, 1 << 63, (1 << 64) - 1])
def test_string_length(refuse, size):
    refuse(build(keys=[key("name", STRING, u64(size) + b"short" + bytes(50))]), "key 'name'", f"needs {size} bytes")
    tokens = u32(STRING) + u64(2) + text("a") + u64(size) + bytes(100)
    refuse(build(keys=[key("tokens", ARRAY, tokens)]), "key 'tokens'", "string 1 of 2")


@pytest.mark.parametrize("kind", [U8, I32, F32, BOOL, STRING, ARRAY, F64])
@pytest.mark.parametrize("count", [1 << 31, 1 << 61, 1 << 63, (1 << 64) - 1])
def test_array_length(refuse, kind, count):
    refuse(build(keys=[key("list", ARRAY, u32(kind) + u64(count) + bytes(64))]), "key 'list'", str(count))


def test_value_types(refuse):
    refuse(build(keys=[key("k", 13, bytes(64))]), "key 'k' has value type 13, wanted 0 to 12")
    refuse(build(keys=[key("k", 2**32 - 1, bytes(64))]), "value type 4294967295")
    refuse(build(keys=[key("k", ARRAY, u32(13) + u64(1) + bytes(64))]), "key 'k' has element type 13")
    refuse(build(keys=[key("k", BOOL, b"\2" + bytes(64))]), "key 'k' is a bool with value 2, wanted 0 or 1")
    refuse(build(keys=[key("k", ARRAY, u32(BOOL) + u64(2) + b"\1\7" + bytes(64))]), "key 'k' is a bool with value 7")


def test_nested_arrays(tmp_path, refuse):
    def nested(depth):
        leaf = u32(U16) + u64(2) + struct.pack("<HH", 7, 9)
        return leaf if depth == 1 else u32(ARRAY) + u64(1) + nested(depth - 1)

    path = tmp_path / "good.gguf"
    two = u32(ARRAY) + u64(2) + nested(1) + u32(STRING) + u64(1) + text("x")
    path.write_bytes(build(keys=[key("four", ARRAY, nested(4)), key("two", ARRAY, two)]))
    metadata = GGUFFile(path).metadata
    assert metadata["four"][0][0][0].tolist() == [7, 9]
    assert metadata["two"][0].tolist() == [7, 9]
    assert list(metadata["two"][1]) == ["x"]
    refuse(build(keys=[key("five", ARRAY, nested(5))]), "key 'five' nests arrays more than 4 deep")
    refuse(build(keys=[key("deep", ARRAY, (u32(ARRAY) + u64(1)) * 100_000)]), "key 'deep' nests arrays more than 4")


def test_long_token_texts_are_no_fault(tmp_path):
    path = tmp_path / "model.gguf"
    tokens = u32(STRING) + u64(3) + text("a") + text("b" * 300_000) + text("")
    path.write_bytes(build(keys=[key("tokens", ARRAY, tokens)]))
    assert [len(token) for token in GGUFFile(path).metadata.strings("tokens")] == [1, 300_000, 0]


@pytest.mark.parametrize("value", [0, 1, 4, 24, 33, (1 << 20) + 8, 1 << 21, 1 << 31])
def test_alignment(refuse, value):
    refuse(build(keys=[key("general.alignment", U32, u32(value))]), "general.alignment", f"'{value}'", "power of two")


def test_alignment_type(refuse):
    refuse(build(keys=[key("general.alignment", U64, u64(32))]), "general.alignment", "uint64", "wanted uint32")
    refuse(build(keys=[key("general.alignment", STRING, text("32"))]), "general.alignment", "str", "wanted uint32")


# --- tensors


def test_dimension_product_overflows(refuse):
    """ggml-org/llama.cpp#18674: 2**42 + 1 rows, whose bytes wrap to a small number in 64 bits."""
    rows = 4398046511105
    content = build(tensors=[tensor("blk.0.attn_q.weight", (1 << 20, rows))], data=bytes(1 << 10))
    refuse(content, "tensor 'blk.0.attn_q.weight'", f"needs {(1 << 22) * rows} bytes", "found 1024")
    for dims in ((1 << 63, 1 << 63), ((1 << 64) - 1,) * 4, (1 << 32, 1 << 32), (1 << 62, 4)):
        refuse(build(tensors=[tensor("t", dims)], data=bytes(64)), "tensor 't'", "found 64")


def test_dimensions(refuse):
    refuse(build(tensors=[tensor("t", (1,) * 5)], data=bytes(64)), "tensor 't' has 5 dimensions, wanted at most 4")
    refuse(build(tensors=[tensor("t", (1,), n_dims=1 << 31)], data=bytes(64)), f"{1 << 31} dimensions")
    refuse(
        build(tensors=[tensor("t", (2, 0))], data=bytes(64)), "tensor 't' has shape [0, 2], wanted no dimension of 0"
    )
    refuse(build(tensors=[tensor("t", (0, 2))], data=bytes(64)), "tensor 't' has shape [2, 0]")


def test_tensor_types(refuse):
    for qtype in (4, 5, 31, 36, 255, 1 << 31):
        refuse(
            build(tensors=[tensor("t", (32,), qtype)], data=bytes(64)), f"tensor 't' has tensor type {qtype}, wanted"
        )


def test_rows_of_broken_blocks(refuse):
    refuse(build(tensors=[tensor("t", (33, 2), TYPE_Q4_0)], data=bytes(64)), "rows of 33 elements", "32 for type Q4_0")
    refuse(
        build(tensors=[tensor("t", (32, 8), TYPE_Q4_K)], data=bytes(999)), "rows of 32 elements", "256 for type Q4_K"
    )


def test_tensor_names(refuse):
    refuse(build(tensors=[tensor("", (1,))], data=bytes(64)), "the name of tensor 0 of 1", "0 bytes")
    refuse(build(tensors=[tensor(b"\xc3\x28", (1,))], data=bytes(64)), "not UTF-8")
    twice = [tensor("t", (1,)), tensor("t", (1,), offset=32)]
    refuse(build(tensors=twice, data=bytes(64)), "tensor 't' appears twice")
    long = "\x1b[31m" + "x" * 60_000
    refuse(build(tensors=[tensor(long, (0,))]), r"'\x1b[31mxxx", "(60005 characters)")


def test_offsets(refuse):
    refuse(
        build(tensors=[tensor("t", (1,), offset=4)], data=bytes(64)),
        "'t' is at offset 4",
        "multiple of the alignment 32",
    )
    refuse(build(tensors=[tensor("t", (1,), offset=64)], data=bytes(64)), "tensor 't'", "needs 4 bytes", "found 0")
    refuse(build(tensors=[tensor("t", (1,), offset=(1 << 64) - 32)], data=bytes(64)), "tensor 't'", "found 0")
    refuse(build(tensors=[tensor("t", (16,))], data=bytes(63)), "tensor 't' [16] F32 needs 64 bytes", "found 63")


def test_overlaps(refuse):
    both = [tensor("late", (8,), offset=32), tensor("early", (9,), offset=0)]
    refuse(build(tensors=both, data=bytes(96)), "tensor 'late' starts at byte", "where tensor 'early' ends")
    same = [tensor("one", (8,)), tensor("two", (8,))]
    refuse(build(tensors=same, data=bytes(96)), "'one'", "'two'")


# --- paths


def test_paths(tmp_path):
    with pytest.raises(GGUFError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFFile(tmp_path)
    with pytest.raises(GGUFError, match="no such file"):
        GGUFFile("nul\0byte.gguf")
    with pytest.raises(GGUFError, match="no such file"):
        GGUFFile("x" * 5000 + "-00001-of-00001.gguf")
    for name in ("smollm2", "owner/repo:file.gguf"):
        with pytest.raises(GGUFError, match=f"{name}: no such file; .*from_pretrained"):
            dl.load_model(name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build())
    path.chmod(0)
    with pytest.raises(GGUFError, match="cannot be opened"):
        GGUFFile(path)


# --- shards


def shard(number, count, total, tensors, *more_keys):
    keys = [
        *more_keys,
        key("split.no", U16, struct.pack("<H", number)),
        key("split.count", U16, struct.pack("<H", count)),
        key("split.tensors.count", I32, struct.pack("<i", total)),
    ]
    return build(keys, [tensor(name, (8,), offset=32 * i) for i, name in enumerate(tensors)], bytes(32 * len(tensors)))


@pytest.fixture
def three(tmp_path):
    """Paths of a good set of three shards, a to e."""
    paths = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for number, (path, names, more) in enumerate(zip(paths, ("ab", "cd", "e"), ([ARCH], [], []), strict=True)):
        path.write_bytes(shard(number, 3, 5, names, *more))
    return paths


def test_shards_from_any_member(three):
    for path in three:
        file = GGUFFile(path)
        assert list(file.tensors) == list("abcde")
        assert file.metadata.architecture == "llama"
        assert file.paths == tuple(three)


def refused(path, *parts):
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_a_missing_shard(three):
    three[1].unlink()
    for path in (three[0], three[2]):
        refused(path, path.name, "one of 3 shards", "missing beside it: 'm-00002-of-00003.gguf'")


def test_a_shard_of_another_model(three):
    three[1].write_bytes(shard(1, 3, 5, "cd", key("general.architecture", STRING, text("qwen2"))))
    refused(three[0], three[1].name, "of another model", "'general.architecture' is 'qwen2', wanted 'llama'")
    three[1].write_bytes(shard(1, 4, 5, "cd"))
    refused(three[2], three[1].name, "of another model", "'split.count' is '4', wanted '3'")
    three[1].write_bytes(shard(1, 3, 9, "cd"))
    refused(three[0], three[1].name, "of another model", "'split.tensors.count' is '9', wanted '5'")
    three[1].write_bytes(build())
    refused(three[0], three[1].name, "'split.count' is missing, wanted 3")


def test_a_shard_in_the_wrong_place(three):
    three[1].write_bytes(three[2].read_bytes())
    refused(three[0], three[1].name, "'split.no' is '2', wanted 1", "file 2 of 3")


def test_shards_that_lack_tensors(three):
    three[2].write_bytes(shard(2, 3, 5, ""))
    refused(three[0], "'split.tensors.count' is '5', wanted 4")


def test_duplicate_tensor_names_over_shards(three):
    three[2].write_bytes(shard(2, 3, 5, "a"))
    refused(three[0], three[2].name, "tensor 'a' appears twice in the model")


@pytest.mark.parametrize(
    "name",
    ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf", "m-00001-of-60000.gguf"],
)
def test_shard_names_out_of_range(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(shard(0, 60000, 1, "a", ARCH))
    refused(path, name, "the name says shard", "wanted 1 to 512 shards, numbered from 1")


def test_split_count_of_60000(three, tmp_path):
    three[0].write_bytes(shard(0, 60000, 5, "ab", ARCH))
    refused(three[0], "'split.count' is '3', wanted '60000'")
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(shard(0, 60000, 5, "ab", ARCH))
    refused(alone, "'split.count' is '60000', wanted 1", "<stem>-00001-of-00003.gguf")
    alone.write_bytes(build(keys=[ARCH, key("split.count", STRING, text("../../m"))]))
    refused(alone, "'split.count'", "wanted 1")


def test_what_merging_leaves_behind(tmp_path):
    """llama.cpp's gguf-split --merge sets split.count to 0 and keeps the other split keys of the first shard."""
    path = tmp_path / "merged.gguf"
    path.write_bytes(shard(0, 0, 5, "ab", ARCH))
    assert list(GGUFFile(path).tensors) == ["a", "b"]


@pytest.mark.parametrize("name", ["{0}%s-00001-of-00001.gguf", "a\n-00001-of-00001.gguf", "..-00001-of-00001.gguf"])
def test_odd_stems(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(shard(0, 1, 1, "a", ARCH))
    assert GGUFFile(path).paths == (path,)


def test_foreign_digits_make_no_shard(tmp_path):
    """Only ASCII digits number a shard: other scripts' digits would name siblings that differ from the pattern."""
    path = tmp_path / "m-٠٠٠٠١-of-٠٠٠٠٢.gguf"
    path.write_bytes(build())
    assert GGUFFile(path).paths == (path,)


# --- fuzzing


def everything() -> bytes:
    """A good file of some 7 kB with each value type and several tensors, whose header is longer than 4 kB."""
    scalars = [(U8, "<B"), (I8, "<b"), (U16, "<H"), (I16, "<h"), (U32, "<I"), (I32, "<i"), (U64, "<Q"), (I64, "<q")]
    keys = [ARCH, key("general.alignment", U32, u32(64)), key("flag", BOOL, b"\1")]
    keys += [key(f"scalar.{kind}", kind, struct.pack(code, 5)) for kind, code in [*scalars, (F32, "<f"), (F64, "<d")]]
    keys += [
        key(f"list.{kind}", ARRAY, u32(kind) + u64(3) + struct.pack("<3" + code[1], 1, 2, 3)) for kind, code in scalars
    ]
    keys += [key("nested", ARRAY, u32(ARRAY) + u64(2) + 2 * (u32(U8) + u64(2) + b"\1\2"))]
    keys += [key("tokens", ARRAY, u32(STRING) + u64(300) + b"".join(text(f"t{i}") for i in range(300)))]
    types = [(TYPE_F32, 32, 4 * 32), (TYPE_Q4_0, 32, 18), (TYPE_Q4_K, 256, 144)]
    tensors, offset = [], 0
    for i in range(12):
        qtype, row, row_bytes = types[i % 3]
        tensors.append(tensor(f"blk.{i}.weight", (row, 2), qtype, offset))
        offset += -(-2 * row_bytes // 64) * 64
    return build(keys, tensors, bytes(offset), alignment=64)


def walk(path) -> None:
    """Open a file and touch all that it holds; only our errors, with the path, may come of it."""
    try:
        file = GGUFFile(path)
    except DasllamaError as e:
        if str(path) not in str(e):
            raise
        return
    for name in file.metadata:
        value = file.metadata[name]
        file.metadata.type_name(name)
        if isinstance(value, values.StringArray):
            assert len(list(value)) == len(value)
    size = path.stat().st_size
    for found in file.tensors.values():
        assert 0 < found.offset <= found.offset + found.nbytes <= size
        found.data.sum()


def test_truncation_at_every_byte(tmp_path):
    content = everything()
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert len(GGUFFile(path).tensors) == 12
    assert len(content) > 5000
    start = time.process_time()
    used = len(content) - 32  # the last tensor's rows do not fill the last 64 bytes
    for size in [*range(used - 1, 4096, -97), *range(4096, -1, -1)]:
        os.truncate(path, size)
        with pytest.raises(GGUFError, match=r"truncated|empty"):
            GGUFFile(path)
    assert time.process_time() - start < 30


def test_extreme_numbers_at_every_byte(tmp_path):
    """Wherever a count, length, type, offset or dimension is, it gets two of these values, and each byte of it."""
    content = everything()
    header = content.index(b"blk.0.weight") + 200  # some tensors' entries; all others are like them
    path = tmp_path / "model.gguf"
    slowest = 0.0
    extremes = [0, 1 << 31, 1 << 58, (1 << 64) - 1]
    tokens = content.index(b"tokens") + 60  # the strings after this are alike
    for at in [*range(8, tokens), *range(tokens, header - 250, 41), *range(header - 250, header)]:
        for value in extremes[at % 2 :: 2]:
            path.write_bytes(content[:at] + u64(value) + content[at + 8 :])
            start = time.process_time()
            walk(path)
            slowest = max(slowest, time.process_time() - start)
    assert slowest < 1


EDIT = st.tuples(
    st.sampled_from(["set", "insert", "delete", "copy"]), st.integers(0, 7000), st.binary(min_size=1, max_size=9)
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDIT, min_size=1, max_size=6))
def test_random_edits(tmp_path, edits):
    content = bytearray(everything())
    for what, at, raw in edits:
        at %= len(content)
        if what == "set":
            content[at : at + len(raw)] = raw
        elif what == "insert":
            content[at:at] = raw
        elif what == "delete":
            del content[at : at + len(raw)]
        else:
            content[at : at + 64] = content[at // 2 : at // 2 + 64]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    start = time.process_time()
    walk(path)
    assert time.process_time() - start < 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files of a terabyte")
def test_a_sparse_file_of_claims_is_not_read(tmp_path):
    """A terabyte of nothing behind a claim of 2**31 keys: the size backs the claim, the limit refuses it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(build(n_keys=1 << 31))
    try:
        os.truncate(path, 1 << 40)
    except OSError as e:
        pytest.skip(f"no sparse file of a terabyte here: {e}")
    start = time.process_time()
    with pytest.raises(GGUFError, match=f"{1 << 31} keys, wanted at most"):
        GGUFFile(path)
    assert time.process_time() - start < 1
