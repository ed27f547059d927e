"""One read of config.json decides the kind of a checkpoint."""

import json
from pathlib import Path

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
    original = folder.read_text

    def counted(file: Path, most_bytes: int) -> str:
        read.append(file)
        return original(file, most_bytes)

    monkeypatch.setattr(folder, "read_text", counted)
    loaded = load(checkpoint, Options())
    assert type(loaded) is kind
    assert read.count(checkpoint / "config.json") == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".", r"config\.json is missing"),
        ("there/model", r"there is no folder model in .*there; check the path$"),
        ("/nowhere/model", r"there is no folder model in /nowhere; check the path$"),
        ("bert-base-uncased", r"check the path. If bert-base-uncased is an id of the Hugging Face hub, download it"),
        ("BAAI/bge-small-en", r"hf download BAAI/bge-small-en --local-dir bge-small-en\), then give that folder"),
        ("adapter", r"adapter is an adapter \(LoRA\).* Merge it into its base first, .* where base is the model 'a/base' as"),
        ("there/model.safetensors", r"there/model\.safetensors is not a folder; give the folder that has it"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.safetensors").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/base"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load(Path(path), Options())


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "FalconForCausalLM", "T5ForConditionalGeneration"])
def test_a_model_that_generates_text_is_refused_with_the_decoders(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(CheckpointError, match=f"'{architecture}' is not supported; supported decoders: AttnserveDecoder, LlamaForCausalLM"):
        load(tmp_path, Options())


def test_an_encoder_decoder_has_no_attention_maps(tmp_path: Path) -> None:
    loaded = load(tiny_encoder_decoder(tmp_path / "checkpoint", KINDS[0]), Options())
    with pytest.raises(ExportError, match="has no attention maps"):
        loaded.map_model()
