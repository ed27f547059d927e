"""Turns the softmax layers of a decoder into layers whose state has a constant size: a window, or a window and feature maps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.decoder.model import HYBRID, SINK_WINDOW, Decoder

SOFTMAX = "causal_softmax"


def windowed(decoder: Decoder, window: int) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose softmax layers attend to `window` tokens, the first ones among them.

    Up to `window` tokens it computes the same. The weights are shared with `decoder`. Raises ValueError if no layer has softmax attention
    to all tokens, or if the positions cannot be those of a window.
    """
    return _with_layers(decoder, SINK_WINDOW, window, {})


def hybrid(decoder: Decoder, window: int, options: Mapping[str, Any]) -> Decoder:
    """Return a decoder as `windowed` does, whose layers also attend to the tokens that left the window, by new feature maps.

    options: keyword arguments of `CausalHybridAttention`.
    """
    model = _with_layers(decoder, HYBRID, window, options)
    for block in model.blocks:
        if isinstance(block.layer, CausalHybridAttention):
            block.layer.draw_maps()
    return model


def softmax_of(decoder: Decoder) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose hybrid layers are softmax attention to all tokens again."""
    return _replaced(decoder, HYBRID, SOFTMAX, {}, decoder.config.window, ("window", "n_first", "piece", "counted"))


def _with_layers(decoder: Decoder, name: str, window: int, options: Mapping[str, Any]) -> Decoder:
    config = decoder.config
    if SOFTMAX not in config.layer_names:
        raise ValueError(f"the layers are {', '.join(sorted(set(config.layer_names)))}, and a window is for {SOFTMAX}; leave it out")
    if config.positions != "rotary":
        raise ValueError(f"positions={config.positions!r} grow with the text; only rotary positions know distances alone")
    if config.rotary.depends_on_length:
        raise ValueError("the rotation depends on the length of the text (dynamic scaling), so tokens of a state would change with it")
    return _replaced(decoder, SOFTMAX, name, options, window, ())


def _replaced(decoder: Decoder, old: str, new: str, options: Mapping[str, Any], window: int, dropped: tuple[str, ...]) -> Decoder:
    """Return a decoder that shares the weights of `decoder`, with layers `new` in place of `old`. Parameters that `decoder` does not have
    are on the device "meta". dropped: options of `old` that `new` does not have."""
    config = decoder.config
    kept = {name: given for name, given in config.layer_options.items() if name != old}
    kept[new] = {key: value for key, value in config.layer_options.get(old, {}).items() if key not in dropped} | dict(options)
    names = tuple(new if name == old else name for name in config.layer_names)
    with torch.device("meta"):
        model = Decoder(replace(config, layers=names, layer_options=kept, window=window))
    weights = decoder.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict() if name in weights}, assign=True, strict=False)
    if config.tied:
        model.unembedding.weight = model.embedding.weight
    return model.train(decoder.training)
