"""Physical cores within a process's limits, on made-up machines, and that the command line keeps to them."""

import os

import pytest

from dasllama_torch import threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine: which processors share a core, which of them the process may use, what its group is given."""

    def make(siblings: dict[int, str], affinity, **files: str) -> None:
        for cpu, text in siblings.items():
            folder = tmp_path / f"cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text + "\n")
        for name, text in files.items():
            (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(threads, "_CPUS", tmp_path)
        monkeypatch.setattr(threads, "_GROUP_2", tmp_path / "max")
        monkeypatch.setattr(threads, "_GROUP_1", [tmp_path / "quota", tmp_path / "period"])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity), raising=False)

    return make


HYPER_THREADED = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


@pytest.mark.parametrize(
    ("siblings", "affinity", "files", "cores"),
    [
        (HYPER_THREADED, range(8), {}, 4),
        (HYPER_THREADED, [0, 4, 1], {}, 2),
        (HYPER_THREADED, range(8), dict(max="max 100000"), 4),
        (HYPER_THREADED, range(8), dict(max="250000 100000"), 2),
        (HYPER_THREADED, range(8), dict(max="50000 100000"), 1),
        (HYPER_THREADED, range(8), dict(max="900000 100000"), 4),
        (HYPER_THREADED, range(8), dict(quota="300000", period="100000"), 3),
        (HYPER_THREADED, range(8), dict(quota="-1", period="100000"), 4),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, range(4), {}, 2),
        ({}, range(6), {}, 6),
    ],
)
def test_cores_of_made_up_machines(machine, siblings, affinity, files, cores):
    machine(siblings, affinity, **files)
    assert threads.usable_cores() == cores


def test_elsewhere_all_processors_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert threads.usable_cores() == 12


def test_this_machine():
    assert 1 <= threads.usable_cores() <= os.cpu_count()
