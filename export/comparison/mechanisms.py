"""The compared mechanisms: every layer of LAYERS, and a convolution and a recurrent network, which Vaswani et al. 2017 compare too."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.graphs.encoder_decoder import OnnxGru
from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples, Mechanism, Sizes
from models.layers import LAYERS


class Convolution(Mechanism):
    """y_i = sum_{|δ| <= k / 2} W_δ x_{i+δ} + b,   W_δ (D, D): x (B, N, D), bool mask (B, N) -> (B, N, D)."""

    capabilities = Capabilities(cross=False, ordered=True, averages=False, weights="none")
    cost = Cost("O(k N D²)", lambda N, s: s.kernel * N * s.D * s.D, ComplexityRow("convolution k", "O(N / k)"))
    examples = Examples(large={"kernel": 7}, varied=("kernel", (3, 7, 15, 31)))

    def __init__(self, d_model: int, n_heads: int, *, kernel: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        return self.conv((x * key_mask[..., None]).mT).mT


class Recurrent(Mechanism):
    """A gated recurrent unit (Cho et al. 2014, arXiv:1406.1078): x (B, N, D), bool mask (B, N) -> (B, N, D)."""

    capabilities = Capabilities(cross=False, ordered=True, averages=False, weights="none")
    cost = Cost("O(N D²)", lambda N, s: 6 * N * s.D * s.D, ComplexityRow("recurrent", "O(N)", "O(N)"))

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        gru = OnnxGru(self.gru) if torch.compiler.is_exporting() else self.gru
        y: Tensor = gru(x * key_mask[..., None])[0]
        return y


EVERYTHING: dict[str, type[Mechanism]] = {**LAYERS, "convolution": Convolution, "recurrent": Recurrent}


def is_attention(name: str) -> bool:
    attends: bool = EVERYTHING[name].capabilities.weights != "none"
    return attends


def options(name: str, *, longest: int, short: bool = False) -> dict[str, Any]:
    """Return keyword arguments for the layer's constructor: its `examples.large`, with `short` also its `examples.short`, which suit about
    64 tokens, and n_positions = `longest` if it has that option.
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
