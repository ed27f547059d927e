"""One read of config.json decides the kind of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from export.errors import ExportError
from export.kinds.decoder import DecoderExporter
from export.kinds.encoder import EncoderExporter
from export.kinds.encoder_decoder import EncoderDecoderExporter
from export.kinds.exporter import Exporter, Options
from export.kinds.load import load
from models.folders import folder
from models.folders.folder import CheckpointError
from tests.checkpoints import tiny_encoder
from tests.decoders import tiny_decoder
from tests.encoder_decoders import KINDS, tiny_encoder_decoder

CHECKPOINTS = {
    EncoderExporter: tiny_encoder,
    DecoderExporter: tiny_decoder,
    EncoderDecoderExporter: lambda out: tiny_encoder_decoder(out, KINDS[0]),
}


@pytest.mark.parametrize("kind", CHECKPOINTS, ids=lambda kind: kind.__name__)
def test_the_kind_is_decided_by_one_read(kind: type[Exporter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = CHECKPOINTS[kind](tmp_path / "checkpoint")
    read: list[Path] = []
    original = folder._read_json

    def counted(file: Path, most_bytes: int) -> Any:
        read.append(file)
        return original(file, most_bytes)

    monkeypatch.setattr(folder, "_read_json", counted)
    loaded = load(checkpoint, Options())
    assert type(loaded) is kind
    assert read.count(checkpoint / "config.json") == 1


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(tmp_path, Options())


def test_an_encoder_decoder_has_no_attention_maps(tmp_path: Path) -> None:
    loaded = load(tiny_encoder_decoder(tmp_path / "checkpoint", KINDS[0]), Options())
    with pytest.raises(ExportError, match="has no attention maps"):
        loaded.map_model()
