"""The hyperparameters of the encoder-decoders. Source and output share one vocabulary."""

from dataclasses import dataclass
from typing import Literal

from models.parts.feedforward import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields that all encoder-decoders have. Raises ValueError, with the values, if they are invalid or do not fit together."""

    vocab_size: int
    begin_token_id: int  # the first input token of the decoder
    end_token_id: int  # the token that ends an output
    max_source: int  # longest source in tokens
    max_output: int  # longest output in tokens, the end token included

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and not name.endswith("_token_id") and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("begin_token_id", "end_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} is not in the vocabulary, 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Config):
    """The config of a recurrent encoder-decoder. d_encoder is the width of one direction of the encoder, so a vector of the memory has
    2 d_encoder columns.
    """

    d_embedding: int
    d_encoder: int
    d_state: int
    score: Literal["additive", "dot"] = "additive"
    d_hidden: int = 128  # A, the hidden width of the additive score

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in ("additive", "dot"):
            raise ValueError(f"score={self.score!r} is not one of additive, dot")
        if self.score == "dot" and self.d_state != 2 * self.d_encoder:
            raise ValueError(
                f"score='dot' multiplies a state with the memory: d_state={self.d_state} must be 2 * d_encoder={self.d_encoder}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The config of a Transformer. norm="post", activation="relu" and positions="sinusoidal" give the model of Vaswani et al. 2017.

    Sinusoidal and learned positions are added to the embeddings, which are then multiplied by sqrt(d_model) first, as in that paper.
    """

    d_model: int
    n_heads: int
    d_feedforward: int
    n_encoder_layers: int
    n_decoder_layers: int
    positions: Literal["rotary", "sinusoidal", "learned"] = "rotary"
    norm: Literal["pre", "post"] = "pre"
    activation: str = "gelu"  # a name in ACTIVATIONS
    attention_bias: bool = False  # whether the decoder's projections have a bias; the encoder's always have one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in ("rotary", "sinusoidal", "learned"):
            raise ValueError(f"positions={self.positions!r} is not one of rotary, sinusoidal, learned")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm={self.norm!r} is not one of pre, post")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.d_model % self.n_heads or self.d_model // self.n_heads % 2:
            raise ValueError(f"d_model={self.d_model} must divide into n_heads={self.n_heads} heads of an even width; change one of them")

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings: sqrt(d_model) if positions are added to them, otherwise 1."""
        return 1.0 if self.positions == "rotary" else self.d_model**0.5
