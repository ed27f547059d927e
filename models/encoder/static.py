"""Static embeddings: the vector of a text is the mean of the vectors of its tokens, which a table holds. No token sees another.

x_i = weight[id_i] table[row[id_i]],   pooled = sum_i x_i / n,   n = number of tokens
Unless they are given, all weights are 1 and row[id] = id. sentence-transformers calls such a model `StaticEmbedding`. Tulkens & van
Dongen 2024, "Model2Vec: fast state-of-the-art static embeddings", make the table from a Transformer. O(N D) time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.encoder.heads import Dense, Headed, SentenceOutput
from models.encoder.pooling import unit_length


@dataclass(frozen=True, kw_only=True)
class StaticShape:
    """The config of a `StaticTable`."""

    vocab_size: int
    d_model: int
    n_positions: int  # longest input in tokens
    n_rows: int  # vectors in the table, which is vocab_size unless tokens share vectors
    weighted: bool = False  # whether each token has a weight
    shared: bool = False  # whether each token has the number of its row
    unknown_id: int | None = None  # a token that is left out of the mean; None: no token is
    attention: str = "none"


class StaticTable(nn.Module):
    """The table: ids (B, N) -> token vectors (B, N, D), 0 at padding."""

    def __init__(self, config: StaticShape) -> None:
        super().__init__()
        self.config = c = config
        self.vectors = nn.Embedding(c.n_rows + 1, c.d_model, padding_idx=c.n_rows)  # the last row is 0, for padding
        self.row_of: Tensor | None
        self.weights: Tensor | None
        # For a token after the last one, which stands for padding, they have an entry too.
        self.register_buffer("row_of", torch.full((c.vocab_size + 1,), c.n_rows) if c.shared else None)
        self.register_buffer("weights", torch.ones(c.vocab_size + 1, 1) if c.weighted else None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        ids = torch.where(attention_mask != 0, input_ids, self.config.vocab_size)
        x = self.vectors(ids if self.row_of is None else self.row_of[ids])  # (B, N, D)
        return x if self.weights is None else x * self.weights[ids]


class StaticEncoder(Headed):
    """A model from token ids to one vector per text: table, mean, optional dense layers, normalisation.

    `normalized` is that of `SentenceEncoder`. A text that has nothing but the token `unknown_id` gets the vector of this token, because a
    vector of zeros has no direction.
    """

    encoder: StaticTable  # type: ignore[assignment]  # with the interface of an `Encoder`
    pooling = "mean"

    def __init__(self, table: StaticTable, *, dense: tuple[Dense, ...] = (), normalized: bool = True) -> None:
        super().__init__()
        self.encoder = table
        self.dense = nn.Sequential(*dense)
        self.normalized = normalized

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> SentenceOutput:
        """Compute the vectors of texts and tokens. The arguments, (B, N) int64 each, are those of `Encoder.forward`."""
        x = self.encoder(input_ids, attention_mask)
        counted = attention_mask != 0
        if self.encoder.config.unknown_id is not None:
            known = counted & (input_ids != self.encoder.config.unknown_id)
            counted = torch.where(known.any(1, keepdim=True), known, counted)
        # As a product of matrices the mean reads the token vectors once, and a runtime computes it on all its threads.
        weights = counted.to(x.dtype) / counted.sum(1, keepdim=True).clamp_min(1)  # (B, N)
        pooled = self.dense((weights.unsqueeze(1) @ x).squeeze(1))  # (B, D_out)
        return SentenceOutput(unit_length(pooled), pooled, x)
