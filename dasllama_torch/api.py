"""The public verbs: load a model, open sessions on it, evaluate them together."""

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dasllama_torch import device_memory, hub
from dasllama_torch.arch import family
from dasllama_torch.arch.caps import Caps
from dasllama_torch.cache.pool import KVPool
from dasllama_torch.cache.prefix import PrefixChain
from dasllama_torch.cache.sequence import Sequence as CacheSequence
from dasllama_torch.chat.chat import Chat
from dasllama_torch.chat.template import ChatTemplate
from dasllama_torch.engine import gpu_tier
from dasllama_torch.engine import pooling as pooling_of
from dasllama_torch.engine import session as engine_session
from dasllama_torch.engine.embeddings import Embeddings
from dasllama_torch.engine.placement import check_layers, layer_devices
from dasllama_torch.engine.prefix_cache import PrefixCache
from dasllama_torch.engine.session import Session
from dasllama_torch.engine.session_file import SessionFile
from dasllama_torch.errors import GGUFError, KernelError, OutOfPages, SessionFileError, TokenizerError, UnsupportedModel
from dasllama_torch.gguf.llama2c import Llama2cFile
from dasllama_torch.gguf.metadata import Metadata
from dasllama_torch.gguf.reader import GGUFFile, ModelFile
from dasllama_torch.gguf.source import GGUFSource, TensorSource
from dasllama_torch.hf.folder import HFFolder
from dasllama_torch.hf.verbs import Verbs
from dasllama_torch.memory import available_memory, has_huge_pages, physical_memory
from dasllama_torch.modules.causal_lm import CausalLM, GenerationSettings
from dasllama_torch.modules.requantized import RequantizedSource
from dasllama_torch.ops import ggml_types
from dasllama_torch.ops.halves import HALVES
from dasllama_torch.ops.kv_codecs import codec_pair, pair_name
from dasllama_torch.sampling import SamplingParams
from dasllama_torch.text.tokenizer import Tokenizer

MODES = ("native", "fp32", "q8", "q4_0")
DEFAULT_N_CTX = 4096
QUICK_BYTES = 1 << 29  # read without a progress bar: less than a second from a disk of 0.5 GB/s

# Sessions of one model and KV type share a pool, so that they can stand in one batch.
_pools: weakref.WeakKeyDictionary[CausalLM, dict[str | tuple[str, str], KVPool]] = weakref.WeakKeyDictionary()


def load_model(
    path: str | os.PathLike,
    mode: str = "native",
    device="cpu",
    *,
    dtype: str | torch.dtype = "bf16",
    vram_mb: int | None = None,
    strict: bool = True,
    mmap: bool | None = None,
    progress: bool = True,
) -> CausalLM:
    """Read a GGUF file (or any member of a shard set) into a module graph whose weights stay packed.

    A path that ends in .bin is a llama2.c checkpoint, which has no vocabulary. A folder is one of transformers:
    config.json, safetensors and a tokenizer.json, which may be missing; it takes the extra `hf`.

    mode: "native" multiplies on the weights' own types with activations on ggml's lattices; "fp32" dequantizes on the
    fly and multiplies in f32, the reference; "q8" and "q4_0" requantize every matrix at load to Q8_0 or Q4_0.
    device: "cpu", or "cuda" (with an index or without) for a GPU, whose kernels Triton compiles when they are first
    used. The weights go there packed, one by one, and the host keeps no copy of them. "auto": a GPU where there is one,
    as much of the model as vram_mb has room for; the rest stays on the CPU and runs there. `gpu_tier_status()` says
    what went where.
    dtype: "bf16" or "f16": what a GPU rounds to where it multiplies many rows; sums, and what goes from layer to layer,
    stay f32. vram_mb: of "auto", MiB that all models may take together, see `GpuTierWant`, whose own it replaces.
    strict: refuse a file that has tensors or architecture keys which the family does not use; False warns instead.
    mmap: True leaves the weights in the mapped file: no time to load, shared between processes. False reads them into
    memory, in huge pages where the system gives them, from which a token takes about two thirds of the time. None, the
    default, reads where there are huge pages and the file is at most half of the memory that is available; for a GPU
    it maps.
    progress: show a bar on standard error for a file of more than half a gigabyte.
    Raises GGUFError for a broken file, FolderError for a broken folder, UnsupportedModel for one that asks for
    something else than is implemented, TokenizerError for a vocabulary of an unknown kind, OutOfMemory where a GPU has
    no room for the weights.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}")
    if dtype not in (*HALVES, *HALVES.values()):
        raise ValueError(f"dtype is {dtype}, wanted one of {', '.join(HALVES)}")
    auto = device == "auto"
    if vram_mb is not None and not (auto and vram_mb >= 0):
        raise ValueError(f"vram_mb is {vram_mb}, wanted 0 or more and device='auto'")
    wanted = gpu_tier.wanted_device() if auto else None
    device = wanted or torch.device("cpu") if auto else _device(device)
    requantized = mode in ("q8", "q4_0")  # these read each tensor once
    settings = {}
    with _no_garbage():
        if Path(path).is_dir():
            folder = HFFolder(path)
            metadata, source, settings = folder.metadata, folder.source(), folder.generation
        else:
            if hub.is_name(os.fspath(path)) and not os.path.exists(path):
                raise GGUFError(
                    f"{path}: no such file; of the catalogue or the hub: AutoModelForCausalLM.from_pretrained({path!r})"
                )
            file: ModelFile = Llama2cFile(path) if Path(path).suffix == ".bin" else GGUFFile(path)
            if mmap is False or (mmap is None and not requantized and device.type == "cpu" and _fits(file)):
                _read_tensors(file, progress)
            metadata, source = file.metadata, GGUFSource(file)
        if requantized:
            source = RequantizedSource(source, ggml_types.Q8_0 if mode == "q8" else ggml_types.Q4_0)
        source.native, source.half_dtype = mode != "fp32", HALVES.get(dtype, dtype)
        model = build_model(metadata, source, strict=strict)
        if auto:
            gpu_tier.arm(model, wanted, vram_mb)
        elif device.type != "cpu":
            device_memory.upload(model.modules(), device)
            gpu_tier.note_model(model)
    model.name_or_path, model.generation_config = os.fspath(path), GenerationSettings(**settings)
    return model


def _device(name) -> torch.device:
    """The device that is named, which must be there and have kernels."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise KernelError(f"device {name!r} is unknown, wanted 'cpu', 'cuda' or 'auto'") from None
    if device.type not in ("cpu", "cuda"):
        raise KernelError(f"device {str(device)!r} has no kernels in this build, wanted 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise KernelError(f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return device


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Python's collector of garbage pauses: thousands of modules come that will stay, each few hundred of which have
    it look through all objects of the process, torch's too. With the collector on, that is a third of a small model's
    time to load."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fits(file: ModelFile) -> bool:
    return has_huge_pages() and file.nbytes <= available_memory() // 2


def _read_tensors(file: ModelFile, progress: bool) -> None:
    if not progress or file.nbytes < QUICK_BYTES:
        file.read_tensors()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = [TextColumn(f"reading {file.path.name}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=file.nbytes)
        file.read_tensors(lambda nbytes: bars.advance(task, nbytes))


def build_model(metadata: Metadata, source: TensorSource, *, strict: bool = True) -> CausalLM:
    """The module graph of any metadata and any source of tensors; `strict` and errors as in `load_model`."""
    parts = family(metadata.architecture, metadata.origin)
    config = parts.config.from_gguf(metadata, source)
    model = parts.model(config, source)
    left = [f"tensor {name!r}" for name in source.unasked() if name not in parts.ignored]
    left += [f"key {key!r}" for key in metadata.arch.unread() if key not in parts.ignored]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        text = f"{metadata.origin}: architecture {metadata.architecture!r} does not use {shown}"
        if strict:
            raise UnsupportedModel(f"{text}; running without could give wrong results (strict=False loads it anyway)")
        warnings.warn(text, stacklevel=3)
    model.metadata = metadata
    model.verbs = Verbs(create_session)
    model.tokenizer = Tokenizer.from_metadata(metadata)
    if model.tokenizer.has_vocab and len(model.tokenizer) != config.n_vocab:
        raise GGUFError(
            f"{metadata.origin}: the vocabulary has {len(model.tokenizer)} tokens, and the embedding table "
            f"{config.n_vocab} rows"
        )
    return model.eval()


def caps(model: CausalLM) -> Caps:
    """What the model can do and what it is made of, see `Caps`."""
    return Caps.of(model.config, model.metadata, model.tokenizer)


def create_kv_pool(
    model: CausalLM, page_rows: int = 64, kv_dtype: str | tuple[str, str] = "f16", max_bytes: int | None = None
) -> KVPool:
    """Memory for the keys, values and recurrent states of many sessions of the model, see `create_session`.

    page_rows: tokens of a page, by which sessions take memory and share it; pages of a multiple of 64 are read fastest.
    kv_dtype: as in `create_session`. max_bytes: the most that all sessions together may hold, recurrent states and
    their checkpoints included, what they share counted once; an evaluation that needs more raises OutOfPages and leaves
    its sessions as they were, to go on once others have closed or gone back. None: the memory of this machine, or what
    the model's device has left. On the CPU a page costs memory once it has been written, on a GPU once it has been
    handed out.
    The pool lives as long as a session of it.
    """
    layers, devices = [layer.cache for layer in model.config.layers], layer_devices(model)
    if max_bytes is None:
        gpus = {device for device in devices if device.type != "cpu"}
        max_bytes = min(map(device_memory.free_memory, gpus), default=physical_memory())
    pool = KVPool(layers, kv_dtype, max_bytes, devices, page_rows)
    gpu_tier.note_pool(model, pool)
    return pool


def create_session(
    model: CausalLM,
    kv_dtype: str | tuple[str, str] | None = None,
    n_ctx: int | None = None,
    *,
    rewind: int = 0,
    pool: KVPool | None = None,
    prefix_cache: PrefixCache | None = None,
    on_full: str = "error",
    keep: int | None = None,
) -> Session:
    """A new stream over the model, empty.

    kv_dtype: how keys and values are kept: "f16" (the default), "f32", "q8_0" (8.5 bits per element), "tq4" (4.5 bits),
    or a pair of these, for keys and for values; recurrent states are f32. n_ctx: the most tokens it may hold; by
    default the model's own context, at most 4,096. Where a model has LongRoPE (Phi-3), its long frequencies serve the
    sessions that may outgrow its original context, from their first token on. rewind: tokens that `truncate` may take
    back though a layer's window has passed; each keeps its keys longer. pool: of `create_kv_pool`, with the kv_dtype
    of its own; None: one that all sessions of the model and kv_dtype share. Memory is taken page by page as tokens
    come. prefix_cache: of `create_prefix_cache`, whose pool the session takes; it evaluates nothing again that the
    cache holds, and leaves its own pages there.

    on_full: what happens to tokens that do not fit into n_ctx. "error": ContextFull. "shift": the session forgets what
    follows its first `keep` tokens, half of what there is behind them or as much as is needed, and goes on, see
    `Session.shift`; that evaluates the rest anew, once in about n_ctx / 2 tokens. What alone does not fit behind the
    kept tokens is ContextFull all the same. keep: None: the token that begins every text (BOS), where the vocabulary
    wants one.
    """
    n_ctx = min(model.config.n_ctx, DEFAULT_N_CTX) if n_ctx is None else n_ctx
    if n_ctx < 1:
        raise ValueError(f"n_ctx is {n_ctx}, wanted 1 or more")
    if rewind < 0:
        raise ValueError(f"rewind is {rewind}, wanted 0 or more")
    if on_full not in ("error", "shift"):
        raise ValueError(f"on_full is {on_full!r}, wanted 'error' or 'shift'")
    if prefix_cache is not None:
        if prefix_cache.model is not model:
            raise ValueError("the prefix cache is another model's: wanted create_prefix_cache(model)")
        if pool not in (None, prefix_cache.pool):
            raise ValueError("the prefix cache is of another pool: wanted create_prefix_cache(model, pool)")
        pool = prefix_cache.pool
    if pool is None:
        pool = _pool(model, pair_name(codec_pair(kv_dtype or "f16")), n_ctx)
    elif kv_dtype is not None and codec_pair(kv_dtype) != pool.codecs:
        raise ValueError(f"kv_dtype is {kv_dtype!r}, and the pool's {pool.kv_dtype!r}")
    elif pool.layers != [layer.cache for layer in model.config.layers]:
        raise ValueError("the pool is for layers of other sizes than the model's: wanted a create_kv_pool(model)")
    if keep is None:
        keep = min(int(model.tokenizer is not None and model.tokenizer.add_bos), n_ctx - 1)
    if not 0 <= keep < n_ctx:
        raise ValueError(f"keep is {keep}, wanted 0 to {n_ctx - 1}: n_ctx has to leave room for others")
    check_layers(model)
    return Session(model, pool, n_ctx, rewind, prefix_cache, on_full, keep)


def create_chat(
    model: CausalLM,
    system: str | None = None,
    *,
    session: Session | None = None,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable] = (),
    thinking: bool | str | None = None,
    **how: Any,
) -> Chat:
    """A conversation with the model, see `Chat`.

    system: the system message. session: where it is evaluated, whatever that holds so far; None: a new one, which `how`
    goes to as to `create_session` (kv_dtype, n_ctx, prefix_cache, ...). chat_template: Jinja in place of the file's, as
    in `ChatTemplate.from_metadata`. tools, thinking: as in `set_tools` and `set_thinking`. Raises TemplateError for a
    file without a template whose family is not known, and where the template has no place for a system message;
    TokenizerError for a file without a vocabulary; UnsupportedModel for what the model cannot do.
    """
    if session is not None and how:
        raise ValueError(f"{', '.join(how)}: the session that is given has its own")
    chat = create_chat_renderer(model, system, chat_template=chat_template, tools=tools, thinking=thinking)
    chat.session = create_session(model, **how) if session is None else session
    return chat


def create_chat_renderer(
    model: CausalLM,
    system: str | None = None,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable] = (),
    thinking: bool | str | None = None,
) -> Chat:
    """`create_chat` without a session: it makes prompts, takes replies apart and holds no memory. `Chat.session` may be
    set later on."""
    template = ChatTemplate.from_metadata(model.metadata, model.tokenizer, chat_template=chat_template)
    if not model.tokenizer.has_vocab:
        raise TokenizerError(f"{model.metadata.origin}: the file has no vocabulary, wanted one to chat in")
    architecture = model.metadata.architecture
    return Chat(template, model.tokenizer, architecture, system=system, tools=tools, thinking=thinking)


def create_prefix_cache(
    model: CausalLM, pool: KVPool | None = None, max_bytes: int = 1 << 30, checkpoint_every: int = 8
) -> PrefixCache:
    """A cache of what sessions of the model have evaluated, so that prompts which begin alike are evaluated once.

    Sessions use it by `create_session(model, prefix_cache=...)`. pool: the one whose pages it keeps; None: that of the
    model's f16 sessions. max_bytes: the most that it keeps, of pages and of recurrent states together; what was used
    longest ago goes first, be it the one or the other. checkpoint_every: pages between two copies of the recurrent
    states, for models that have them: fewer bytes, or less to evaluate again.
    """
    return PrefixCache(model, pool or _pool(model, "f16", 1), max_bytes, checkpoint_every)


def prefix_attach(session: Session, prompt: Sequence[int | Embeddings]) -> int:
    return _prefix_cache(session).attach(session, prompt)


def prefix_insert(session: Session) -> None:
    _prefix_cache(session).insert(session)


def prefix_release(cache: PrefixCache) -> None:
    cache.clear()


def prefix_held_groups(cache: PrefixCache) -> int:
    return cache.held_groups()


def prefix_chain_list(cache: PrefixCache) -> list[PrefixChain]:
    return cache.chains()


for _verb, _method in (
    (prefix_attach, PrefixCache.attach),
    (prefix_insert, PrefixCache.insert),
    (prefix_release, PrefixCache.clear),
    (prefix_held_groups, PrefixCache.held_groups),
    (prefix_chain_list, PrefixCache.chains),
):
    _verb.__doc__ = _method.__doc__


def _prefix_cache(session: Session) -> PrefixCache:
    if session.prefix_cache is None:
        raise ValueError("the session has no prefix cache: wanted create_session(model, prefix_cache=...)")
    return session.prefix_cache


def fork(session: Session) -> Session:
    return session.fork()


def truncate(session: Session, n: int) -> None:
    session.truncate(n)


fork.__doc__ = Session.fork.__doc__
truncate.__doc__ = Session.truncate.__doc__


def release_kv_pages(holder: Session | KVPool) -> None:
    """Give back what is not needed: of a session all that it holds, to its pool, so that it stands at its beginning;
    of a pool the memory of its free pages, to the operating system."""
    if isinstance(holder, KVPool):
        holder.release()
    else:
        holder.truncate(0)


def embed(model: CausalLM, text: str | Sequence[str], pooling: str | None = None) -> Tensor:
    """A unit vector f32 [C] of a text, or f32 [n, C] of n of them, for comparing texts by dot products: the hidden
    states of its tokens behind the last norm, pooled, and divided by their length.

    The tokens are those of `model.encode`, so with the BOS and EOS that the vocabulary asks for. pooling: "mean" of all
    tokens, "cls" (the first) or "last"; None: what the file says (`{arch}.pooling_type`), and the mean if it does not.
    A decoder that was not trained for it gives usable vectors, not a dedicated model's. Short texts go through the
    model together, long ones in windows of rows; a text's vector does not depend on the others. No session is touched.
    Raises ContextFull for a text beyond the model's context, ValueError for one without tokens, UnsupportedModel for a
    file that ranks.
    """
    texts = [model.encode(each) for each in ([text] if isinstance(text, str) else text)]
    pool = _pool(model, "f32", max(map(len, texts), default=1))
    vectors = pooling_of.embed(model, pool, texts, pooling)
    return vectors[0] if isinstance(text, str) else vectors


def load_session(
    model: CausalLM,
    path: str | os.PathLike,
    *,
    pool: KVPool | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Session:
    """The session that `Session.save` wrote: what it evaluates and draws next is what that one would have, to the bit.

    pool: as in `create_session`, of any page size and of the kv_dtype that the file was written with. prefix_cache: as
    in `create_session`; what the file holds is not kept there, as no file tells under which hooks it was evaluated, and
    the session leaves its pages there once it begins anew. Raises SessionFileError for a broken file, one of another
    model (or of another mode, or with other weights: see `session_file.fingerprint`) or another kv_dtype than the
    pool's; OutOfPages where the pool has no room.
    """
    file = SessionFile(path, model)
    into = prefix_cache.pool if prefix_cache and pool is None else pool
    if into is not None and into.kv_dtype != file.kv_dtype:
        raise SessionFileError(
            f"{path}: keys and values are kept as {file.kv_dtype}, and in the pool as {into.kv_dtype}"
        )
    try:
        session = create_session(model, file.kv_dtype, pool=pool, prefix_cache=prefix_cache, **file.how)
    except ValueError as error:
        raise SessionFileError(f"{path}: {error}") from None
    try:
        file.restore(session)
    except BaseException:
        session.close()
        raise
    return session


def eval_embd(session: Session, rows: Tensor, logits: str | None = "last") -> Tensor | None:
    return session.eval_embd(rows, logits)


def eval_embd_span(session: Session, rows: Tensor, logits: str | None = "last") -> Tensor | None:
    return session.eval_embd_span(rows, logits)


def eval_embd_span_mrope(
    session: Session, rows: Tensor, positions: Tensor, causal: bool = True, logits: str | None = "last"
) -> Tensor | None:
    return session.eval_embd_span_mrope(rows, positions, causal, logits)


def generate_embd(
    session: Session, rows: Tensor, params: SamplingParams | None = None, max_tokens: int | None = None, **how
) -> Iterator[tuple[int | None, str]]:
    return session.generate_embd(rows, params, max_tokens, **how)


for _verb in (eval_embd, eval_embd_span, eval_embd_span_mrope, generate_embd):
    _verb.__doc__ = getattr(Session, _verb.__name__).__doc__


def eval_batch(
    sessions: Sequence[Session], ids: Sequence[Sequence[int] | Embeddings], logits: str | None = "last"
) -> list[Tensor | None]:
    return engine_session.eval_batch(sessions, ids, logits)


eval_batch.__doc__ = engine_session.eval_batch.__doc__


def _pool(model: CausalLM, kv_dtype: str | tuple[str, str], n_ctx: int) -> KVPool:
    pools = _pools.setdefault(model, {})
    if kv_dtype not in pools or pools[kv_dtype].device != model.get_input_embeddings().qweight.device:
        pools[kv_dtype] = create_kv_pool(model, kv_dtype=kv_dtype)
    pool = pools[kv_dtype]
    wanted = CacheSequence(pool).bytes_for(n_ctx, n_ctx)
    if wanted > pool.max_bytes:
        raise OutOfPages(
            f"n_ctx is {n_ctx}, which takes {wanted} bytes of {kv_dtype} cache: more than this machine has"
        )
    return pool
