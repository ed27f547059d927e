"""Clients of `/v1/embeddings`: a query at a time, batches of passages, texts of every length, long documents."""

from collections.abc import Sequence

from loadtest.common import corpus, texts
from loadtest.common.corpus import DOCUMENT, PASSAGE, QUERY
from loadtest.users.client import Answer, Client

_BATCH = 64  # more than the service takes for interactive work
_LENGTHS = texts.MIX


class _Embeddings(Client):
    """Sends the texts of `texts` in one request, asks for base64 as the openai client does, and counts the vectors that come back."""

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


class Embed(_Embeddings):
    """A search box: one query a request (or one text of `--words` words)."""

    kind = "embed"

    def texts(self) -> Sequence[str]:
        return [corpus.words(self.draw, self.shared.words or QUERY.draw(self.draw))]


class EmbedBatch(_Embeddings):
    """An indexer: 64 passages a request."""

    kind = "embed_batch"

    def texts(self) -> Sequence[str]:
        return [corpus.prose(self.draw, self.shared.words or PASSAGE.draw(self.draw)) for _ in range(_BATCH)]


class EmbedMixed(_Embeddings):
    """Mixed work: 1 to 8 texts of 6 to 220 words, mostly short (the lengths of the benchmark's mix)."""

    kind = "embed_mixed"

    def texts(self) -> Sequence[str]:
        return [corpus.words(self.draw, self.draw.choice(_LENGTHS)) for _ in range(self.draw.randint(1, 8))]


class Documents(_Embeddings):
    """Documents of 1,000 to 12,000 words, which the service tokenises whole and cuts."""

    kind = "documents"

    def texts(self) -> Sequence[str]:
        return [corpus.prose(self.draw, DOCUMENT.draw(self.draw))]
