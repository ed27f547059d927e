"""The fields of a manifest for search: sparse vectors, one vector per token, and the form of queries and documents."""

from typing import Literal

from pydantic import Field

from export.contract.tensors import FileName, ManifestPart, Size, TokenId

Output = Literal["dense", "sparse", "multivector", "tokens"]  # "tokens": the encoder's vectors of a text's tokens, as they are


class Sparse(ManifestPart):
    """Sparse vectors: `size` numbers, few of them above 0 and none below.

    The graph's output SPARSE has one for each text (SPLADE, arXiv 2107.05720). With `by_token` the output TOKEN_WEIGHTS has a number for
    each token, and a text's vector has at each token id the largest number of its tokens with that id (BGE-M3, arXiv 2402.03216).
    """

    size: Size
    vocabulary: bool = Field(default=True, description="an index is a token id, so it has a word; False: it is a place in a learned code")
    by_token: bool = False
    ignored_ids: tuple[TokenId, ...] = Field(default=(), max_length=1_000, description="token ids that get no weight, for instance [CLS]")
    query_table: FileName | None = Field(
        default=None,
        description="queries need no graph: a file of `size` little-endian float32 numbers, the weight of each token id that a query has",
    )


class MultiVector(ManifestPart):
    """One vector of length 1 for each token of a text, as ColBERT has (arXiv 2004.12832). Two texts are compared by MaxSim."""

    width: Size
    skipped_ids: tuple[TokenId, ...] = Field(
        default=(), max_length=10_000, description="tokens of documents that get no vector: punctuation"
    )
    skips_first: bool = Field(default=False, description="the first token of a text gets no vector")
    mean: bool = Field(default=False, description="a score is divided by the number of the query's vectors")


class Expansion(ManifestPart):
    """ColBERT's query expansion: a query is filled up with a token, whose vectors are compared too."""

    token_id: TokenId
    tokens: Size = Field(description="the query is filled up to so many tokens, special tokens included")
    attended: bool = Field(description="the query's tokens attend to the filling. If not, ATTENTION_MASK has 2 for it")


class Role(ManifestPart):
    """How a checkpoint writes a text of one role, a query or a document."""

    prompt: str | None = Field(default=None, max_length=256, description="name of the prompt that is put before the text")
    marker_id: TokenId | None = Field(default=None, description="token that is put after the first special token")
    max_tokens: Size | None = Field(default=None, description="longest text in tokens; None: as for every text")
    expansion: Expansion | None = None


RoleName = Literal["query", "document"]
