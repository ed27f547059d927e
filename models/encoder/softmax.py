"""The softmax form of an encoder: the same weights, with softmax attention to all tokens."""

from dataclasses import replace

import torch

from models.encoder.model import Encoder

POSITIONS = "embeddings.positions.weight"


def softmax_of(encoder: Encoder, n_positions: int) -> Encoder:
    """Return an encoder for texts of up to `n_positions` tokens that shares the weights of `encoder`, with softmax attention to all tokens.

    Parameters that softmax attention does not have, such as those of feature maps, are left out. Raises ValueError if the layers lack its
    projections, or if `encoder` has fewer positions.
    """
    config = encoder.config
    if config.n_positions < n_positions:
        raise ValueError(f"n_positions={n_positions} exceeds the {config.n_positions} of the encoder")
    with torch.device("meta"):
        model = Encoder(replace(config, attention="softmax", attention_options={}, n_positions=n_positions))
    weights = dict(encoder.state_dict())
    if POSITIONS in weights:
        weights[POSITIONS] = weights[POSITIONS][:n_positions].contiguous()
    if odd := [name for name, place in model.state_dict().items() if name not in weights or weights[name].shape != place.shape]:
        raise ValueError(f"attention={config.attention!r} has no {odd[0]} of softmax attention's shape")
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    return model.train(encoder.training)
