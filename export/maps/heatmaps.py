"""Draws attention maps as heatmaps: on the terminal, as PNG and as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from export.contract import LONGEST_ATTENTION
from export.errors import ExportError

LABELLED = 40  # largest number of tokens for which the axes have labels
ON_TERMINAL = 32  # largest number of tokens for which a map is shown on the terminal
SHADES = " ░▒▓█"

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Maps:
    """The attention maps of one text. `layers` are names in LAYERS; `A` has one array (H, N, N) per layer, [head, query, key]."""

    tokens: tuple[str, ...]
    layers: tuple[str, ...]
    A: tuple[Matrix, ...]


def tokens_of(tokenizer_file: Path, text: str, *, longest: int = LONGEST_ATTENTION) -> tuple[list[int], tuple[str, ...]]:
    """Return the token ids and each token's piece of the text. Raises ExportError for no tokens or more than `longest`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found = tokenizer.encode(text)
    if not 1 <= len(found.ids) <= longest:
        raise ExportError(f"the text has {len(found.ids)} tokens, but maps are drawn of 1 to {longest}; give another text")
    return found.ids, tuple(text[begin:end] or token for (begin, end), token in zip(found.offsets, found.tokens, strict=True))


def picked(maps: Maps, layer: int, head: int | None) -> Matrix:
    """Return one map (N, N): of one head, or the mean of all heads if `head` is None. A negative `layer` counts from the end.

    Raises ExportError if the model has no such layer or head.
    """
    if not -len(maps.A) <= layer < len(maps.A):
        raise ExportError(f"layer={layer}, but the model has {len(maps.A)} layers: 0 to {len(maps.A) - 1}, or -1 for the last")
    A = maps.A[layer]
    if head is None:
        return np.asarray(A.mean(0))
    if not 0 <= head < len(A):
        raise ExportError(f"head={head}, but layer {layer} has {len(A)} heads: 0 to {len(A) - 1}")
    return np.asarray(A[head])


def draw(maps: Maps, files: Sequence[Path]) -> None:
    """Draw the maps of all layers (rows) and heads (columns) into each file, as PNG or SVG according to its suffix."""
    rows, columns = len(maps.A), max(len(A) for A in maps.A)
    side = 2.2 if len(maps.tokens) > LABELLED else max(2.2, 0.16 * len(maps.tokens))
    figure = Figure(figsize=(side * columns + 1, side * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for i, (layer, A) in enumerate(zip(maps.layers, maps.A, strict=True)):
        for h in range(columns):
            if h < len(A):
                _panel(grid[i][h], A[h], maps.tokens, f"{i} {layer}, head {h}", labelled=h == 0)
            else:
                grid[i][h].set_visible(False)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)


def on_terminal(A: Matrix, tokens: Sequence[str], title: str, *, colour: bool = True) -> Table:
    """Return one map as a table with a row per query, which ends with its largest weight and that key's token, and a column per key.
    `colour=False` draws shades of grey. Raises ExportError for more than `ON_TERMINAL` tokens.
    """
    if len(tokens) > ON_TERMINAL:
        raise ExportError(f"{len(tokens)} tokens are too many for the terminal, which shows {ON_TERMINAL}; look at the files")
    table = Table(box=None, pad_edge=False, padding=0, show_header=False, caption=escape(title), caption_justify="left")
    table.add_column(no_wrap=True, justify="right", style="bold")
    table.add_column(no_wrap=True)
    norm, colours, largest = _norm(A), colormaps[_colours(A)], float(np.abs(A).max()) or 1.0
    for token, row in zip(tokens, A, strict=True):
        cells = Text(" ")
        for value in row:
            red, green, blue, _ = colours(float(norm(value)), bytes=True)
            shade = SHADES[round(abs(float(value)) / largest * (len(SHADES) - 1))]
            cells.append("  " if colour else 2 * shade, style=f"on rgb({red},{green},{blue})" if colour else "")
        strongest = int(np.argmax(np.abs(row)))
        cells.append(f" {row[strongest]:.2f} {visible(tokens[strongest])}", style="dim")
        table.add_row(f"{escape(visible(token))} ", cells)
    return table


def visible(token: str) -> str:
    """Return a token as a label, with visible white space and truncated if it is long."""
    shown = token.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
    return shown if len(shown) <= 12 else f"{shown[:11]}…"


def _panel(axes: Any, A: Matrix, tokens: Sequence[str], title: str, *, labelled: bool) -> None:
    axes.imshow(A, cmap=_colours(A), norm=_norm(A), interpolation="nearest")
    axes.set_title(title, fontsize=7)
    if len(tokens) > LABELLED:
        axes.tick_params(labelsize=6)
        return
    labels = [visible(token).replace("$", r"\$") for token in tokens]
    axes.set_xticks(range(len(tokens)), labels=labels, rotation=90, fontsize=6)
    axes.set_yticks(range(len(tokens)), labels=labels if labelled else [""] * len(tokens), fontsize=6)


def _norm(A: Matrix) -> Normalize:
    """Return a colour scale from 0 to the largest weight, or symmetric around 0 if some weights are negative."""
    largest = float(np.abs(A).max()) or 1.0
    return TwoSlopeNorm(0.0, vmin=-largest, vmax=largest) if A.min() < 0 else Normalize(0.0, largest)


def _colours(A: Matrix) -> str:
    return "RdBu_r" if A.min() < 0 else "viridis"
