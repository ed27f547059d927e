"""Who is compared: every layer of LAYERS, and beside them a convolution and a recurrent network, which the complexity table names too."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.errors import ExportError
from models import LAYERS
from models.attention.gated.gau import GatedProjections
from models.attention.layers.capabilities import Capabilities

# Keywords of constructors. What a cost depends on is said here, also where it is the layer's default.
OPTIONS: dict[str, dict[str, Any]] = {
    "nystromformer": {"n_landmarks": 64, "conv_kernel": 33},
    "performer": {"n_features": 256},
    "causal_performer": {"n_features": 256},
    "vq": {"n_codes": 512},
    "causal_vq": {"n_codes": 512},
    "local": {"window": 128},
    "sliding_window": {"window": 128},
    "atrous": {"rate": 4},
    "causal_atrous": {"rate": 4},
    "sparse": {"stride": 32},
    "causal_sparse": {"stride": 32},
    "longformer": {"window": 128, "n_global": 1},
    "causal_longformer": {"window": 128, "n_global": 1},
    "bigbird": {"block": 64, "n_random": 3},
    "hybrid": {"block": 64},
    "lsh": {"n_rounds": 4, "chunk": 64, "n_buckets": 32},
    "flash": {"group": 256},
    "causal_flash": {"group": 256},
    "convolution": {"kernel": 7},
}
# The same where N is some 64 tokens: with the widths above, these would see everything.
SHORT_OPTIONS: dict[str, dict[str, Any]] = {
    "nystromformer": {"n_landmarks": 8, "conv_kernel": None},
    "vq": {"n_codes": 16},
    "causal_vq": {"n_codes": 16},
    "local": {"window": 4, "block": 8},
    "sliding_window": {"window": 5},
    "sparse": {"stride": 8},
    "causal_sparse": {"stride": 8},
    "longformer": {"window": 8, "n_global": 1, "block": 8},
    "causal_longformer": {"window": 5, "n_global": 1},
    "bigbird": {"block": 4, "n_random": 1},
    "hybrid": {"block": 4},
    "lsh": {"n_rounds": 2, "chunk": 8, "n_buckets": 8},
    "flash": {"group": 8},
    "causal_flash": {"group": 8},
}
# The letter of the complexity table beside N, as the constructor calls it, and the values at which its share of the cost is measured.
WIDTHS: dict[str, tuple[str, tuple[int, ...]]] = {
    "local": ("window", (64, 128, 256, 512)),  # r
    "atrous": ("rate", (2, 4, 8, 16)),  # r
    "sparse": ("stride", (8, 16, 32, 64)),  # k
    "convolution": ("kernel", (3, 7, 15, 31)),  # k
    "lsh": ("chunk", (32, 64, 128, 256)),  # c
    "performer": ("n_features", (64, 128, 256, 512)),  # m
    "vq": ("n_codes", (64, 128, 256, 512)),  # S
    "nystromformer": ("n_landmarks", (16, 32, 64, 128)),  # m
    "flash": ("group", (64, 128, 256, 512)),  # G
    "longformer": ("window", (64, 128, 256, 512)),  # w
    "bigbird": ("block", (16, 32, 64, 128)),  # b
}
WITH_A_LONGEST_N = ("synthesizer", "causal_synthesizer", "bigbird")  # their option n_positions


class Convolution(nn.Module):
    """Every token is a weighted sum of the `kernel` tokens around it, with a matrix of its own for each of these places.

    y_i = sum_{|δ| <= k / 2} W_δ x_{i+δ} + b,   W_δ is (D, D)
    No attention: here as the complexity table has it. O(k N D²) time.
    """

    capabilities = Capabilities(cross=False, ordered=True, averages=False)

    def __init__(self, d_model: int, n_heads: int, *, kernel: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        return self.conv((x * key_mask[..., None]).mT).mT


class Recurrent(nn.Module):
    """A gated recurrent unit: one token after the other, each with a state of D numbers.

    r, z = sigmoid(W x_t + U h_{t-1} + b),   n = tanh(W_n x_t + b_n + r ⊙ (U_n h_{t-1} + c_n)),   h_t = (1 - z) ⊙ n + z ⊙ h_{t-1}
    No attention: here as the complexity table has it. Cho et al. 2014, arXiv:1406.1078. O(N D²) time, N steps one after the other.
    """

    capabilities = Capabilities(cross=False, ordered=True, averages=False)

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        x = x * key_mask[..., None]
        return self._operator(x) if torch.compiler.is_exporting() else self.gru(x)[0]

    def _operator(self, x: Tensor) -> Tensor:
        """ONNX's GRU, which has z before r and time before batch. torch's exporter would write every step of its example's N."""
        gru: Any = self.gru
        B, N, D = x.shape

        def ordered(weight: Tensor) -> Tensor:
            weight = weight.detach()
            return torch.cat([weight[D : 2 * D], weight[:D], weight[2 * D :]]).unsqueeze(0)

        W, R, b, c = map(ordered, (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0))
        attributes: dict[str, Any] = {"hidden_size": D, "linear_before_reset": 1}
        inputs = [x.transpose(0, 1), W, R, torch.cat([b, c], dim=1)]
        h, _ = torch.onnx.ops.symbolic_multi_out("GRU", inputs, attributes, dtypes=(x.dtype, x.dtype), shapes=((N, 1, B, D), (1, B, D)))
        return h.squeeze(1).transpose(0, 1)


REFERENCES: dict[str, Callable[..., nn.Module]] = {"convolution": Convolution, "recurrent": Recurrent}
EVERYTHING: dict[str, Callable[..., nn.Module]] = {**LAYERS, **REFERENCES}


def build(name: str, d_model: int, n_heads: int, *, longest: int, short: bool = False, more: Mapping[str, Any] | None = None) -> nn.Module:
    """The layer with weights of variance 1 / D, so that tokens of variance 1 give queries and keys of variance 1; always the same ones.

    `more` options go before those of this file.
    """
    options = OPTIONS.get(name, {}) | (SHORT_OPTIONS.get(name, {}) if short else {}) | dict(more or {})
    if name in WITH_A_LONGEST_N:
        options = options | {"n_positions": longest}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = EVERYTHING[name](d_model, n_heads, **options)
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=part.in_features**-0.5)
            if isinstance(part, GatedProjections):
                nn.init.normal_(part.gain)  # which begins near 0, and with it every answer of the unit
    return layer.eval()


def chosen(names: str) -> tuple[str, ...]:
    """Names with commas between them; "" for all. Raises ExportError for one that is none."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - EVERYTHING.keys()):
        raise ExportError(f"{unknown[0]!r} is no mechanism; there are {', '.join(EVERYTHING)}")
    return tuple(name for name in EVERYTHING if name in wanted or not wanted)


@dataclass(frozen=True)
class Words:
    """What a mechanism's own docstring says of it."""

    title: str
    body: str  # formulas, paper and cost, as they stand there
    paper: str  # arXiv number of the first paper it names; "" where it names none


def words(name: str) -> Words:
    """Of a layer: its file's docstring; of a reference: its class's."""
    kind = EVERYTHING[name]
    text = inspect.getdoc(kind if name in REFERENCES else inspect.getmodule(kind)) or ""
    title, _, body = text.partition("\n")
    found = re.search(r"arXiv:(\d{4}\.\d{4,5})", body)
    return Words(title.strip(), body.strip("\n"), found[1] if found else "")


def source(name: str) -> str:
    """The code of the file that the mechanism stands in."""
    module = inspect.getmodule(EVERYTHING[name])
    assert module is not None
    return inspect.getsource(module)
