"""Imports go down only: every import statement of the package, at a module's top or inside a function, is held against
the arrows of the design (but those for type checkers, which never run); and what promises to do without torch does."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT

# Each part may import itself, the rows before its own, and every leaf. Parts of one row do not know each other.
ROWS = [
    {"ops"},
    {"modules", "cache"},
    {"arch", "towers"},
    {"speculative"},
    {"engine"},
    {"hf"},
    {"inspect"},
    {"api"},
    {"auto", "bench", "export"},
    {"cli", "server"},
]
RANK = {part: rank for rank, row in enumerate(ROWS) for part in row}
# Leaves may be imported by every part but ops, and import only what stands here. Backends import only ops.
LEAVES = {
    "errors": set(),
    "memory": {"errors"},
    "device_memory": {"errors"},
    "files": set(),
    "threads": set(),
    "tables": set(),
    "gguf": {"errors", "memory", "ops.ggml_types", "threads"},
    "config": {"errors", "gguf"},
    "step": {"errors", "config", "ops"},
    "text": {"errors", "gguf"},
    "chat": {"errors", "files", "text", "sampling", "constraints"},
    "sampling": {"errors", "ops"},
    "constraints": {"errors", "text"},
    "hub": {"errors"},
}
BACKENDS = {"triton_kernels", "vulkan_ext", "metal_ext"}
PACKAGE_FOLDERS = {
    "dasllama_torch": "dasllama_torch",
    **{name: f"dasllama_torch.{name}" for name in ("ops", *BACKENDS)},
}


def package_sources() -> dict[str, str]:
    """Dotted module name -> source, of the whole package. Of folders below csrc only build scripts lie there."""
    sources = {}
    for folder, package in PACKAGE_FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            # ops is also seen below dasllama_torch by those who link it there
            if "csrc" in relative.parts or (folder == "dasllama_torch" and relative.parts[0] in PACKAGE_FOLDERS):
                continue
            dotted = ".".join((package, *relative.with_suffix("").parts))
            sources[dotted.removesuffix(".__init__")] = path.read_text("utf-8")
    return sources


def imports(module: str, source: str, known: set[str]) -> Iterator[tuple[str, int, bool]]:
    """(imported module, line, whether at the top level) of the package's own modules."""
    tree = ast.parse(source)
    is_package = any(name.startswith(module + ".") for name in known)
    lazy = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    never = {id(node) for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            keep = len(here) - node.level + is_package
            base = ".".join(filter(None, [*here[:keep], node.module])) if node.level else node.module
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        for target in targets:
            if target.partition(".")[0] == "dasllama_torch":
                yield target, node.lineno, id(node) not in lazy


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(sources: dict[str, str]) -> list[str]:
    """One line for each import that points the wrong way."""
    found = []
    for module, source in sources.items():
        part = part_of(module)
        if part and part not in RANK and part not in LEAVES and part not in BACKENDS:
            found.append(f"{module}: part {part!r} has no place in the design's order")
            continue
        for target, line, at_top in imports(module, source, set(sources)):
            to = part_of(target)
            if not allowed(part, target) or (to == "inspect" and part != "inspect" and at_top):
                found.append(f"{module}:{line}: {part or 'the package'} must not import {target}")
    return found


def part_of(module: str) -> str:
    """ "dasllama_torch.modules.linear" -> "modules"; "" for the package itself."""
    return ".".join(module.split(".")[1:2])


def allowed(part: str, target: str) -> bool:
    to = part_of(target)
    if to in (part, "errors"):
        return True
    if part in LEAVES:
        inside = target.removeprefix("dasllama_torch.")
        return any(inside == name or inside.startswith(name + ".") for name in LEAVES[part])
    if part in BACKENDS:
        return to == "ops"
    if part in ("", "ops"):
        return False  # the package looks its names up when they are used
    if to == "inspect":
        return part in ("api", "cli")
    if to == "":  # the package hands out the names of api
        return RANK[part] > RANK["api"]
    return to in LEAVES or (to in RANK and RANK[to] < RANK[part])


def test_imports_go_down_only():
    sources = package_sources()
    assert {"dasllama_torch", "dasllama_torch.ops.registry", "dasllama_torch.gguf.reader"} <= set(sources)
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dasllama_torch.modules.new", "from dasllama_torch.arch import llama"),
        ("dasllama_torch.modules.new", "import dasllama_torch.cache.pool"),
        ("dasllama_torch.cache.new", "from dasllama_torch import engine"),
        ("dasllama_torch.engine.new", "from dasllama_torch.api import load_model"),
        ("dasllama_torch.engine.new", "def f():\n    from .. import api"),
        ("dasllama_torch.ops.new", "from dasllama_torch.gguf.source import TensorSource"),
        ("dasllama_torch.gguf.new", "from dasllama_torch.ops.quant_linear import quant_linear"),
        ("dasllama_torch.config", "from .modules import linear"),
        ("dasllama_torch.text.new", "from dasllama_torch.engine import session"),
        ("dasllama_torch.chat.new", "from ..arch import family"),
        ("dasllama_torch.sampling", "from dasllama_torch.engine.session import Session"),
        ("dasllama_torch.triton_kernels.new", "from dasllama_torch.modules.linear import Linear"),
        ("dasllama_torch.api", "from dasllama_torch.inspect import capture"),
        ("dasllama_torch.server.new", "def f():\n    import dasllama_torch.inspect.capture"),
        ("dasllama_torch.server.new", "from dasllama_torch import cli"),
        ("dasllama_torch.engine.new", "def f():\n    import dasllama_torch as dl"),
        ("dasllama_torch", "from dasllama_torch.api import load_model"),
        ("dasllama_torch.misc.new", ""),
    ],
)
def test_an_import_that_points_up_is_found(module, line):
    parts = ["arch", "cache", "engine", "inspect", "modules", "api", "cli", "gguf", "ops", "text", "chat", "server"]
    known = {f"dasllama_torch.{part}": "" for part in parts}
    assert violations({"dasllama_torch": "", **known}) == []
    assert len(violations({"dasllama_torch": "", **known, module: line})) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dasllama_torch.api", "def f():\n    from dasllama_torch.inspect import capture"),
        ("dasllama_torch.inspect.new", "from dasllama_torch.inspect.capture import capture"),
        ("dasllama_torch.engine.new", "from dasllama_torch.text.tokenizer import Tokenizer"),
        ("dasllama_torch.gguf.new", "from dasllama_torch.ops import ggml_types"),
        ("dasllama_torch.gguf.new", "if TYPE_CHECKING:\n    from dasllama_torch.engine import session"),
        ("dasllama_torch.cli", "import dasllama_torch as dl"),
    ],
)
def test_an_import_that_points_down_is_not(module, line):
    known = {f"dasllama_torch.{name}": "" for name in ("api", "inspect", "engine", "gguf", "ops", "ops.ggml_types")}
    assert violations({"dasllama_torch": "", **known, module: line}) == []


@pytest.mark.parametrize(
    "module",
    ["dasllama_torch", "ops.ggml_types", "errors", "gguf.reader", "gguf.metadata", "hub", "cli", "text.tokenizer"],
)
def test_imported_without_torch(module):
    name = module if module == "dasllama_torch" else f"dasllama_torch.{module}"
    code = f"import sys, {name}; print(*sorted({{'torch', 'transformers', 'huggingface_hub'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == []


def test_kernels_include_no_torch_and_no_python():
    """They are compiled once for each instruction set, and serve whoever has plain buffers."""
    files = [path for path in (ROOT / "ops/csrc/kernels").rglob("*") if path.suffix in (".h", ".inl", ".cpp")]
    assert files
    foreign = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2|pybind11|Python\.h)')
    assert foreign.search("#include <torch/csrc/stable/tensor.h>")
    found = [path.name for path in files if foreign.search(path.read_text("utf-8"))]
    assert found == []


def test_checks_import_no_sympy():
    """As torch's own does, which costs whoever evaluates a first token most of a second."""
    code = (
        "import sys, torch; from dasllama_torch.ops.require import require; before = 'sympy' in sys.modules; "
        "require(torch.zeros(2).dim() == 1, lambda: ''); print(before, 'sympy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["False", "False"]
