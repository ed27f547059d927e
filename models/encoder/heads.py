"""The served models: an encoder with a sentence vector, with scores for a text (or a pair of texts), or with scores for
each token.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from models.encoder.model import Encoder
from models.encoder.pooling import POOLINGS, unit_length
from models.parts.feedforward import ACTIVATIONS


class Headed(nn.Module):
    """An encoder with pooling or a classifier."""

    encoder: Encoder


class SentenceOutput(NamedTuple):
    """The output of a `SentenceEncoder`. `embedding` and `pooled` are None without pooling."""

    embedding: Tensor | None  # (B, D_out), unit length (0 for a row without tokens)
    pooled: Tensor | None  # (B, D_out), the same before normalisation
    token_embeddings: Tensor  # (B, N, D), 0 at padding


class SentenceEncoder(Headed):
    """Token ids to one vector a text: encoder, pooling, dense layers after it, normalisation.

    `pooling` is a name in POOLINGS or "none". `normalized` says whether the checkpoint's own pipeline ends in a
    normalisation, that is whether `embedding` or `pooled` is what its authors call the embedding; both are always
    given.
    """

    def __init__(
        self,
        encoder: Any,  # Encoder, or another model with its calls and `config`
        *,
        pooling: str,
        dense: tuple["Dense", ...] = (),
        normalized: bool = True,
    ) -> None:
        super().__init__()
        if pooling not in (*POOLINGS, "none"):
            raise ValueError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}, none")
        self.encoder = encoder
        self.pooling = pooling
        self.dense = nn.Sequential(*dense)
        self.normalized = normalized

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> SentenceOutput:
        """(B, N) int64 each, as `Encoder.forward` takes them."""
        mask = attention_mask != 0
        x = self.encoder(input_ids, attention_mask, token_type_ids)  # (B, N, D)
        token_embeddings = x * mask.unsqueeze(-1)
        if self.pooling == "none":
            return SentenceOutput(None, None, token_embeddings)
        pooled = self.dense(POOLINGS[self.pooling](x, mask))  # (B, D_out)
        return SentenceOutput(unit_length(pooled), pooled, token_embeddings)


class SequenceClassifier(Headed):
    """Token ids to scores of the whole text: (B, N) -> logits (B, L). With one label it is a reranker of pairs of
    texts.
    """

    def __init__(self, encoder: Encoder, *, n_labels: int, pooling: str, transform: "Dense") -> None:
        super().__init__()
        if n_labels < 1:
            raise ValueError(f"n_labels={n_labels} must be at least 1")
        self.encoder = encoder
        self.pooling = pooling
        self.transform = transform
        self.classifier = nn.Linear(encoder.config.d_model, n_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        x = self.encoder(input_ids, attention_mask, token_type_ids)
        return self.classifier(self.transform(POOLINGS[self.pooling](x, attention_mask != 0)))


class TokenClassifier(Headed):
    """Token ids to scores of every token: (B, N) -> logits (B, N, L)."""

    def __init__(self, encoder: Encoder, *, n_labels: int, transform: "Dense | None" = None) -> None:
        super().__init__()
        if n_labels < 1:
            raise ValueError(f"n_labels={n_labels} must be at least 1")
        self.encoder = encoder
        self.transform = transform or nn.Identity()
        self.classifier = nn.Linear(encoder.config.d_model, n_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.classifier(self.transform(self.encoder(input_ids, attention_mask, token_type_ids)))


class Dense(nn.Module):
    """A linear map, an activation and, where `norm` is given, a layer norm: (.., d_in) -> (.., d_out)."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        activation: str = "tanh",
        bias: bool = True,
        norm: nn.LayerNorm | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.linear = nn.Linear(d_in, d_out, bias=bias)
        self.norm = norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.linear(x)))
