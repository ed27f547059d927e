"""A folder is written and read; what is wrong with one is named."""

import json
from pathlib import Path

import pytest
import torch

from models.encoder_decoder.checkpoint import load_encoder_decoder, save_encoder_decoder
from models.folders.folder import CheckpointError
from tests.models.encoder_decoder.tiny import KINDS, sources, tiny


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(kind: str, tmp_path: Path) -> None:
    model = tiny(kind).float()
    save_encoder_decoder(tmp_path, model, tokenizer="{}", examples=("one",))
    loaded = load_encoder_decoder(tmp_path)
    assert loaded.model.config == model.config
    assert loaded.tokenizer_file.read_text() == "{}"
    previous = torch.tensor([[1, 4, 5]])
    assert loaded.model(*sources(4), previous).equal(model(*sources(4), previous))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported"),
        ({"attnserve_encoder_decoder": {"vocab_size": 3}}, "lacks the field 'begin_token_id'"),
        ({"attnserve_encoder_decoder": {"depth": 3}}, "has 'depth', which is not one of"),
    ],
)
def test_a_config_that_is_none(change: dict, words: str, tmp_path: Path) -> None:
    save_encoder_decoder(tmp_path, tiny("dot").float(), tokenizer="{}", examples=("one",))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        load_encoder_decoder(tmp_path)
