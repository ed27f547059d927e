"""Turns the softmax layers of a decoder into layers whose state has a constant size: a window, or a window and feature maps."""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.decoder.model import HYBRID, SINK_WINDOW, WITH_FIRST, Decoder

SOFTMAX = "causal_softmax"
N_FIRST = 4  # first tokens that a layer keeps, unless its options say how many
ONLY_OF_WINDOWS = ("window", "n_first", "piece", "counted")  # options that softmax attention to all tokens does not have


def windowed(decoder: Decoder, window: int) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose softmax layers attend to `window` tokens, the first ones among them.

    Up to `window` tokens it computes the same. The weights are shared with `decoder`. Raises ValueError if no layer has softmax attention
    to all tokens, or if the positions cannot be those of a window.
    """
    return _with_layers(decoder, SINK_WINDOW, window, {})


class LongWindow(NamedTuple):
    """Layers, by number, that have a longer window in place of feature maps. What a sum over keys cannot hold, such as a number to repeat,
    is mostly looked up by a few layers."""

    layers: tuple[int, ...]
    window: int


def hybrid(decoder: Decoder, window: int, options: Mapping[str, Any], long: LongWindow | None = None) -> Decoder:
    """Return a decoder as `windowed` does, whose layers also attend to the tokens that left the window, by new feature maps.

    options: keyword arguments of `CausalHybridAttention`. long: layers that get a longer window instead. Raises ValueError also if `long`
    names a layer that has no softmax attention, or has no longer window.
    """
    softmax = [number for number, name in enumerate(decoder.config.layer_names) if name == SOFTMAX]
    if long is not None and not set(long.layers) < set(softmax):
        raise ValueError(f"long windows for layers {list(long.layers)}; give some of {softmax}, and not all of them")
    if long is not None and long.window <= window:
        raise ValueError(f"a long window of {long.window} tokens must exceed the other layers' window of {window}")
    of_long = {} if long is None else {"window": long.window, "n_first": options.get("n_first", N_FIRST)}
    model = _with_layers(decoder, HYBRID, window, options, () if long is None else long.layers, of_long)
    for block in model.blocks:
        if isinstance(block.layer, CausalHybridAttention):
            block.layer.draw_maps()
    return model


def without_far(decoder: Decoder) -> Decoder:
    """Return `decoder`, in which the weights of all tokens beyond the windows of its hybrid layers are 0, in place."""
    for block in decoder.blocks:
        if isinstance(block.layer, CausalHybridAttention):
            nn.init.constant_(block.layer.phi_q.bias, -1e4)
    return decoder


def softmax_of(decoder: Decoder) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose hybrid layers, and those with a window and the first tokens, are softmax
    attention to all tokens again."""
    config = decoder.config
    options = {key: value for key, value in config.layer_options.get(HYBRID, {}).items() if key not in ONLY_OF_WINDOWS}
    names = tuple(SOFTMAX if name in WITH_FIRST else name for name in config.layer_names)
    return _replaced(decoder, names, {SOFTMAX: options}, config.window)


def _with_layers(
    decoder: Decoder,
    name: str,
    window: int,
    options: Mapping[str, Any],
    others: Container[int] = (),
    of_others: Mapping[str, Any] | None = None,
) -> Decoder:
    """Return a decoder with layers `name` in place of softmax, and windows with the options `of_others` in place of the layers `others`."""
    config = decoder.config
    if SOFTMAX not in config.layer_names:
        raise ValueError(f"the layers are {', '.join(sorted(set(config.layer_names)))}, and a window is for {SOFTMAX}; leave it out")
    if config.positions != "rotary":
        raise ValueError(f"positions={config.positions!r} grow with the text; only rotary positions know distances alone")
    if config.rotary.depends_on_length:
        raise ValueError("the rotation depends on the length of the text (dynamic scaling), so tokens of a state would change with it")
    own = config.layer_options.get(SOFTMAX, {})
    new = [name if number not in others else SINK_WINDOW for number in range(config.n_layers)]
    names = tuple(each if old == SOFTMAX else old for each, old in zip(new, config.layer_names, strict=True))
    return _replaced(decoder, names, {SINK_WINDOW: {**own, **(of_others or {})}} | {name: {**own, **options}}, window)


def _replaced(decoder: Decoder, names: tuple[str, ...], options: Mapping[str, Mapping[str, Any]], window: int) -> Decoder:
    """Return a decoder that shares the weights of `decoder`, with layers of these names and, for those that are new, options. Parameters
    that `decoder` does not have are on the device "meta"."""
    config = decoder.config
    of_layers = {name: given for name, given in (*config.layer_options.items(), *options.items()) if name in names}
    with torch.device("meta"):
        model = Decoder(replace(config, layers=names, layer_options=of_layers, window=window))
    weights = decoder.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict() if name in weights}, assign=True, strict=False)
    if config.tied:
        model.unembedding.weight = model.embedding.weight
    return model.train(decoder.training)
