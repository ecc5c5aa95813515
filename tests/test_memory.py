"""Weights read into memory: the same bytes as mapped ones, in huge pages, once."""

import gc
import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dasllama_torch as dl
from dasllama_torch import api, memory
from dasllama_torch.cache.pages import PageAllocator
from dasllama_torch.errors import GGUFError
from dasllama_torch.gguf import reader
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.gguf.writer import write_gguf, write_shards
from dasllama_torch.ops.ggml_types import F32

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.fixture
def tensors():
    rng = np.random.default_rng(1)
    return {f"t{i}": (rng.standard_normal((3 + i, 32), np.float32), F32) for i in range(5)}


def held(path, tensors):
    file = GGUFFile(path)
    seen = []
    file.read_tensors(seen.append)
    for name, (values, _) in tensors.items():
        np.testing.assert_array_equal(file.tensors[name].data.view(np.float32), values)
        assert file.tensors[name].data.ctypes.data % 32 == 0
    return sum(seen)


@pytest.mark.parametrize("piece", [reader.READ_BYTES, 300])
def test_tensors_are_read_from_every_file(tmp_path, tensors, piece, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", piece)
    write_gguf(tmp_path / "one.gguf", "llama", {}, tensors)
    nbytes = held(tmp_path / "one.gguf", tensors)
    assert 0 <= nbytes - sum(values.nbytes for values, _ in tensors.values()) < 4096 + 32 * 5
    shards = write_shards(tmp_path / "many", "llama", {}, tensors, 3)
    held(shards[1], tensors)


@pytest.mark.parametrize("piece", [reader.READ_BYTES, 300])
def test_a_file_cut_after_it_was_parsed(tmp_path, tensors, piece, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", piece)
    path = tmp_path / "one.gguf"
    write_gguf(path, "llama", {}, tensors)
    file = GGUFFile(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(GGUFError, match="one.gguf: truncated while it was read"):
        file.read_tensors()
    path.unlink()
    with pytest.raises(GGUFError, match="one.gguf: cannot be read: .*No such file"):
        file.read_tensors()


@linux
def test_huge_pages():
    if not memory.has_huge_pages():
        pytest.skip("this system gives no huge pages")
    block = memory.huge_pages(8 << 20)
    np.frombuffer(block, np.uint8)[:] = 1
    address = np.frombuffer(block, np.uint8).ctypes.data
    smaps = Path("/proc/self/smaps").read_text()
    sizes = [
        int(re.search(r"AnonHugePages: +(\d+) kB", entry)[1])
        for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps)
        if int(entry.split("-")[0], 16) <= address < int(entry.split("-")[1].split()[0], 16)
    ]
    assert len(sizes) == 1
    assert sizes[0] >= 4 << 10


@linux
@pytest.mark.parametrize("mapped", [None, True, False])
def test_where_weights_lie(oracle, mapped):
    path = oracle / "tiny" / "llama.gguf"
    model = dl.load_model(path, mmap=mapped)
    assert (path.name in mapped_files()) == (not memory.has_huge_pages() if mapped is None else mapped)
    ids = torch.arange(1, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dl.load_model(path, mmap=not mapped)(ids).logits)


@linux
def test_what_is_too_large_for_memory_stays_mapped(oracle, monkeypatch):
    path = oracle / "tiny" / "llama.gguf"
    monkeypatch.setattr("dasllama_torch.api.has_huge_pages", lambda: True)
    monkeypatch.setattr("dasllama_torch.api.available_memory", lambda: 2 * path.stat().st_size - 2)
    model = dl.load_model(path)
    assert path.name in mapped_files()
    assert model.config.n_embd == 64


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_while_a_model_loads(oracle, tmp_path, enabled, monkeypatch):
    """Whether that goes well or not, the collector is then as it was."""
    seen, build = [], api.build_model
    monkeypatch.setattr(
        api, "build_model", lambda *args, **kwargs: seen.append(gc.isenabled()) or build(*args, **kwargs)
    )
    (gc.enable if enabled else gc.disable)()
    try:
        dl.load_model(oracle / "tiny" / "llama.gguf")
        assert seen == [False]
        assert gc.isenabled() == enabled
        with pytest.raises(dl.GGUFError):
            dl.load_model(tmp_path / "none.gguf")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def resident() -> int:
    """Bytes of memory behind this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@linux
@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_free_pages_give_their_memory_back(oracle, name):
    """To the system, and only they: what a session and a prefix cache hold is as it was, and goes on."""
    model = dl.load_model(oracle / "tiny" / f"{name}.gguf")
    pool = dl.create_kv_pool(model, 16, "f32")
    ids = np.random.default_rng(0).integers(0, 256, 200).tolist()
    with dl.create_prefix_cache(model, pool) as cache:
        dl.create_session(model, prefix_cache=cache).eval(ids)
        kept, *others = (dl.create_session(model, pool=pool, n_ctx=1000) for _ in range(12))
        kept.eval(ids[:150])
        for other in others:
            other.eval(ids * 4, logits=None)
        held, used = pool.used_bytes, resident()
        for other in others[:-1]:
            other.close()
        dl.release_kv_pages(others[-1])
        assert others[-1].n_past == 0
        freed = held - pool.used_bytes
        assert freed > 2 << 20
        dl.release_kv_pages(pool)
        assert resident() < used - freed // 2  # runs of free pages are cut to whole pages of the system
        wanted = dl.create_session(model, "f32").eval(ids)
        assert torch.equal(kept.eval(ids[150:]), wanted)
        assert torch.equal(others[-1].eval(ids), wanted)
        again = dl.create_session(model, prefix_cache=cache)
        assert torch.equal(again.eval(ids), wanted)
        assert again.stats.reused_tokens >= 112


def test_runs_of_free_pages():
    pages = PageAllocator(20)
    taken = pages.take(10)
    pages.keep(6)
    pages.give_back([taken[i] for i in (4, 1, 2, 8, 6, 0)])
    assert pages.free_runs() == [(0, 3), (4, 5), (8, 9)]


@linux
def test_available_memory(tmp_path, monkeypatch):
    assert 0 < memory.available_memory() <= memory.physical_memory()
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "_GROUPS", [(tmp_path / "absent", tmp_path / "absent"), (limit, used)])
    limit.write_text("max\n")
    free = memory.available_memory()
    assert free > 12345678
    limit.write_text("12345678\n")
    assert memory.available_memory() == 12345678
    used.write_text("2345678\n")
    assert memory.available_memory() == 10000000
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemAvailable:       1000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert memory.available_memory() == 1024000
