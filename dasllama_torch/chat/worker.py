"""The process in which chat templates run, started by sandbox.py.

A file's template is a program by a stranger. Jinja's sandbox keeps it from Python's internals, but not from taking all
time and memory (`'x' * 10**12`, nested loops, lists within lists), which only the system can stop, and only for a
process. So templates have one of their own: for each request it may take CPU_SECONDS, and MEMORY bytes in all.

A request and its reply are a line of JSON each. What templates can use is what transformers gives them
(transformers/utils/chat_template_utils.py), so that they render the same.
"""

import json
import re
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CPU_SECONDS = 2.0
MEMORY = 1 << 30
MAX_OUTPUT = 1 << 24  # characters, several times the longest context of any model

_NOT_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")  # surrogates stand for characters that are ASCII, see escape.py


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: what a model is trained to say. It renders as if the tag were not there."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateNamespace(Namespace):
    """Takes no names that begin with an underscore: they are how Python's internals are reached."""

    def __init__(*args: Any, **kwargs: Any):  # as Jinja's own, so that a template may call an attribute `self`
        self, *rest = args
        Namespace.__init__(self, {_public(name): value for name, value in dict(*rest, **kwargs).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_public(name), value)


def _public(name: str) -> str:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
    return name


class Environment(ImmutableSandboxedEnvironment):
    """What compiles and runs templates. now: the time that `strftime_now` tells. busy_with: index of the message of
    which the template read something last."""

    def __init__(self):
        extensions = [GenerationTag, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _tojson
        self.globals |= {
            "dict": _dict,
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: self.now.strftime(format),
        }
        self.now = datetime.min
        self.busy_with: int | None = None
        self._index: dict[int, int] = {}
        self.compiled = lru_cache(8)(self.from_string)

    def render(self, template: str, context: dict[str, Any], now: str) -> str:
        self.now = datetime.fromisoformat(now)
        self.busy_with = None
        self._index = {id(message): i for i, message in enumerate(context["messages"])}
        pieces, length = [], 0
        for piece in self.compiled(template).generate(**context):
            length += len(piece)
            if length > MAX_OUTPUT:
                raise jinja2.exceptions.TemplateError(f"it writes more than {MAX_OUTPUT} characters")
            pieces.append(piece)
        return "".join(pieces)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.busy_with = self._index.get(id(obj), self.busy_with)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.busy_with = self._index.get(id(obj), self.busy_with)
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if attribute.startswith("_"):  # at once, not when the template goes on from there
            raise jinja2.exceptions.SecurityError(f"it reaches for {attribute!r} of {type(obj).__name__!r}")
        return super().unsafe_undefined(obj, attribute)

    def facts(self, template: str) -> dict[str, Any]:
        """Names that the template wants from outside, and the texts that it holds."""
        self.busy_with = None
        tree = self.parse(template)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return {"variables": sorted(jinja2.meta.find_undeclared_variables(tree)), "texts": texts}


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    text = json.dumps(x, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _dict(*args, **kwargs) -> dict:  # the class itself would give a template its attributes
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def answer(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: {"text"} or the facts, or {"error": one line, "index": of the message or None}."""
    try:
        if "context" in request:
            return {"text": environment.render(request["template"], request["context"], request["now"])}
        return environment.facts(request["template"])
    except Exception as e:  # a stranger's program can raise anything
        return {"error": _one_line(e), "index": environment.busy_with}


def _one_line(e: Exception) -> str:
    if isinstance(e, MemoryError):
        text = f"it needs more than {MEMORY >> 20} MiB"
    elif isinstance(e, jinja2.TemplateSyntaxError):
        text = f"line {e.lineno}: {e.message}"
    elif isinstance(e, jinja2.TemplateError):
        text = str(e)
    else:
        text = f"{type(e).__name__}: {e}"
    if not isinstance(e, jinja2.TemplateSyntaxError) and (line := _line(e.__traceback__)):
        text = f"line {line}: {text}"
    return " ".join(text[:2000].split())


def _line(traceback: TracebackType | None) -> int | None:
    """The template's line that raised."""
    line = None
    while traceback:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = Environment()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whoever outlives it is ended by SIGPROF
        reply = answer(environment, json.loads(line))
        sys.stdout.buffer.write(json.dumps(reply).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)
