"""Writes parity.md beside this file from what the tests measured:

python -m pytest tests/test_parity.py tests/test_real_modules.py --measured measured.jsonl
python docs/write_parity.py measured.jsonl
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent

HEAD = """# Parity with transformers

Written by `docs/write_parity.py` from what `tests/test_parity.py` and `tests/test_real_modules.py` measure.

Every architecture in every tensor type, against transformers 5.24 in f32 on the dequantized weights. Each model has two
to six layers of random weights, 256 wide, made by the same seed for all types; two sequences of 24 tokens go through
both. Rows that are no multiple of a type's block (few: convolutions, some heads) are Q8_0 or F32, as in real files.
Published models come last; what longer texts give stands in [families](families.md) and in `tests/test_oracle_real.py`.

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
PUBLISHED = """At every module path: the outputs of all modules, rotated heads and attention, in mode `fp32` and in
transformers in f32, both against transformers in f64 with the same dequantized weights. Largest difference of a
module's values, divided by their standard deviation, in millionths (100 is the tolerance): that of the worst module,
and the geometric mean over all. The residual stream is divided by the largest deviation that it has had up to there:
SmolLM2's last two layers cancel what its first token has grown to, and f32's roundings of that stay, 180 millionths of
what is left in ours and some 100 in transformers."""


def main(measured: Path) -> None:
    figures = {}
    for line in measured.read_text().splitlines():
        arch, what, value = json.loads(line)
        mode, _, kind = what.partition(" ")
        figures[mode, kind, arch] = value
    parts = [f"## {mode}\n\n{MODES[mode][0]}\n\n{table(figures, mode)}" for mode in MODES]
    parts.append(f"## Published models\n\n{PUBLISHED}\n\n{published(figures)}")
    (DOCS / "parity.md").write_text(HEAD + "\n\n".join(parts) + "\n")


def table(figures: Mapping[tuple[str, str, str], float], mode: str) -> str:
    """A row for each type, a column for each architecture, in the order in which they were measured."""
    of_mode = [(kind, arch) for of, kind, arch in figures if of == mode]
    kinds, archs = (list(dict.fromkeys(names)) for names in zip(*of_mode, strict=True))
    lines = ["| type | " + " | ".join(archs) + " |", "| --- |" + " ---: |" * len(archs)]
    for kind in kinds:
        values = (figures[mode, kind, arch] * MODES[mode][1] for arch in archs)
        lines.append(f"| {kind} | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    return "\n".join(lines)


def published(figures: Mapping[tuple[str, str, str], float]) -> str:
    """A row for each model."""
    columns = [f"{which} {side}" for which in ("largest", "typical") for side in ("ours", "transformers")]
    heads = ["worst, ours", "worst, transformers", "mean, ours", "mean, transformers"]
    lines = ["| model | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for model in dict.fromkeys(model for of, _, model in figures if of == "published"):
        values = (figures["published", column, model] * 1e6 for column in columns)
        lines.append(f"| {model} | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
