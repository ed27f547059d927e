"""Turns the softmax layers of a decoder into attention to a window and the first tokens, whose state has a constant size."""

from dataclasses import replace

import torch

from models.decoder.model import SINK_WINDOW, Decoder

SOFTMAX = "causal_softmax"


def windowed(decoder: Decoder, window: int) -> Decoder:
    """Return a decoder with the weights of `decoder`, whose softmax layers attend to `window` tokens, the first ones among them.

    Up to `window` tokens it computes the same. The weights are shared with `decoder`. Raises ValueError if no layer has softmax attention
    to all tokens, or if the positions cannot be those of a window.
    """
    config = decoder.config
    if SOFTMAX not in config.layer_names:
        raise ValueError(f"the layers are {', '.join(sorted(set(config.layer_names)))}, and a window is for {SOFTMAX}; leave it out")
    if config.positions != "rotary":
        raise ValueError(f"positions={config.positions!r} grow with the text; only rotary positions know distances alone")
    if config.rotary.depends_on_length:
        raise ValueError("the rotation depends on the length of the text (dynamic scaling), so tokens of a state would change with it")
    options = {name: given for name, given in config.layer_options.items() if name != SOFTMAX}
    options[SINK_WINDOW] = dict(config.layer_options.get(SOFTMAX, {}))
    names = tuple(SINK_WINDOW if name == SOFTMAX else name for name in config.layer_names)
    with torch.device("meta"):
        model = Decoder(replace(config, layers=names, layer_options=options, window=window))
    model.load_state_dict(decoder.state_dict(), assign=True)
    if config.tied:
        model.unembedding.weight = model.embedding.weight
    return model.train(decoder.training)
