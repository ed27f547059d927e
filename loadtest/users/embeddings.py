"""Clients of `/v1/embeddings` (a query at a time, batches of passages, texts of every length, long documents) and `/v1/rerank`."""

from collections.abc import Sequence

from loadtest.common import texts
from loadtest.common.texts import DOCUMENT, PASSAGE, QUERY
from loadtest.users.client import Answer, Client

_BATCH = 64  # texts per request; so many that the service puts the request into its bulk lane
_DOCUMENTS = (5, 30)  # fewest and most documents of a rerank request


class _EmbeddingsClient(Client):
    """Sends the texts that `texts()` returns in one request, requests base64 like the openai client, and counts the returned embeddings."""

    abstract = True

    def ask(self, answer: Answer) -> None:
        sent = self.texts()
        content = self.post_json("/v1/embeddings", {"model": self.model, "input": sent, "encoding_format": "base64"}, answer)
        if content is not None:
            answer.tokens = content["usage"]["total_tokens"]
            if len(content["data"]) != len(sent):
                answer.problem = f"{len(content['data'])} vectors for {len(sent)} texts"

    def texts(self) -> Sequence[str]:
        raise NotImplementedError


class Embed(_EmbeddingsClient):
    """Sends one short query per request, like a search box. If `--words` is given, the query has this many words."""

    kind = "embed"

    def texts(self) -> Sequence[str]:
        return [texts.words(self.draw, self.shared.words or QUERY.draw(self.draw))]


class EmbedBatch(_EmbeddingsClient):
    """Sends 64 passages per request, like the indexing of a collection."""

    kind = "embed_batch"

    def texts(self) -> Sequence[str]:
        return [texts.prose(self.draw, self.shared.words or PASSAGE.draw(self.draw)) for _ in range(_BATCH)]


class EmbedMixed(_EmbeddingsClient):
    """Sends 1 to 8 texts of 6 to 220 words, mostly short. Their lengths are those of `MIX` in loadtest/common/texts.py."""

    kind = "embed_mixed"

    def texts(self) -> Sequence[str]:
        return [texts.words(self.draw, self.draw.choice(texts.MIX)) for _ in range(self.draw.randint(1, 8))]


class Documents(_EmbeddingsClient):
    """Sends documents of 1,000 to 12,000 words, which the service tokenizes in full and then truncates."""

    kind = "documents"

    def texts(self) -> Sequence[str]:
        return [texts.prose(self.draw, DOCUMENT.draw(self.draw))]


class Rerank(Client):
    """Sends a query with 5 to 30 passages to rank, like the second stage of a search."""

    kind = "rerank"

    def ask(self, answer: Answer) -> None:
        documents = [texts.prose(self.draw, PASSAGE.draw(self.draw)) for _ in range(self.draw.randint(*_DOCUMENTS))]
        query = texts.words(self.draw, QUERY.draw(self.draw))
        content = self.post_json(
            "/v1/rerank", {"model": self.model, "query": query, "documents": documents, "return_documents": False}, answer
        )
        if content is not None:
            answer.tokens = content["usage"]["total_tokens"]
            if sorted(result["index"] for result in content["results"]) != list(range(len(documents))):
                answer.problem = f"{len(documents)} documents, and the answer is no order of them"
