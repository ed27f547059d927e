"""Computes the attention matrices of all layers of a model on one text.

The model is run once on the text, and the inputs of each attention layer are recorded. Then matrix.py computes each layer's matrix
from its inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder.model import Decoder
from models.encoder.model import Encoder
from models.layers import LAYERS
from models.maps.matrix import attention_matrix

NAMES: dict[type[nn.Module], str] = {layer: name for name, layer in LAYERS.items()}


@dataclass(frozen=True)
class Map:
    """The attention map of one layer."""

    layer: str  # the layer's name in LAYERS
    A: Tensor  # (H, N, N), [.., query, key]; H may differ from layer to layer


def attention_maps(model: Encoder | Decoder, ids: Tensor) -> list[Map]:
    """Return the maps of all layers, in the order in which they run, for ids (1, N) int64 without padding."""
    given: list[tuple[Any, Tensor, dict[str, Any]]] = []

    def catch(layer: nn.Module, arguments: tuple[Any, ...], positions: dict[str, Any]) -> None:
        given.append((layer, arguments[0], positions))  # without mask and state, as the text has no padding and nothing before it

    hooks = [part.register_forward_pre_hook(catch, with_kwargs=True) for part in model.modules() if type(part) in NAMES]
    try:
        with torch.no_grad():
            model(ids) if isinstance(model, Decoder) else model(ids, torch.ones_like(ids))
    finally:
        for hook in hooks:
            hook.remove()
    return [Map(NAMES[type(layer)], attention_matrix(layer, x, **positions)[0]) for layer, x, positions in given]
