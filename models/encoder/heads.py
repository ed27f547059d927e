"""The served encoder models. Each is an encoder with one of three outputs: vectors of a text, scores of a text (or a pair of texts), or
scores of each token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from models.encoder.model import Encoder
from models.encoder.pooling import POOLINGS, unit_length
from models.encoder.retrieval import SparseCode, Splade, TokenWeights
from models.parts.feedforward import ACTIVATIONS


class Headed(nn.Module):
    """Base class of an encoder with pooling or a classifier."""

    encoder: Encoder


class SentenceOutput(NamedTuple):
    """The output of a `SentenceEncoder`. `embedding` and `pooled` are None without pooling, the last two without such a head."""

    embedding: Tensor | None  # (B, D_out), normalised to length 1; 0 for a row without tokens
    pooled: Tensor | None  # (B, D_out), the same as `embedding`, before normalisation
    token_embeddings: Tensor  # (B, N, D), 0 at padding
    sparse: Tensor | None = None  # (B, V), or (B, N) of `TokenWeights`
    multivector: Tensor | None = None  # (B, N, D_matrix), length 1, 0 at padding


class SentenceEncoder(Headed):
    """A model from token ids to vectors: encoder, then pooling, optional dense layers and normalisation, and heads of `retrieval.py`.

    `pooling` is a name in POOLINGS or "none". `normalized` is True if the checkpoint's own pipeline ends in a normalisation. In that
    case the output's `embedding` is what the checkpoint's authors call the embedding, otherwise its `pooled` is. The model always
    returns both.
    """

    def __init__(
        self,
        encoder: Any,  # Encoder, or a model with the same `forward` and a `config`
        *,
        pooling: str,
        dense: tuple["Dense", ...] = (),
        normalized: bool = True,
        sparse: Splade | TokenWeights | SparseCode | None = None,
        multivector: "TokenMatrix | None" = None,
    ) -> None:
        super().__init__()
        if pooling not in (*POOLINGS, "none"):
            raise ValueError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}, none")
        self.encoder = encoder
        self.pooling = pooling
        self.dense = nn.Sequential(*dense)
        self.normalized = normalized
        self.sparse = sparse
        self.multivector = multivector

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> SentenceOutput:
        """Compute the vectors of texts and tokens. The arguments, (B, N) int64 each, are those of `Encoder.forward`."""
        mask, attended = attention_mask != 0, attention_mask == 1
        x = self.encoder(input_ids, attention_mask, token_type_ids)  # (B, N, D)
        token_embeddings = x * mask.unsqueeze(-1)
        matrix = None if self.multivector is None else self.multivector(x, mask)
        sparse = None if self.sparse is None or isinstance(self.sparse, SparseCode) else self.sparse(x, attended)
        if self.pooling == "none":
            return SentenceOutput(None, None, token_embeddings, sparse, matrix)
        pooled = self.dense(POOLINGS[self.pooling](x, attended))  # (B, D_out)
        if isinstance(self.sparse, SparseCode):
            sparse = self.sparse(unit_length(pooled) if self.normalized else pooled)
        return SentenceOutput(unit_length(pooled), pooled, token_embeddings, sparse, matrix)


class SequenceClassifier(Headed):
    """A classifier of whole texts, from token ids (B, N) to logits (B, L) for L labels. With one label it is a reranker of pairs
    of texts.
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
    """A classifier of tokens, from token ids (B, N) to logits (B, N, L) for L labels."""

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
    """A linear layer, an activation and, if `norm` is given, a layer norm: (.., d_in) -> (.., d_out)."""

    def __init__(self, d_in: int, d_out: int, *, activation: str = "tanh", bias: bool = True, norm: nn.LayerNorm | None = None) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.linear = nn.Linear(d_in, d_out, bias=bias)
        self.norm = norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.linear(x)))


class TokenMatrix(nn.Module):
    """One vector of length 1 for each token, 0 at padding: (B, N, D) and a mask (B, N) -> (B, N, D_matrix). Khattab & Zaharia 2020,
    arXiv:2004.12832.
    """

    def __init__(self, dense: Sequence[Dense]) -> None:
        super().__init__()
        self.dense = nn.Sequential(*dense)
        self.width = dense[-1].linear.out_features

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return unit_length(self.dense(x)) * mask.unsqueeze(-1)
