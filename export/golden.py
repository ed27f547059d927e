"""Texts whose vectors a bundle carries with it, so that a server can prove itself on start, and a larger choice to judge precisions by.

Each is run alone, as a request of one text is. The outputs are those of the float32 torch model, whatever the precision of the graph.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export import contract
from export.parity import Feed, Reference, Tensors

TEXTS = (
    "A cat sleeps on the warm stones of the harbour wall.",
    "How do I reset my password?",
    "To reset your password, open Settings, choose Security and follow the link in the mail that we send you.",
    "The quick brown fox jumps over the lazy dog.",
    "yes",
    "",
    "???",
    "3.14159 26535 89793",
    "SELECT name, COUNT(*) FROM users WHERE active = 1 GROUP BY name;",
    "def add(a: int, b: int) -> int:\n    return a + b",
    "https://example.com/path?query=value#fragment",
    "Die Würde des Menschen ist unantastbar.",
    "El perro corre por la playa cada mañana.",
    "L'été dernier, nous avons traversé les Alpes à vélo.",
    "Быстрая лиса перепрыгивает через ленивую собаку.",
    "今日はとても良い天気ですね。",
    "注意力机制让模型关注最相关的词。",
    "القطة نائمة على الأريكة",
    "सूरज पूर्व में उगता है।",
    "I love this! 😍🎉 Best purchase ever 👍🏽",
    "Attention is a weighted mean: softmax(QKᵀ/√d) V ∈ ℝⁿˣᵈ.",
    "Shares fell 3% on Tuesday after the company cut its forecast for the second quarter, citing weaker demand in Asia.",
    "Patient presents with mild fever (38.2 °C), dry cough and fatigue; no history of asthma.",
    # Beyond every limit below 4,000 tokens, so that the cut is part of the proof.
    "It was a long walk from the station to the old house, and nobody had thought to bring an umbrella. " * 190,
)

PAIRS = (
    "Where does the cat sleep?",
    "You can change it in the security settings.",
    "The office is closed on public holidays.",
    "A dog is being jumped over by a fox.",
    "no",
)

# Only for judging precisions: ordinary sentences, and the short symbolic ones that quantisation harms first.
MORE_TEXTS = (
    "What is the capital of Australia?",
    "Canberra is the capital city of Australia.",
    "The bank raised its interest rate by a quarter point.",
    "They sat on the bank of the river and watched the boats.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "Stir the onions until golden, then add the rice and the stock.",
    "The train to Lyon leaves from platform nine.",
    "no",
    "ok",
    "a",
    ".",
    "404",
    "x = y + 1",
    "C++",
    "n/a",
    "$9.99",
    "10:45",
    "ERROR: index out of range",
    '{"id": 7, "name": "ada"}',
    "git rebase --interactive",
    "The defendant shall pay the costs of the proceedings.",
    "A proof by induction begins with the base case.",
    "Buy 2 get 1 free!!!",
    "Der Zug nach München hat zwanzig Minuten Verspätung.",
    "¿Dónde está la biblioteca?",
    "Il pleut depuis trois jours.",
    "Он прочитал книгу за один вечер.",
    "东京是日本的首都。",
    "서울은 대한민국의 수도이다.",
    "Η γάτα κοιμάται.",
    "ฉันชอบกินข้าว",
    "😀",
    "🚀🚀🚀",
    "She didn't say he stole the money.",
    "Not bad at all, I would come again.",
    "The worst film I have seen this year.",
    "Gradient descent moves the weights against the slope of the loss.",
    "Take one tablet twice a day after meals.",
    "Goal! 2-1 in extra time!",
    "The committee, which had met four times since the spring, could not agree on whether the report should be published in full.",
)


class Tokens:
    """The tokenizer of a checkpoint as a server uses it: cut to `max_tokens`, special tokens kept, no padding."""

    def __init__(self, file: Path, max_tokens: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)

    def feed(self, inputs: Tensors, text: str, pair: str | None = None) -> Feed | None:
        """A batch of one; None for a text that has no tokens at all."""
        encoding = self.tokenizer.encode(text, pair)
        if not encoding.ids:
            return None
        feed = {
            contract.INPUT_IDS: np.array([encoding.ids], np.int64),
            contract.ATTENTION_MASK: np.ones((1, len(encoding.ids)), np.int64),
            contract.TOKEN_TYPE_IDS: np.array([encoding.type_ids], np.int64),
        }
        return {tensor.name: feed[tensor.name] for tensor in inputs}


class Examples:
    """Inputs, the batch of one that each becomes, and the row that torch gives for it: (n, D) float32, see `contract.Golden.outputs`."""

    def __init__(self, kind: contract.Kind, tokens: Tokens, inputs: Tensors, reference: Reference, texts: Sequence[str]) -> None:
        self.kind = kind
        partners = [PAIRS[i % len(PAIRS)] for i in range(len(texts))] if kind == "reranker" else [None] * len(texts)
        found = [(text, pair, tokens.feed(inputs, text, pair)) for text, pair in zip(texts, partners, strict=True)]
        kept = [(text, pair, feed) for text, pair, feed in found if feed is not None]
        self.texts = tuple(text for text, _, _ in kept)
        self.pairs = tuple(pair for _, pair, _ in kept if pair is not None) or None
        self.feeds = [feed for _, _, feed in kept]
        self.rows = self.run(reference)

    def run(self, answer: Reference) -> NDArray[np.float32]:
        output = contract.EMBEDDING if self.kind == "encoder" else contract.LOGITS
        rows = [answer(feed)[output][0] for feed in self.feeds]
        return np.stack([row[0] for row in rows] if self.kind == "token_classifier" else rows)

    def cosines(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Likeness of each row of a graph to torch's own, 1 = the same. See `contract.Parity.min_cosine` for logits."""
        return cosines(rows, self.rows) if self.kind == "encoder" else _logit_cosines(rows, self.rows)


def cosines(got: NDArray[np.float32], want: NDArray[np.float32]) -> NDArray[np.float64]:
    """(n, D), (n, D) -> (n,); rows of 0 are like each other and like nothing else."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("nd,nd->n", a, b)
    same = ~a.any(axis=1) & ~b.any(axis=1)
    return np.where(same, 1.0, dots / np.where(lengths == 0, 1.0, lengths))


def _logit_cosines(got: NDArray[np.float32], want: NDArray[np.float32]) -> NDArray[np.float64]:
    """Each label's logits over all texts, less their mean, as one vector: (n, L), (n, L) -> (L,). What ranks texts is this difference."""
    mean = want.mean(axis=0)
    return cosines((got - mean).T, (want - mean).T)
