"""The command line, `dasllama-torch`: run, bench, pull, list, inspect, tokenize.

Results go to standard output and everything else to standard error. Wrong input ends with one line `error: ...` and
exit code 2. Anything heavy is imported by the command that needs it: only `run` and `bench` import torch.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dasllama_torch.errors import DasllamaError

if TYPE_CHECKING:
    from dasllama_torch.engine.session import Stats
    from dasllama_torch.gguf.reader import GGUFFile

PROGRAM = "dasllama-torch"
# Exit codes; the latter two are what a shell reports of a program that SIGINT or SIGPIPE ended.
BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
LONG_ARRAY = 16  # elements; longer arrays of the metadata are shown by their type

# click's UsageError, of the click that typer depends on or, in newer versions, carries in itself.
_UsageError = typer.BadParameter.__mro__[1]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run GGUF models as PyTorch modules, and look inside them.",
)


class Mode(str, Enum):
    native = "native"
    fp32 = "fp32"
    q8 = "q8"
    q4_0 = "q4_0"


class KVType(str, Enum):
    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"
    tq4 = "tq4"


ModelArgument = Annotated[
    str, typer.Argument(help="A GGUF file, a name of the catalogue (see `list`), or owner/repo:file.gguf of the hub.")
]
ModeOption = Annotated[Mode, typer.Option(help="Multiply as the file's types, in f32, or requantized.")]
KVOption = Annotated[KVType, typer.Option(help="Type of the KV cache.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one for each physical core.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a character that the terminal lacks is no reason to stop
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {_one_line(str(message))}", file=sys.stderr)
            code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except _UsageError as e:
        return _fail(e.format_message())
    except BrokenPipeError:
        # The reader has gone. What is left in the buffer must not raise again when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (DasllamaError, OSError) as e:
        return _fail(str(e))
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(args: list[str]) -> int:
    # Not `app()`: it would print usage errors in several lines and end the process.
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, args or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as e:
        return e.exit_code
    return 0


def _fail(message: str) -> int:
    print(f"error: {_one_line(message)}", file=sys.stderr)
    return BAD_INPUT


def _one_line(text: str) -> str:
    return _printable(" ".join(text.split()))


def _printable(text: str, keep: str = "") -> str:
    """Text with control characters escaped, but for those to keep: files may hold codes that command a terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _status(text: str) -> contextlib.AbstractContextManager:
    """A spinner on standard error while something takes its time, if a person is there to see it."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(_printable(text))


def _text(argument: str | None) -> str:
    """The argument if there is one, else standard input without its final line break."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D at the start of a line ends it", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise typer.BadParameter(f"standard input is not UTF-8 text: byte {e.start} is {e.object[e.start]:#04x}") from e
    return text.removesuffix("\n").removesuffix("\r")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version(PROGRAM))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; left out: standard input.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the most likely token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that have this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this fraction of the likeliest.")] = 0.0,
    repeat_penalty: Annotated[float, typer.Option(help="Divide the logits of recent tokens by it; 1: none.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the random draws.")] = None,
    mode: ModeOption = Mode.native,
    kv: KVOption = KVType.f16,
    ctx: Annotated[int | None, typer.Option(min=1, help="Context in tokens; else the model's, 4096 at most.")] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Go on past the context's end: forget the older half.")
    ] = False,
    threads: ThreadsOption = None,
) -> None:
    """Continue a text. The continuation is streamed to standard output, the speeds go to standard error."""
    text = _text(prompt)
    with _status("starting torch"):
        import dasllama_torch as dl

        _set_threads(threads)
    try:
        params = dl.SamplingParams(
            temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repeat_penalty, seed=seed
        )
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    path = _resolve(model)
    with _status(f"loading {path.name}"):
        loaded = dl.load_model(path, mode=mode.value, progress=False)  # the status line shows it
    ids = loaded.encode(text)
    if not ids:
        raise typer.BadParameter("the prompt is empty, and this model starts with no token of its own")
    on_full = "shift" if shift else "error"
    with dl.create_session(loaded, kv_dtype=kv.value, n_ctx=ctx, on_full=on_full) as session:
        code = _stream(session.generate(ids, params, max_tokens), f"reading {len(ids)} tokens")
        _report_speed(session.stats, "interrupt" if code == INTERRUPTED else session.stats.stop)
    raise typer.Exit(code)


def _set_threads(threads: int | None) -> None:
    """The number that was asked for; else torch's own choice, or fewer where the process is given fewer cores."""
    import torch

    from dasllama_torch.threads import usable_cores

    if threads is not None:
        torch.set_num_threads(threads)
    elif not os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))


def _stream(pieces: Iterator[tuple[int | None, str]], wait: str) -> int:
    """Write text as it comes; Ctrl-C ends it. Returns the exit code."""
    code = 0
    try:
        with _status(wait):
            first = list(itertools.islice(pieces, 1))
        for _, piece in itertools.chain(first, pieces):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(flush=True)
    return code


def _report_speed(stats: "Stats", end: str) -> None:
    prefill = f"prompt: {stats.n_prompt} tokens, {stats.prefill_tps:.1f} tok/s"
    decode = f"generated: {stats.n_generated} tokens, {stats.decode_tps:.1f} tok/s, ended by {end}"
    print(f"{prefill}; {decode}", file=sys.stderr)


@app.command()
def bench(
    model: ModelArgument,
    prompt: Annotated[int, typer.Option("--prompt", "-p", min=1, help="Tokens of the prompt.")] = 512,
    generate: Annotated[int, typer.Option("--generate", "-n", min=1, help="Tokens to generate.")] = 64,
    depth: Annotated[int, typer.Option("--depth", "-d", min=0, help="Tokens in the context before those.")] = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sessions that generate together.")] = 1,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Times that each is measured.")] = 5,
    mode: ModeOption = Mode.native,
    kv: KVOption = KVType.f16,
    threads: ThreadsOption = None,
    profile: Annotated[bool, typer.Option("--profile", help="Time of each op of a session, and its bound.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file too.")] = None,
) -> None:
    """Measure tokens per second: of a prompt (pp) and of generation (tg)."""
    with _status("starting torch"):
        import torch

        from dasllama_torch import bench as measure
        from dasllama_torch.api import load_model

        _set_threads(threads)
    path = _resolve(model)
    with _status(f"loading {path.name}"):
        loaded = load_model(path, mode=mode.value, progress=False)
    used = torch.get_num_threads()
    facts: dict[str, Any] = {"model": str(path), "mode": mode.value, "kv": kv.value, "threads": used, "speeds": []}
    print(f"{_printable(path.name)}, mode {mode.value}, KV cache {kv.value}, {used} threads")
    print(f"{'test':24} {'tok/s':>9} {'spread':>7}")
    tests = [
        (f"reading {prompt} tokens", lambda: measure.measure_prefill(loaded, prompt, repetitions, kv.value)),
        (
            f"generating {generate} tokens",
            lambda: measure.measure_decode(loaded, generate, repetitions, kv.value, depth, batch),
        ),
    ]
    for what, test in tests:
        with _status(what):
            speed = test()
        print(f"{speed.test:24} {speed.median:9.1f} {speed.spread:7.0%}", flush=True)
        facts["speeds"].append(dataclasses.asdict(speed) | {"median": speed.median})
    if profile:
        with _status("measuring the ceilings"):
            ceilings = measure.Ceilings.measure()
        facts["ceilings"] = dataclasses.asdict(ceilings)
        for title, rows in measure.profile(loaded, prompt, generate, depth, kv.value).items():
            print(f"\n{title}\n{measure.profile_table(rows, ceilings)}")
            facts.setdefault("profiles", {})[title] = [dataclasses.asdict(row) for row in rows]
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def _resolve(model: str) -> Path:
    from dasllama_torch.hub import resolve

    return resolve(model)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name of the catalogue, or owner/repo:file.gguf of the hub.")],
) -> None:
    """Fetch a model and print where it is. One that is there already is not fetched again."""
    from dasllama_torch import hub

    print(hub.pull(name))


@app.command("list")
def list_models() -> None:
    """Print the catalogue: names, sizes, licences, and the files of the models that were pulled."""
    from dasllama_torch import hub

    for model in hub.CATALOGUE:
        where = model.path if hub.is_pulled(model) else "not pulled"
        print(f"{model.name:24}{_megabytes(model.size):>10}  {model.licence:28}{where}")


@app.command()
def inspect(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Print what a GGUF file holds: architecture, hyper-parameters, vocabulary, tensors, chat templates.

    Any readable file will do, whether its architecture is implemented or not.
    """
    from dasllama_torch.gguf.reader import GGUFFile

    facts = _facts(GGUFFile(_resolve(model)))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_describe(facts)))


def _facts(file: "GGUFFile") -> dict[str, Any]:
    """What `inspect --json` prints. Shapes are in PyTorch's order, sizes in bytes."""
    from dasllama_torch.ops.ggml_types import GGML_TYPES

    md = file.metadata
    tensors, types = [], {}
    for tensor in file.tensors.values():
        kind = GGML_TYPES[tensor.qtype]
        elements = math.prod(tensor.shape)
        tensors.append(
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": kind.name,
                "bits_per_weight": kind.bits_per_weight,
                "bytes": tensor.nbytes,
            }
        )
        total = types.setdefault(kind.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        total["tensors"] += 1
        total["parameters"] += elements
        total["bytes"] += tensor.nbytes
    parameters = sum(total["parameters"] for total in types.values())
    tensor_bytes = sum(total["bytes"] for total in types.values())
    return {
        "files": [str(path) for path in file.paths],
        "bytes": file.nbytes,
        "gguf_version": file.version,
        "architecture": md.get("general.architecture"),
        "caps": _caps(file),
        "parameters": parameters,
        "bits_per_weight": round(8 * tensor_bytes / parameters, 4) if parameters else None,
        "metadata": {key: _json_value(md, key) for key in md if not key.startswith("tokenizer.chat_template")},
        "special_tokens": _special_tokens(md),
        "chat_templates": {
            key: md[key] for key in md if key.startswith("tokenizer.chat_template") and isinstance(md[key], str)
        },
        "types": types,
        "tensors": tensors,
    }


def _caps(file: "GGUFFile") -> dict[str, Any]:
    """What `caps()` says of the model, with its text as "summary"; or {"unsupported": why}."""
    from dasllama_torch.arch import FAMILIES, family
    from dasllama_torch.errors import DasllamaError

    md = file.metadata
    arch = md.get("general.architecture")
    if arch not in FAMILIES:
        return {"unsupported": f"architecture {arch!r} is not implemented"}
    from dasllama_torch.arch.caps import Caps
    from dasllama_torch.gguf.source import GGUFSource
    from dasllama_torch.text.tokenizer import Tokenizer

    try:
        config = family(arch, md.origin).config.from_gguf(md, GGUFSource(file))
        found = Caps.of(config, md, Tokenizer.from_metadata(md))
    except DasllamaError as e:
        return {"unsupported": str(e)}
    return {**dataclasses.asdict(found), "summary": str(found)}


def _json_value(md: Any, key: str) -> Any:
    """A scalar, the elements of a short array, or the type of a long one ("string[49152]"). JSON has no NaN and no
    infinity: those are strings."""
    value = md[key]
    if not isinstance(value, str | bool | int | float):
        if len(value) > LONG_ARRAY or md.type_name(key).startswith("array"):
            return md.type_name(key)
        return [_finite(element) for element in (value.tolist() if hasattr(value, "tolist") else value)]
    return _finite(value)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _special_tokens(md: Any) -> dict[str, dict[str, Any]]:
    """Name ("bos") -> id and text, of the keys `tokenizer.ggml.<name>_token_id`; an id out of range has no text."""
    tokens = md.get("tokenizer.ggml.tokens", ())
    found = {}
    for key in md:
        name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
        if key == f"tokenizer.ggml.{name}_token_id" and isinstance(md[key], int):
            token_id = md[key]
            found[name] = {"id": token_id, "text": str(tokens[token_id]) if 0 <= token_id < len(tokens) else None}
    return found


def _describe(facts: dict[str, Any]) -> list[str]:
    """The lines that `inspect` prints for people."""
    architecture = facts["architecture"]
    own = {"general": {}, "hyper-parameters": {}, "tokenizer": {}, "other keys": {}}
    for key, value in facts["metadata"].items():
        group = key.partition(".")[0]
        section = "hyper-parameters" if group == architecture else group if group in own else "other keys"
        own[section][key] = value
    lines = [f"file           {_printable(path)}" for path in facts["files"]]
    lines += [
        f"size           {_megabytes(facts['bytes'])}, GGUF version {facts['gguf_version']}",
        f"architecture   {_value(architecture) if architecture is not None else 'not stated'}",
        f"parameters     {facts['parameters']:,}, {facts['bits_per_weight'] or 0:.2f} bits per weight",
    ]
    caps = facts["caps"]
    said = caps["summary"].split("; ") if "summary" in caps else [f"not supported: {_printable(caps['unsupported'])}"]
    lines += [f"{'' if i else 'model':14} {line}" for i, line in enumerate(said)]
    for title, entries in own.items():
        if entries:
            lines += ["", title, *(f"  {_printable(key):44} {_value(value)}" for key, value in entries.items())]
    if facts["special_tokens"]:
        lines += ["", "special tokens"]
        lines += [
            f"  {_printable(name):20} {token['id']:>8}  {_value(token['text'])}"
            for name, token in facts["special_tokens"].items()
        ]
    lines += ["", "types"]
    for kind, total in facts["types"].items():
        n, weights, size = total["tensors"], total["parameters"], _megabytes(total["bytes"])
        lines.append(f"  {kind:8} {n:>6} tensors {weights:>16,} weights {size:>12}")
    lines += ["", "tensors"]
    for tensor in facts["tensors"]:
        name, shape = _printable(tensor["name"]), " x ".join(map(str, tensor["shape"]))
        bits, size = tensor["bits_per_weight"], _megabytes(tensor["bytes"])
        lines.append(f"  {name:36} {shape:>18} {tensor['type']:>8} {bits:>8.4g} bits {size:>12}")
    for key, template in facts["chat_templates"].items():
        lines += ["", _printable(key), _printable(template, keep="\n\t")]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"  # the digits that an f32 has
    return repr(value) if isinstance(value, str) else str(value)


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.2f} MB"


@app.command()
def tokenize(
    model: ModelArgument,
    text: Annotated[str | None, typer.Argument(help="The text; left out: standard input.")] = None,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Put the tokens around it that the model wants.")
    ] = True,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Names of control tokens in the text are those tokens.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the token ids of a text and what each stands for."""
    from dasllama_torch.gguf.reader import GGUFFile
    from dasllama_torch.text.tokenizer import Tokenizer

    content = _text(text)
    path = _resolve(model)
    with _status(f"reading the vocabulary of {path.name}"):
        tokenizer = Tokenizer.from_metadata(GGUFFile(path).metadata)
        ids = tokenizer.encode(content, add_special=special, parse_special=parse_special)
    pieces = [tokenizer.piece(i) for i in ids]
    if as_json:
        print(json.dumps({"ids": ids, "pieces": pieces}))
    else:
        for token_id, piece in zip(ids, pieces, strict=True):
            print(f"{token_id:>8}  {piece!r}")


if __name__ == "__main__":
    sys.exit(main())
