"""Figures (matplotlib, an extra): each function draws one and returns it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dasllama_torch.errors import DasllamaError
from dasllama_torch.inspect.attention import AttentionPattern
from dasllama_torch.inspect.attribution import LogitAttribution
from dasllama_torch.inspect.lens import LogitLens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dasllama_torch.modules.causal_lm import CausalLM


def _pyplot():
    try:
        from matplotlib import pyplot
    except ImportError:
        raise DasllamaError("figures need matplotlib: pip install 'dasllama-torch[plots]'") from None
    return pyplot


def plot_heat_map(
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    cells: Sequence[Sequence[str]] | None = None,
    title: str = "",
    label: str = "",
    centred: bool = False,
) -> "Figure":
    """A heat map of values [rows, columns], the first row on top. cells: text for each. label: of the colours. centred:
    colours of two kinds around 0, for values with a sign."""
    plt = _pyplot()
    width = max(5.0, len(columns) * (0.85 if cells else 0.4) + 2)
    figure, axes = plt.subplots(figsize=(width, max(2.5, len(rows) * 0.26 + 1.2)), layout="constrained")
    values = values.detach().float().cpu()
    bound = values.abs().max().item() or 1.0
    colours = dict(cmap="RdBu_r", vmin=-bound, vmax=bound) if centred else dict(cmap="viridis")
    image = axes.imshow(values.numpy(), aspect="auto", **colours)
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    for r, row in enumerate(cells or ()):
        for c, text in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(values[r, c].item()))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            axes.text(c, r, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    figure.colorbar(image, ax=axes, label=label)
    axes.set_title(title)
    return figure


def plot_logit_lens(model: "CausalLM", lens: LogitLens, tokens: Sequence[int]) -> "Figure":
    """What the head would say between the layers: a row for each, the last layer on top, a column for each token of the
    prompt, whose ids are `tokens`; the likeliest next token, coloured by its probability."""
    rows = ["embedding" if layer == 0 else f"layer {layer}" for layer in reversed(lens.layers)]
    best = lens.ids[:, 0, :, 0].flip(0)
    return plot_heat_map(
        lens.log_probs[:, 0, :, 0].flip(0).exp(),
        rows,
        _pieces(model, tokens),
        cells=[_pieces(model, ids) for ids in best.tolist()],
        title="Logit lens: the likeliest next token",
        label="probability",
    )


def plot_attention(
    model: "CausalLM", pattern: AttentionPattern, tokens: Sequence[int], *, columns: int = 4
) -> "Figure":
    """A map for each head of a layer: rows look at columns, `tokens` are those of the keys. What goes to a sink is a
    column of its own, before the first token."""
    plt = _pyplot()
    weights = pattern.weights[0]
    labels = _pieces(model, tokens)
    if pattern.sink is not None:
        weights = torch.cat([pattern.sink[0][..., None], weights], -1)
        labels = ["(sink)", *labels]
    n = len(pattern.heads)
    columns = min(columns, n)
    lines = -(-n // columns)
    side = max(3.1, 0.11 * len(labels) + 1)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(side * columns, side * lines),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    rows = _pieces(model, tokens[len(tokens) - weights.shape[1] :])
    for axes, head, map_ in zip(grid.flat, pattern.heads, weights, strict=False):
        image = axes.imshow(map_.float().cpu().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"layer {pattern.layer}, head {head}", fontsize=9)
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
        axes.set_yticks(range(len(rows)), rows, fontsize=6)
    for axes in list(grid.flat)[n:]:
        axes.set_axis_off()
    figure.colorbar(image, ax=grid, label="probability", shrink=0.6)
    return figure


def plot_attribution(attribution: LogitAttribution, *, title: str = "") -> "Figure":
    """What each part adds to a logit, as bars in the order of the forward."""
    plt = _pyplot()
    n = len(attribution.parts)
    figure, axes = plt.subplots(figsize=(max(6.0, n * 0.16 + 1), 3.2), layout="constrained")
    kinds = [
        "embed" if part == "embed" else "mlp" if part.endswith("mlp") else "attention" for part in attribution.parts
    ]
    for kind, colour in (("embed", "tab:green"), ("attention", "tab:blue"), ("mlp", "tab:orange")):
        at = [i for i, other in enumerate(kinds) if other == kind]
        axes.bar(at, attribution.values[at].tolist(), color=colour, label=kind)
    axes.axhline(0, color="black", linewidth=0.5)
    step = max(1, n // 30)
    axes.set_xticks(range(0, n, step), attribution.parts[::step], rotation=90, fontsize=7)
    axes.set_ylabel("adds to the logit")
    axes.set_title(title or f"logit {attribution.logit:.2f}")
    axes.legend()
    return figure


def _pieces(model: "CausalLM", ids: Sequence[int]) -> list[str]:
    """Tokens as labels: a line break and a leading space show, and a dollar is no formula."""
    pieces = (model.piece(int(token)) for token in ids)
    return [piece.replace("\n", "\\n").replace(" ", "\u2423", 1).replace("$", r"\$") for piece in pieces]
