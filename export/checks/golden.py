"""Texts whose vectors, or whose continuations, a bundle carries with it, so that a server can prove itself on start, and more to judge
precisions by.

Each is run alone, as a request of one text is. The outputs are those of the float32 torch model, whatever the precision of the graph.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export import contract
from export.checks.decoder_parity import Steps
from export.checks.parity import Feed, Reference, Tensors
from export.errors import ExportError
from models.folders.folder import read_tokenizer

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
    # Beyond the 512 tokens that most models take, so that their cut is part of the proof; no longer, since every start waits for it.
    "It was a long walk from the station to the old house, and nobody had thought to bring an umbrella. " * 30,
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

# What decoders continue: the beginnings of programs and of sentences.
PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.",
    "for number in range(10):\n    if number % 2 == 0:\n        print(",
    'with open("notes.txt", encoding="utf-8") as file:\n    for line in file:\n        ',
    "    try:\n        value = int(text)\n    except ValueError",
    "Returns a new list that holds the elements of",
    "Raises a TypeError when the argument is not a",
    "The quick brown fox jumps over the",
    "To install the package, run",
    "x = ",
    "今日はとても良い",
)

# What decoders are judged by, in bits per byte: code, prose, and a little of what is neither.
PASSAGES = (
    '''def median(values):
    """The middle of the values in order, or the mean of the two in the middle."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("median of no values")
    half, odd = divmod(len(ordered), 2)
    if odd:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
''',
    """class Node:
    def __init__(self, key, left=None, right=None):
        self.key = key
        self.left = left
        self.right = right

    def __iter__(self):
        if self.left is not None:
            yield from self.left
        yield self.key
        if self.right is not None:
            yield from self.right
""",
    """import argparse
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the lines of text files.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--verbose", action="store_true", help="log every file")
    args = parser.parse_args()
    for file in args.files:
        lines = file.read_text().splitlines()
        if args.verbose:
            logger.info("%s has %d lines", file, len(lines))
        print(len(lines), file)
    return 0
""",
    "The function takes an iterable and returns a list of the same length. If the iterable is empty, an empty list is returned. The "
    "order of the elements is kept, and elements that compare equal are not removed. This is useful when the caller has to know how "
    "many there were.",
    "It was a long walk from the station to the old house, and nobody had thought to bring an umbrella. By the time they reached the "
    "gate the rain had stopped, and somebody had lit the lamp above the door.",
    '{"name": "lamp", "price": 24.5, "tags": ["home", "light"], "stock": {"berlin": 3, "lyon": 0}}\n',
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung aller staatlichen Gewalt.",
)
N_CONTINUED = 16  # tokens after each prompt
N_TOP = 8  # logits kept of each prompt


class Tokens:
    """The tokenizer of a checkpoint as a server uses it: cut to `max_tokens`, special tokens kept, no padding."""

    def __init__(self, file: Path, max_tokens: int) -> None:
        self.tokenizer = read_tokenizer(file)
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


class DecoderExamples:
    """Prompts with what the reference makes of them: logits (n, V) after each, and its likeliest continuation.

    Raises ExportError where it has positions for none of them.
    """

    def __init__(self, tokenizer: Tokenizer, reference: Steps) -> None:
        longest = reference.n_positions
        cut = [(prompt, tokenizer.encode(prompt).ids) for prompt in PROMPTS]
        fitting = [(prompt, ids) for prompt, ids in cut if ids and (longest is None or len(ids) + N_CONTINUED <= longest)]
        if not fitting:
            raise ExportError(f"n_positions={longest} have no room for a prompt and the {N_CONTINUED} tokens after it that prove a server")
        self.prompts = tuple(prompt for prompt, _ in fitting)
        self.token_ids = [ids for _, ids in fitting]
        runs = [greedy(reference, ids, N_CONTINUED) for ids in self.token_ids]
        self.logits = np.stack([logits for logits, _ in runs])
        self.continuations = [tokens for _, tokens in runs]

    def run(self, steps: Steps) -> NDArray[np.float32]:
        return np.stack([greedy(steps, ids, 1)[0] for ids in self.token_ids])

    def golden(self, max_abs_error: float) -> contract.DecoderGolden:
        top = np.argsort(-self.logits, axis=1, kind="stable")[:, :N_TOP]  # (n, N_TOP)
        return contract.DecoderGolden(
            prompts=self.prompts,
            token_ids=tuple(map(tuple, self.token_ids)),
            continuations=tuple(map(tuple, self.continuations)),
            top_token_ids=tuple(tuple(map(int, row)) for row in top),
            top_logits=tuple(tuple(map(float, row)) for row in np.take_along_axis(self.logits, top, axis=1)),
            max_abs_error=max_abs_error,
        )


def greedy(steps: Steps, prompt: Sequence[int], n: int) -> tuple[NDArray[np.float32], list[int]]:
    """The logits (V,) after the prompt, and the n tokens of which each is the likeliest after those before it."""
    states, position, fed = steps.begin(1), 0, np.array([prompt])
    rows: list[NDArray[np.float32]] = []
    while len(rows) < n:
        last = np.array([[fed.shape[1] - 1]])
        logits, states = steps.run(fed, np.array([fed.shape[1]]), np.array([position]), states, last)
        rows.append(logits[0, 0])
        position += fed.shape[1]
        fed = np.array([[rows[-1].argmax()]])
    return rows[0], [int(row.argmax()) for row in rows]
