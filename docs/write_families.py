"""Writes families.md beside this file from what the tests measured:

    python -m pytest tests/test_oracle_tiny.py tests/test_oracle_native.py --measured measured.jsonl
    python docs/write_families.py measured.jsonl ../shared/oracle/tiny

The second argument is the folder of the golden data, which says what class each case was made with.
"""

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ARCH = DOCS.parent / "dasllama_torch" / "arch"

HEAD = """# Families

Written by `docs/write_families.py` from what the tests measure.

Each case is a tiny model of random weights, made by transformers 5.24 and converted by llama.cpp. Logits and hidden
states are compared with transformers in f32, in `fp32` mode, at all positions that the golden data hold: the largest
difference, divided by the standard deviation of the values. Greedy: how many of the 24 tokens after a prompt of 7 and
of 40 are transformers' own. Native: the same file in Q8_0, the mean log-probability of a text of 100 tokens in native
arithmetic against the dequantized model. What they must be stands in `tests/tolerances.py`.

| architecture | transformers class | case | logits | hidden states | greedy | native, Q8_0 |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main(measured: Path, golden: Path) -> None:
    figures = defaultdict(lambda: defaultdict(list))
    for line in measured.read_text().splitlines():
        case, what, value = json.loads(line)
        figures[case][what].append(value)
    rows, archs = [], []
    for case, by_kind in figures.items():
        facts = json.loads((golden / f"{case}.json").read_text())
        worst = {what: max(values) for what, values in by_kind.items()}
        greedy = " + ".join(str(int(min(by_kind[f"greedy {n}"]))) for n in (7, 40))
        logits, hidden, native = (f"{worst[what]:.1e}" for what in ("logits", "hidden states", "native"))
        arch = facts["arch"]
        rows.append(
            (arch, case, f"| `{arch}` | `{facts['hf_class']}` | {case} | {logits} | {hidden} | {greedy} | {native} |")
        )
        archs.append(arch)
    table = "\n".join(row for *_, row in sorted(rows))
    assert set(archs) == families().keys(), set(archs) ^ families().keys()
    (DOCS / "families.md").write_text(f"{HEAD}{table}\n\n## What is special\n\n{specials()}\n")


def families() -> dict[str, tuple[str, str]]:
    """`arch.FAMILIES`, read without importing the package."""
    registry = ast.parse((ARCH / "__init__.py").read_text())
    assigned = [node for node in registry.body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "FAMILIES")


def specials() -> str:
    """The first sentences of the families' files: what is special about each."""
    by_file = defaultdict(list)
    for arch, (file, _) in families().items():
        by_file[file].append(f"`{arch}`")
    return "\n\n".join(
        f"**{', '.join(names)}** ({file}.py). {what(ARCH / f'{file}.py')}" for file, names in sorted(by_file.items())
    )


def what(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text()))
    return " ".join(text.split("\nSource:")[0].split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
