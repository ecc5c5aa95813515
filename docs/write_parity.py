"""Writes parity.md beside this file from what the tests measured:

python -m pytest tests/test_parity.py --measured measured.jsonl
python docs/write_parity.py measured.jsonl
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent

HEAD = """# Parity with transformers

Written by `docs/write_parity.py` from what `tests/test_parity.py` measures.

Every architecture in every tensor type, against transformers 5.24 in f32 on the dequantized weights. Each model has two
to six layers of random weights, 256 wide, made by the same seed for all types; two sequences of 24 tokens go through
both. Rows that are no multiple of a type's block (few: convolutions, some heads) are Q8_0 or F32, as in real files.
What published models and longer texts give stands in [families](families.md) and in `tests/test_oracle_real.py`.

"""
# mode -> what is measured, in which unit, and how that is written
MODES = {
    "fp32": (
        "Weights are dequantized and multiplied in f32. Largest difference of logits, divided by their standard "
        "deviation, in millionths: 100 is the tolerance, 300 of the three architectures with delta nets.",
        1e6,
    ),
    "native": (
        "Products on the packed types, with activations on ggml's lattices. Mean difference of log-probabilities, in "
        "thousandths of a nat: 100 is the tolerance, 300 of the three architectures with delta nets.",
        1e3,
    ),
}


def main(measured: Path) -> None:
    figures = {}
    for line in measured.read_text().splitlines():
        arch, what, value = json.loads(line)
        mode, _, kind = what.partition(" ")
        figures[mode, kind, arch] = value
    parts = [f"## {mode}\n\n{MODES[mode][0]}\n\n{table(figures, mode)}" for mode in MODES]
    (DOCS / "parity.md").write_text(HEAD + "\n\n".join(parts) + "\n")


def table(figures: Mapping[tuple[str, str, str], float], mode: str) -> str:
    """A row for each type, a column for each architecture, in the order in which they were measured."""
    kinds = list(dict.fromkeys(kind for _, kind, _ in figures))
    archs = list(dict.fromkeys(arch for *_, arch in figures))
    lines = ["| type | " + " | ".join(archs) + " |", "| --- |" + " ---: |" * len(archs)]
    for kind in kinds:
        values = (figures[mode, kind, arch] * MODES[mode][1] for arch in archs)
        lines.append(f"| {kind} | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
