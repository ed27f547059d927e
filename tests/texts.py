"""Texts to try a model and its tokenizer on: many scripts, all lengths, and what users paste by accident. Always the
same ones.

Sentences are words drawn by a seeded generator; they mean nothing, and nobody wrote them.
"""

import random

# script: (its words, what stands between them)
SCRIPTS: dict[str, tuple[str, str]] = {
    "latin": ("the a small red river house walks under bright morning paper and seven engines sing slowly", " "),
    "latin-accents": ("été naïve über Straße señor façade žluťoučký kůň łódź Åse çok güzel đường phố", " "),
    "cyrillic": ("красный дом стоит у реки утром семь машин поют тихо їжак живе біля ріки", " "),
    "greek": ("το μικρό κόκκινο σπίτι στέκει δίπλα στο ποτάμι ήλιος θάλασσα", " "),
    "arabic": ("البيت الأحمر الصغير يقف بجانب النهر في الصباح سبعة كُتُب", " "),
    "hebrew": ("הבית האדום הקטן עומד ליד הנהר בבוקר שבעה סְפָרִים", " "),
    "devanagari": ("छोटा लाल घर नदी के पास सुबह खड़ा है सात पुस्तकें", " "),
    "bengali": ("ছোট লাল বাড়ি নদীর পাশে সকালে দাঁড়িয়ে আছে", " "),
    "tamil": ("சிறிய சிவப்பு வீடு ஆற்றின் அருகில் காலையில் நிற்கிறது", " "),
    "thai": ("บ้าน สีแดง หลังเล็ก อยู่ ริมแม่น้ำ ตอนเช้า เจ็ด เล่ม", ""),
    "chinese": ("小 红 房子 站在 河边 早晨 七 台 机器 唱歌 龘", ""),
    "japanese": ("小さな 赤い 家 が 川 の そば に 立って いる カタカナ", ""),
    "korean": ("작은 빨간 집이 아침에 강가에 서 있다 일곱 권", " "),
    "georgian": ("პატარა წითელი სახლი მდინარის პირას დგას", " "),
    "armenian": ("փոքրիկ կարմիր տունը կանգնած է գետի մոտ", " "),
    "amharic": ("ትንሽ ቀይ ቤት በወንዙ አጠገብ ቆሟል", " "),
}

LENGTHS = (1, 2, 3, 6, 12, 24)  # words
LONG = (90, 200, 256, 600)  # words, in Latin: around and far beyond the 256 tokens of MiniLM

ODD: tuple[str, ...] = (
    # nothing to see
    "",
    " ",
    "\u200b",  # zero-width space
    "\n\t\r ",
    "\u00a0\u2003\ufeff",
    # control characters and direction marks
    "\x00",
    "bell\x07 and null\x00 and escape\x1b[31m red",
    "\u202eright to left\u202c and back",
    "soft\u00adhyphen, word\u2060joiner, replacement\ufffd",
    # emoji: one, a family of one glyph, a flag, a skin tone, keycaps
    "🙂",
    "👨‍👩‍👧‍👦 🇺🇦 👍🏽 1️⃣ ❤️‍🔥",
    "🙂" * 300,
    # one text, two spellings: composed and decomposed
    "café Å ñ",
    "cafe\u0301 A\u030a n\u0303",
    "z̷̢a̶l̵g̸o̶",
    "ﬁ ﬂ ① Ⅷ ½ ㎏ ｆｕｌｌ",
    # words that look like something else
    "[CLS] [SEP] [MASK] [PAD] [UNK]",
    "<s> </s> <pad> <|endoftext|>",
    "https://example.org/a/b?c=d&e=%20#f",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "3.14159 1,000,000 -7 0x1F 12:30 2024-02-29",
    "CamelCaseSnake_case-kebab.case",
    "!!! ??? ... --- *** ((( )))",
    # no place to cut
    "a" * 99,
    "a" * 101,
    "abc" * 2000,
    "漢" * 700,
    # several scripts in one
    "The дом and the σπίτι, 家 and בית, घर and บ้าน",
)


def texts() -> list[str]:
    """All of them, about 130: sentences of every script and length, then long ones, then the odd ones."""
    draw = random.Random(0)
    sentences = [sentence(script, n_words, draw) for script in SCRIPTS for n_words in LENGTHS]
    return sentences + [sentence("latin", n_words, draw) for n_words in LONG] + list(ODD)


def sentence(script: str, n_words: int, draw: random.Random) -> str:
    words, space = SCRIPTS[script]
    return space.join(draw.choices(words.split(), k=n_words)) + draw.choice([".", "?", "!", ""])
