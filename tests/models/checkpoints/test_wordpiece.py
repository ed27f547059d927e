"""The tokenizer made from vocab.txt gives the ids of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer

from models.checkpoints.wordpiece import wordpiece_tokenizer
from models.folders.folder import CheckpointError
from tests.texts import texts

ODD = (
    "naïve CAFÉ Ünïcödé ÅNGSTRÖM İstanbul ﬁn ２０２４",
    "注意力机制 한국어 カタカナ 𠀀",
    "zero\u200bwidth tab\tnul\x00 soft\u00adhyphen \u2028 line \x85 \ufffd",
    "[CLS] a [MASK] b [SEP] [unused5] [UNK] [PAD]",
    "x" * 101 + " " + "x" * 100,
    "don't stop—it's $9.99…\r\n `code` ~^|<>",
    "",
)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False, "tokenize_chinese_chars": False, "tokenizer_class": "BertTokenizer", "do_basic_tokenize": True},
        {"additional_special_tokens": ["[unused5]"], "mask_token": {"__type": "AddedToken", "content": "[MASK]", "lstrip": True}},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(minilm: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(minilm / "vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = wordpiece_tokenizer(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    sample = [*ODD, *texts()]
    assert len(sample) > 100
    for encoding, text in zip(ours.encode_batch(sample), sample, strict=True):
        assert encoding.ids == theirs(text)["input_ids"], text
    pair = ours.encode("a cat", "the dogs")
    expected = theirs("a cat", "the dogs")
    assert (pair.ids, pair.type_ids) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tokenizer_config.json": {"tokenizer_class": "BertJapaneseTokenizer"}},
            "tokenizer_class='BertJapaneseTokenizer' is not supported",
        ),
        ({"added_tokens.json": {"<new>": 3}}, r"vocab.txt has no token '<new>'"),
        ({"tokenizer_config.json": {"cls_token": "<s>"}}, r"vocab.txt has no token '<s>'"),
    ],
)
def test_what_vocab_txt_does_not_determine_is_refused(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        wordpiece_tokenizer(tmp_path)
