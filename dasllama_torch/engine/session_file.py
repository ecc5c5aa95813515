"""A session in a file: safetensors with the tensors of `cache.snapshot` and of the session, and one JSON text.

The file is for one model and one codec of keys and values; the pool's page size is no matter. Going on from it gives
the bits that going on with the session would have given.
"""

import json
import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dasllama_torch.cache import snapshot
from dasllama_torch.config import MAX_CONTEXT
from dasllama_torch.engine.embeddings import EMBEDDING, MAX_POSITION, N_AXES, Span, has_axes
from dasllama_torch.errors import SessionFileError
from dasllama_torch.files import appearing
from dasllama_torch.ops.kv_codecs import codec_pair, pair_name

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Session
    from dasllama_torch.modules.causal_lm import CausalLM

KEY = "dasllama_torch.session"  # of the JSON text in safetensors' own metadata
VERSION = 1
SAMPLE = 1 << 16  # bytes at each end of a large tensor that tell models apart


def fingerprint(model: "CausalLM") -> str:
    """BLAKE2b-256 of what a session's keys and values depend on: the config; name, dtype and shape of each parameter
    and buffer; the type of each packed matrix and how it is multiplied; the bytes of all tensors up to 128 KiB, norms
    and biases among them, and of larger ones the first and the last 64 KiB. Hooks and changed code do not show.
    """
    found = blake2b(repr(model.config).encode(), digest_size=32)
    for name, module in model.named_modules():
        if "qtype" in vars(module):
            found.update(repr((name, module.qtype, vars(module).get("native"))).encode())
    for name, tensor in model.state_dict().items():
        found.update(repr((name, tensor.dtype, list(tensor.shape))).encode())
        data = tensor.reshape(-1).view(torch.uint8)
        for part in [data] if len(data) <= 2 * SAMPLE else [data[:SAMPLE], data[-SAMPLE:]]:
            found.update(part.cpu().numpy())
    return found.hexdigest()


def save(session: "Session", path: str | os.PathLike) -> None:
    """See `Session.save`."""
    sequence = session.sequence
    tensors = snapshot.read(sequence)
    extent = snapshot.Extent.of(sequence)
    tensors |= {
        "tokens": torch.tensor(session.tokens, dtype=torch.int64),
        "pending": torch.tensor(session.pending, dtype=torch.int64),
        "generator": session.generator.get_state(),
    }
    if session.logits is not None:
        tensors["logits"] = session.logits
    spans = []
    for i, span in enumerate(session.spans):
        spans.append({"start": span.start, "stop": span.stop, "causal": span.causal, "digest": span.digest.hex()})
        if span.positions is not None:
            tensors[f"spans.{i}.positions"] = span.positions.clone()  # spans of one picture share them
    facts = {
        "version": VERSION,
        "model": fingerprint(session.model),
        "kv_dtype": [codec.name for codec in session.pool.codecs],
        "n_ctx": session.n_ctx,
        "on_full": session.on_full,
        "keep": session.keep,
        "rewind": sequence.rewind,
        "first": extent.first,
        "checkpoints": extent.checkpoints,
        "spans": spans,
    }
    try:
        with appearing(path) as part:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {KEY: json.dumps(facts)})
    except (OSError, SafetensorError) as error:
        raise SessionFileError(f"{path}: the session cannot be written: {error}") from None


class SessionFile:
    """A file of `save`, opened for a model. kv_dtype: of the session; how: its other arguments of `create_session`.

    Raises SessionFileError for a file that cannot be read or is no session of the model. What a file says is checked
    before it is used: a hostile one may hold wrong numbers, but nothing that reads or writes past an end.
    """

    def __init__(self, path: str | os.PathLike, model: "CausalLM"):
        self.path, self.model = path, model
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self._fault(f"no session can be read: {error}") from None
        self._left = set(self._file.keys())
        facts = self._facts()
        self.how = {key: facts[key] for key in ("n_ctx", "rewind", "on_full", "keep")}
        try:
            self.kv_dtype = pair_name(codec_pair(facts["kv_dtype"]))
        except ValueError as error:
            raise self._fault(str(error)) from None
        tokens, pending = self._tensor("tokens", torch.int64), self._tensor("pending", torch.int64)
        self.spans = self._spans(facts["spans"], len(tokens))
        self.extent = snapshot.Extent(len(tokens), tuple(facts["first"]), tuple(facts["checkpoints"]))
        embedded = torch.zeros_like(tokens, dtype=torch.bool)
        for span in self.spans:
            embedded[span.start : span.stop] = True
        if not torch.equal(tokens == EMBEDDING, embedded):
            raise self._fault("tokens and spans do not agree on which rows are embeddings")
        ids = torch.cat([tokens[~embedded], pending])
        if ids.numel() and not 0 <= ids.min() <= ids.max() < model.config.n_vocab:
            raise self._fault(f"a token id is outside the vocabulary of {model.config.n_vocab}")
        n_ctx = facts["n_ctx"]
        if len(tokens) > n_ctx or len(tokens) + len(pending) > n_ctx + 1:
            raise self._fault(f"{len(tokens)} tokens and {len(pending)} pending ones are too many for n_ctx={n_ctx}")
        self.tokens, self.pending = tokens.tolist(), pending.tolist()

    def restore(self, session: "Session") -> None:
        """Fill a new session of the same kv_dtype and arguments. Raises OutOfPages, SessionFileError."""
        if fault := self.extent.fault(session.pool):
            raise self._fault(fault)
        kinds = self.extent.shapes(session.pool)
        tensors = {name: self._tensor(name, dtype, shape) for name, (dtype, shape) in kinds.items()}
        logits = None
        if "logits" in self._left:
            logits = self._tensor("logits", torch.float32, [self.model.config.n_vocab])
        try:
            session.generator.set_state(self._tensor("generator", torch.uint8))
        except RuntimeError as error:
            raise self._fault(f"tensor 'generator': {str(error).splitlines()[0]}") from None
        if self._left:
            raise self._fault(f"tensor {min(self._left)!r} belongs to no session of this model")
        snapshot.restore(session.sequence, self.extent, tensors)
        session.tokens, session.pending, session.logits = self.tokens, self.pending, logits
        session.set_spans(self.spans)

    def _fault(self, text: str) -> SessionFileError:
        return SessionFileError(f"{self.path}: {text}")

    def _facts(self) -> dict[str, Any]:
        """The JSON text, its values of the wanted types."""
        text = (self._file.metadata() or {}).get(KEY)
        if text is None:
            raise self._fault(f"a safetensors file without {KEY!r} in its metadata, wanted one of Session.save")
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict) or facts.get("version") != VERSION:
            found = facts.get("version") if isinstance(facts, dict) else None
            raise self._fault(f"the session is of version {found!r:.40}, wanted {VERSION}")
        for key, kind in _KINDS.items():
            if type(facts.get(key)) is not kind:
                raise self._fault(f"{key} is {facts.get(key)!r:.40}, wanted {kind.__name__}")
        for key, kind in {"kv_dtype": str, "first": int, "checkpoints": int}.items():
            if any(type(each) is not kind for each in facts[key]):
                raise self._fault(f"{key} is {facts[key]!r:.40}, wanted a list of {kind.__name__}")
        for key, least in {"n_ctx": 1, "rewind": 0}.items():
            if not least <= facts[key] <= MAX_CONTEXT:
                raise self._fault(f"{key} is {facts[key]!r:.40}, wanted {least} to {MAX_CONTEXT}")
        if facts["model"] != fingerprint(self.model):
            raise self._fault("the session is of another model, or of this one in another mode")
        return facts

    def _spans(self, found: list, length: int) -> list[Span]:
        spans: list[Span] = []
        for i, fact in enumerate(found):
            if not isinstance(fact, dict) or any(type(fact.get(key)) is not kind for key, kind in _SPAN_KINDS.items()):
                raise self._fault(f"span {i} is {fact!r:.40}, wanted {', '.join(_SPAN_KINDS)}")
            start, stop = fact["start"], fact["stop"]
            if not (spans[-1].stop if spans else 0) <= start < stop <= length:
                raise self._fault(f"span {i} is [{start}, {stop}) of {length} tokens, wanted it behind the one before")
            if len(fact["digest"]) != 64 or not set(fact["digest"]) <= set("0123456789abcdef"):
                raise self._fault(f"span {i} has digest {fact['digest']!r:.40}, wanted 64 hexadecimal digits")
            positions = None
            if (name := f"spans.{i}.positions") in self._left:
                positions = self._tensor(name, torch.int64, [stop - start, N_AXES])
                if not has_axes(self.model.config) or not 0 <= positions.min() <= positions.max() < MAX_POSITION:
                    raise self._fault(f"tensor {name!r} holds positions that no session of this model has")
            spans.append(Span(start, stop, bytes.fromhex(fact["digest"]), fact["causal"], positions))
        return spans

    def _tensor(self, name: str, dtype: torch.dtype, shape: list[int] | None = None) -> Tensor:
        """shape None: any of rank 1. A tensor is asked for once."""
        if name not in self._left:
            raise self._fault(f"tensor {name!r} is missing")
        self._left.remove(name)
        try:
            tensor = self._file.get_tensor(name)
        except SafetensorError as error:  # of a dtype that torch has not
            raise self._fault(f"tensor {name!r}: {error}") from None
        if tensor.dtype != dtype or (tensor.dim() != 1 if shape is None else list(tensor.shape) != shape):
            raise self._fault(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, wanted {dtype} {shape or '[n]'}"
            )
        return tensor


_KINDS = {
    "model": str, "kv_dtype": list, "n_ctx": int, "rewind": int, "on_full": str, "keep": int, "first": list,
    "checkpoints": list, "spans": list,
}  # fmt: skip
_SPAN_KINDS = {"start": int, "stop": int, "causal": bool, "digest": str}
