"""A model's folder as transformers writes it: config.json, safetensors in one file or several, a tokenizer.

folder = HFFolder("Qwen3-0.6B")
model = build_model(folder.metadata, folder.source())
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dasllama_torch.errors import FolderError
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.hf.common import import_transformers, read_json
from dasllama_torch.hf.config import gguf_facts
from dasllama_torch.hf.source import HFSource
from dasllama_torch.hf.vocabulary import gguf_vocabulary

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HFFolder:
    """metadata: what a GGUF file of the model would say. generation: what generation_config.json says, if it is there.

    Raises FolderError for a file that is missing or broken, UnsupportedModel for a model that is not implemented,
    TokenizerError for a tokenizer that is not.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        origin = self.path / "config.json"
        config = _config(self.path)
        self._values, self._computed = gguf_facts(config, str(origin))
        self._tied = bool(config.get_text_config(decoder=True).tie_word_embeddings)
        vocabulary = gguf_vocabulary(self.path, self._values)
        self.metadata = Metadata({**self._values, **vocabulary}, origin=str(self.path))
        generation = self.path / "generation_config.json"
        self.generation: dict[str, Any] = read_json(generation) if generation.is_file() else {}

    def source(self) -> HFSource:
        """The weights, which stay in their mapped files where they are served as they are."""
        tensors = SafetensorsFolder(self.path)
        if not self._tied and not any(name.endswith("lm_head.weight") for name in tensors):
            raise FolderError(f"{self.path}: lm_head.weight is missing, and config.json ties no head to the embeddings")
        return HFSource(tensors, self._values, self._computed, self._tied, str(self.path))


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors, each read from its mapped file when it is asked for."""

    def __init__(self, path: Path):
        self.path = path
        self._open: dict[str, Any] = {}
        if (index := path / INDEX).is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise FolderError(f"{index}: has no weight_map, wanted one of tensors to files")
            self._file_of = weight_map
            for file in set(weight_map.values()):
                if not isinstance(file, str) or Path(file).name != file:
                    raise FolderError(f"{index}: names the file {file!r}, wanted one of the same folder")
        elif (path / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise FolderError(f"{path}: has neither {SINGLE} nor {INDEX}; wanted weights as safetensors")

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with _readable(self.path / file):
            return self._handle(file).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _handle(self, file: str):
        from safetensors import safe_open

        if file not in self._open:
            with _readable(self.path / file):
                self._open[file] = safe_open(self.path / file, framework="pt")
        return self._open[file]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise FolderError(f"{path}: {error}") from None


def _config(path: Path):
    """transformers' config of a folder."""
    read_json(path / "config.json")  # a broken file is told apart from what transformers does not know
    transformers = import_transformers("to read a folder of transformers")
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the checks of its config classes raise errors of many kinds
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise FolderError(f"{path / 'config.json'}: transformers does not take it: {why[0]}") from None
