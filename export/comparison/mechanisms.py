"""The compared mechanisms: every layer of LAYERS, and a convolution and a recurrent network, which Vaswani et al. 2017 compare too."""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from export.comparison.convolution import Convolution
from export.comparison.recurrent import Recurrent
from export.errors import ExportError
from models.attention.layers.mechanism import Mechanism, Sizes
from models.layers import LAYERS

EVERYTHING: dict[str, type[Mechanism]] = {**LAYERS, "convolution": Convolution, "recurrent": Recurrent}


def is_attention(name: str) -> bool:
    """Return False for the convolution and the recurrent network, True for all others."""
    attends: bool = EVERYTHING[name].capabilities.weights != "none"
    return attends


def options(name: str, *, longest: int, short: bool = False) -> dict[str, Any]:
    """Return keyword arguments for the constructor of the layer `name`: its `examples.large`, and with `short` also its `examples.short`,
    which suit about 64 tokens.

    If the layer has the option n_positions, this is set to `longest`.
    """
    kind = EVERYTHING[name]
    room = {"n_positions": longest} if "n_positions" in inspect.signature(kind).parameters else {}
    return {**kind.examples.large, **(kind.examples.short if short else {}), **room}


def work(name: str, N: int, d_model: int, n_heads: int, *, longest: int, more: Mapping[str, Any] | None = None) -> float:
    """Return the multiply-adds for N tokens by the formula that the layer's class states. `more` replaces some of the `options`."""
    sizes = {"D": d_model, "H": n_heads, "D_k": d_model // n_heads}
    return float(EVERYTHING[name].cost.work(N, Sizes(**sizes, **options(name, longest=longest) | dict(more or {}))))


def build(name: str, d_model: int, n_heads: int, *, longest: int, short: bool = False, more: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the layer with fixed random weights of variance 1 / D, so that tokens of variance 1 give queries and keys of variance 1.

    `more` replaces some of the `options`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = EVERYTHING[name](d_model, n_heads, **options(name, longest=longest, short=short) | dict(more or {}))
        layer.enlarge()
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=part.in_features**-0.5)
    return layer.eval()


def chosen(names: str) -> tuple[str, ...]:
    """Return the mechanisms of a comma-separated list; "" means all. Raises ExportError for an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - EVERYTHING.keys()):
        raise ExportError(f"{unknown[0]!r} is not a mechanism; choose from {', '.join(EVERYTHING)}")
    return tuple(name for name in EVERYTHING if name in wanted or not wanted)


@dataclass(frozen=True)
class Words:
    """The parts of the docstring of a mechanism's file, for the page."""

    title: str
    body: str  # the rest of the docstring, unchanged: formulas, paper and cost
    paper: str  # arXiv number of the first paper that the docstring names, or ""


def words(name: str) -> Words:
    text = inspect.getdoc(sys.modules[EVERYTHING[name].__module__]) or ""
    title, _, body = text.partition("\n")
    found = re.search(r"arXiv:(\d{4}\.\d{4,5})", body)
    return Words(title.strip(), body.strip("\n"), found[1] if found else "")


def source(name: str) -> str:
    """Return the source code of the file that defines the mechanism."""
    return inspect.getsource(sys.modules[EVERYTHING[name].__module__])
