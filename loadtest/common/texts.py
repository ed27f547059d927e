"""Makes texts for measurements from random words. Two texts are almost never equal, so the service's cache answers almost none of them.

Every word is one token of BERT's vocabulary, so a text of n words has n + 2 tokens, with [CLS] and [SEP]. For benchmarks, all words have
the same probability, and the lengths of the texts are given. The clients of a load test send realistic texts: words by Zipf's law
(1 / rank), and lengths by the log-normal distribution (many short texts and a few long ones). Their shortest texts are sometimes equal.
"""

import itertools
import keyword
import random
from dataclasses import dataclass
from math import log

_COMMON = """
able across action allow alone among amount appear around art baby bag bar base battle bear beautiful become begin behind bell big
bird birth block blue board boat body border both bottle bottom boy branch bridge bright brother build burn bus busy cabin call camp
capital car carry cat cause cell center chain chance charge chart check church claim class clear cloud coal cold collect common
company contain cook cool copper copy corn cotton count country couple course cover cow cut dance dark daughter deep depend desert
design develop distance divide dollar down draw dream drink drop dry during each ear early earth eat edge eight empty end engine equal
ever exact factor fall family famous farm fast father fear feed feel few field fight fill film fine finish fire fish fit five flat
floor flow flower force form found free fresh friend front fruit gas general gentle girl gold grand gray green group grow guide gun
hard head hear heart heat heavy help high hold hole home horse hotel hour hundred hunt ice idea industry insect joy judge jump june
just key kind knee know lady lake land large late lead learn lemon length letter level library line list listen live local love
machine main major make market match matter may mean metal method middle might million mind mine miss money morning most mother motion
move much music name nation near neck new night noise noon notice now number object observe office old one open operate opposite organ
original outside own palace past path people period plane plant please point poor position present press print problem product proper
prove race rain range reach reason region reply report rice rich ride rise river room root round sail salt same sand save scale search
seat seem segment select send sense separate serve settle seven shape share sharp shoe shop should show sign silent silver simple sing
single sister sit six sky small smell smile snow soil solution son song soon special spell stand star state step still stone story
stream student study success sugar suit sun supply swim system take talk tall team teeth tell term thing think third throw thus time
tiny together tone town trade train tree triangle try turn twelve twenty two uncle under until usual valley value visit voice wait
walk want war warm water week weight wide wife wild will word world wrong yellow yes young
"""
WORDS = tuple(_COMMON.split())

SHORT_WORDS = 14  # 16 tokens with [CLS] and [SEP]
# (how many of 100 texts, fewest words, most words). Most texts are short; the mean is 52 tokens.
BANDS = ((60, 6, 30), (25, 31, 90), (15, 91, 220))
MIX = tuple(round(fewest + (most - fewest) * i / (count - 1)) for count, fewest, most in BANDS for i in range(count))


def short(count: int, seed: str) -> list[str]:
    """Return texts of SHORT_WORDS words. The same seed gives the same texts."""
    draw = random.Random(f"short {seed}")
    return [sentence(draw, SHORT_WORDS) for _ in range(count)]


def mixed(count: int, seed: str) -> list[str]:
    """Return texts of 6 to 220 words. Every 100 consecutive texts have the lengths of MIX in random order, so all servers get the same
    mix."""
    draw = random.Random(f"mixed {seed}")
    lengths: list[int] = []
    while len(lengths) < count:
        lengths += draw.sample(MIX, len(MIX))
    return [sentence(draw, n_words) for n_words in lengths[:count]]


def sentence(draw: random.Random, n_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=n_words))


# Realistic texts -------------------------------------------------------------------------------------------------------------------------

_CUMULATIVE = tuple(itertools.accumulate(1 / rank for rank in range(1, len(WORDS) + 1)))
_SENTENCE_WORDS = (5, 22)
_NAMES = tuple(word for word in WORDS if not keyword.iskeyword(word))


@dataclass(frozen=True)
class Length:
    """A log-normal distribution of word counts. `sigma` is the standard deviation of their logarithm. Counts below `fewest` or above `most`
    are set to that limit."""

    median: float
    sigma: float
    fewest: int
    most: int

    def draw(self, draw: random.Random) -> int:
        return min(max(round(draw.lognormvariate(log(self.median), self.sigma)), self.fewest), self.most)


QUERY = Length(median=8, sigma=0.5, fewest=3, most=40)
PASSAGE = Length(median=80, sigma=0.6, fewest=10, most=400)
DOCUMENT = Length(median=3000, sigma=0.5, fewest=1000, most=12_000)
MESSAGE = Length(median=25, sigma=0.8, fewest=2, most=300)


def words(draw: random.Random, n_words: int) -> str:
    """Return `n_words` words without punctuation."""
    return " ".join(draw.choices(WORDS, cum_weights=_CUMULATIVE, k=n_words))


def prose(draw: random.Random, n_words: int) -> str:
    """Return `n_words` words in sentences."""
    drawn, sentences = draw.choices(WORDS, cum_weights=_CUMULATIVE, k=n_words), []
    while drawn:
        size = draw.randint(*_SENTENCE_WORDS)
        sentence, drawn = drawn[:size], drawn[size:]
        sentences.append(" ".join(sentence).capitalize() + ".")
    return " ".join(sentences)


def code(draw: random.Random) -> str:
    """Return the beginning of a Python function for code decoders: a signature, a docstring and sometimes lines of the body."""
    name, *arguments = draw.sample(_NAMES, draw.randint(2, 4))
    lines = [f"def {name}({', '.join(arguments)}):", f'    """{prose(draw, QUERY.draw(draw))}"""']
    lines += [
        f"    {draw.choice(_NAMES)} = {draw.choice(arguments)} {draw.choice('+-*')} {draw.randint(0, 99)}"
        for _ in range(draw.choice((0, 0, 1, 3, 8)))
    ]
    return "\n".join(lines) + "\n"
