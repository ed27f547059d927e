"""The texts used to check exports: sentences, prompts, passages and questions."""

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
    # More than the 512 tokens of most models, so that truncation is checked. Not longer, because every server start computes it.
    "It was a long walk from the station to the old house, and nobody had thought to bring an umbrella. " * 30,
)

PAIRS = (
    "Where does the cat sleep?",
    "You can change it in the security settings.",
    "The office is closed on public holidays.",
    "A dog is being jumped over by a fox.",
    "no",
)

# Only used to choose an encoder's int8 recipe: ordinary sentences, and short symbolic texts, which have the largest quantisation errors.
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

# Prompts for decoders: the beginnings of programs and of sentences.
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

# Passages for a decoder's bits per byte: code, prose, and a little data.
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

# Questions that a decoder with a chat template answers, to compare a lower precision with fp32.
QUESTIONS = (
    "What is the capital of France?",
    "What is gravity?",
    "How many days are in a week?",
    "Who wrote Romeo and Juliet?",
    "What is the largest planet in the solar system?",
    "Explain photosynthesis in one sentence.",
    "What is 2 + 2?",
    "Name three primary colors.",
    "What is the boiling point of water?",
    "How do I make a cup of tea?",
    "What does DNA stand for?",
    "Who painted the Mona Lisa?",
    "What is the speed of light?",
    "Write a haiku about the sea.",
    "What is the difference between a list and a tuple in Python?",
    "How do airplanes fly?",
    "What is the chemical symbol for gold?",
    "Give me a tip for better sleep.",
    "What is machine learning?",
    'Translate "good morning" into Spanish.',
    "What is the tallest mountain in the world?",
    "Why is the sky blue?",
    "What causes the seasons?",
    "How many continents are there?",
    "What is a prime number?",
    "Write a one-line greeting for a birthday card.",
    "What is the opposite of hot?",
    "How does a vaccine work?",
    "What is the main ingredient of bread?",
    "Who was the first person on the Moon?",
    "What is the square root of 81?",
    "Name a famous river in Africa.",
    "What do bees make?",
    "How long is a marathon?",
    "What is the currency of Japan?",
    "Give an example of a renewable energy source.",
    "What is an atom?",
    "How can I learn to play the guitar?",
    "What language is spoken in Brazil?",
    "Why do leaves change color in autumn?",
    "What is the freezing point of water in Celsius?",
    "Write a short sentence about a cat.",
    "What is the function of the heart?",
    "What is inflation in economics?",
    "How many legs does a spider have?",
    "What is the largest ocean on Earth?",
    "Suggest a healthy breakfast.",
    "What is the purpose of a computer's memory?",
    "Who discovered penicillin?",
    "What should I pack for a day at the beach?",
)
