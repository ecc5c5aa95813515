"""The two classes that users of transformers begin with, for GGUF files and folders.

model = AutoModelForCausalLM.from_pretrained("model.gguf")
tokenizer = AutoTokenizer.from_pretrained("model.gguf")
batch = tokenizer(["Good morning", "A cat"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=20)))
"""

import os
from pathlib import Path

import torch

from dasllama_torch import hub
from dasllama_torch.api import load_model
from dasllama_torch.errors import UnsupportedModel
from dasllama_torch.gguf.reader import GGUFFile
from dasllama_torch.hf.common import import_transformers
from dasllama_torch.hf.tokenizer import hf_tokenizer_of
from dasllama_torch.modules.causal_lm import CausalLM


class AutoModelForCausalLM:
    """`load_model` under the name, and with the arguments, of transformers."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        gguf_file: str | None = None,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        device_map: str | torch.device | None = None,
        mode: str = "native",
        strict: bool = True,
        mmap: bool | None = None,
        progress: bool = True,
    ) -> CausalLM:
        """The model of a GGUF file, of `owner/repo:file.gguf` on the hub, of a name of the catalogue, or of a folder
        that transformers has written.

        gguf_file: a file of the folder or repository, as transformers has it. dtype, and torch_dtype, its older name:
        of the activations, "auto" or float32, the only one there is; weights keep the file's types. device_map: as
        device in `load_model`. mode, strict, mmap, progress and errors: as there; and DownloadError for what cannot be
        fetched.
        """
        for given in (dtype, torch_dtype):
            if given not in (None, "auto", torch.float32, "float32"):
                raise UnsupportedModel(f"dtype is {given}, wanted 'auto' or float32: weights keep the file's types")
        path = _resolve(pretrained_model_name_or_path, gguf_file, progress)
        model = load_model(path, mode, device_map or "cpu", strict=strict, mmap=mmap, progress=progress)
        model.name_or_path = os.fspath(pretrained_model_name_or_path)
        return model


class AutoTokenizer:
    """transformers' tokenizers, of GGUF files too."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *, gguf_file: str | None = None, progress: bool = True
    ):
        """A `PreTrainedTokenizerFast`. Where it comes from, and DownloadError: as `AutoModelForCausalLM`; of a file as
        `hf_tokenizer` makes it, of a folder transformers' own."""
        path = _resolve(pretrained_model_name_or_path, gguf_file, progress)
        if path.is_dir():
            transformers = import_transformers("for its tokenizers")
            return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return hf_tokenizer_of(GGUFFile(path).metadata)


def _resolve(name: str | os.PathLike, gguf_file: str | None, progress: bool) -> Path:
    path = Path(name)
    if gguf_file is not None:
        return path / gguf_file if path.is_dir() else hub.resolve(f"{os.fspath(name)}:{gguf_file}", progress)
    return path if path.is_dir() else hub.resolve(name, progress)
