"""A client of `/v1/rerank`: a query and the passages that a first search stage found."""

from loadtest.common import corpus
from loadtest.common.corpus import PASSAGE, QUERY
from loadtest.users.client import Answer, Client

_DOCUMENTS = (5, 30)


class Rerank(Client):
    """Puts 5 to 30 passages in order."""

    kind = "rerank"

    def ask(self, answer: Answer) -> None:
        documents = [corpus.prose(self.draw, PASSAGE.draw(self.draw)) for _ in range(self.draw.randint(*_DOCUMENTS))]
        query = corpus.words(self.draw, QUERY.draw(self.draw))
        content = self.post_json(
            "/v1/rerank", {"model": self.model, "query": query, "documents": documents, "return_documents": False}, answer
        )
        if content is not None:
            answer.tokens = content["usage"]["total_tokens"]
            if sorted(result["index"] for result in content["results"]) != list(range(len(documents))):
                answer.problem = f"{len(documents)} documents, and the answer is no order of them"
