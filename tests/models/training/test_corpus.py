"""The data folder: texts come back as they were, and their tokens with them."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from models.training.corpus import CorpusError, Tokens, open_tokens, read_texts
from tests.models.training.texts import write_data


def test_tokens_are_the_texts_each_ended(data: Path, tokens: Tokens) -> None:
    tokenizer = Tokenizer.from_file(str(tokens.tokenizer_file))
    texts = list(read_texts(data, "train"))
    expected = [id_ for document in texts for id_ in (*tokenizer.encode(document.text).ids, tokens.end_of_text)]
    assert tokens.train.tolist() == expected
    assert tokens.train_bytes == sum(document.size_bytes for document in texts)


def test_held_out_documents_keep_their_package_and_bytes(data: Path, tokens: Tokens) -> None:
    tokenizer = Tokenizer.from_file(str(tokens.tokenizer_file))
    texts = list(read_texts(data, "held_out"))
    assert len(texts) == len(tokens.held_out)
    for text, document in zip(texts, tokens.held_out, strict=True):
        assert (document.package, document.file, document.size_bytes) == (text.package, text.file, text.size_bytes)
        assert document.tokens[-1] == tokens.end_of_text
        assert tokenizer.decode(document.tokens[:-1].tolist()) == text.text


def test_tokens_are_made_once_and_suffice_without_the_texts(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    before = open_tokens(data, vocab_size=300)
    (data / "texts").rename(tmp_path / "elsewhere")
    after = open_tokens(data, vocab_size=300)
    assert np.array_equal(before.train, after.train)
    with pytest.raises(CorpusError, match="collect text with"):
        open_tokens(data, vocab_size=301)


def test_new_texts_make_old_tokens_invalid(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    folder = open_tokens(data, vocab_size=300).tokenizer_file.parent
    write_data(data)
    assert not folder.exists()


def test_what_was_left_unfinished_is_not_taken_for_tokens(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    (data / "tokens-300.unfinished").mkdir()
    assert len(open_tokens(data, vocab_size=300).train) > 0
    assert not (data / "tokens-300.unfinished").exists()


@pytest.mark.parametrize("vocab_size", [256, 65_537])
def test_vocabularies_that_do_not_fit(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(CorpusError, match=f"vocab_size={vocab_size}"):
        open_tokens(tmp_path, vocab_size=vocab_size)
