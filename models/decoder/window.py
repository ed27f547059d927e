"""Turns the softmax layers of a decoder into layers whose state has a constant size: a window, or a window and feature maps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.decoder.model import HYBRID, SINK_WINDOW, WITH_FIRST, Decoder

SOFTMAX = "causal_softmax"
ONLY_OF_WINDOWS = ("window", "n_first", "piece", "counted")  # options that softmax attention to all tokens does not have


def windowed(decoder: Decoder, window: int) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose softmax layers attend to `window` tokens, the first ones among them.

    Up to `window` tokens it computes the same. The weights are shared with `decoder`. Raises ValueError if no layer has softmax attention
    to all tokens, or if the positions cannot be those of a window.
    """
    return _with_layers(decoder, [SINK_WINDOW] * decoder.config.n_layers, window, {})


class LongWindow(NamedTuple):
    """Layers, by number, that have a longer window in place of feature maps. What a sum over keys cannot hold, such as a number to repeat,
    is mostly looked up by a few layers."""

    layers: tuple[int, ...]
    window: int


def hybrid(decoder: Decoder, window: int, options: Mapping[str, Any], long: LongWindow | None = None) -> Decoder:
    """Return a decoder as `windowed` does, whose layers also attend to the tokens that left the window, by new feature maps.

    options: keyword arguments of `CausalHybridAttention`. long: layers that get a longer window instead. Raises ValueError also if `long`
    does not fit.
    """
    names, of_names = [HYBRID] * decoder.config.n_layers, {HYBRID: options}
    if long is not None:
        _check_long(decoder, window, long)
        for number in long.layers:
            names[number] = SINK_WINDOW
        of_names[SINK_WINDOW] = {"window": long.window} | {key: options[key] for key in options if key == "n_first"}
    model = _with_layers(decoder, names, window, of_names)
    for block in model.blocks:
        if isinstance(block.layer, CausalHybridAttention):
            block.layer.draw_maps()
    return model


def _check_long(decoder: Decoder, window: int, long: LongWindow) -> None:
    layers = decoder.config.layer_names
    softmax = [number for number, name in enumerate(layers) if name == SOFTMAX]
    if not set(long.layers) < set(softmax) or len(set(long.layers)) < len(long.layers):
        raise ValueError(f"long windows for layers {list(long.layers)}; name some of {softmax}, each once, and not all of them")
    if long.window <= window:
        raise ValueError(f"a long window of {long.window} tokens must exceed the other layers' window of {window}")
    if SINK_WINDOW in layers:
        raise ValueError(f"layer {layers.index(SINK_WINDOW)} has a window already; longer windows are for decoders without")


def softmax_of(decoder: Decoder) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose hybrid layers, and those with a window and the first tokens, are softmax
    attention to all tokens again."""
    config = decoder.config
    given = {key: value for name in WITH_FIRST for key, value in config.layer_options.get(name, {}).items()}
    options = {key: value for key, value in given.items() if key not in ONLY_OF_WINDOWS}
    names = tuple(SOFTMAX if name in WITH_FIRST else name for name in config.layer_names)
    return _replaced(decoder, names, {SOFTMAX: options}, config.window)


def _with_layers(decoder: Decoder, names: Sequence[str], window: int, options: Mapping[str, Mapping[str, Any]]) -> Decoder:
    """Return a decoder whose softmax layers have these names, one for each block, and these options, by name, besides their own."""
    config = decoder.config
    if SOFTMAX not in config.layer_names:
        raise ValueError(f"the layers are {', '.join(sorted(set(config.layer_names)))}, and a window is for {SOFTMAX}; leave it out")
    if config.positions != "rotary":
        raise ValueError(f"positions={config.positions!r} grow with the text; only rotary positions know distances alone")
    if config.rotary.depends_on_length:
        raise ValueError("the rotation depends on the length of the text (dynamic scaling), so tokens of a state would change with it")
    pairs = list(zip(names, config.layer_names, strict=True))
    own = config.layer_options.get(SOFTMAX, {})
    made = {new: {**own, **options.get(new, {})} for new, old in pairs if old == SOFTMAX}
    return _replaced(decoder, tuple(new if old == SOFTMAX else old for new, old in pairs), made, window)


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
