"""Loads a checkpoint folder with the exporter of its kind, which is chosen by the architecture in config.json."""

from pathlib import Path

from export.kinds.decoder import DecoderExporter
from export.kinds.encoder import EncoderExporter
from export.kinds.encoder_decoder import EncoderDecoderExporter
from export.kinds.exporter import Exporter, Options
from models.checkpoints.own import CONFIG
from models.folders.folder import present, read_settings

KINDS: tuple[type[Exporter], ...] = (EncoderDecoderExporter, DecoderExporter)


def load(checkpoint: Path, options: Options) -> Exporter:
    """Load a checkpoint. Raises CheckpointError for an invalid folder, and ExportError for options that its kind does not support.

    A checkpoint with an architecture that no other exporter lists is loaded as an encoder, whose config.json may be in a subfolder.
    """
    settings = read_settings(checkpoint / CONFIG) if present(checkpoint / CONFIG) else None
    named = [] if settings is None else settings.get("architectures", [])
    kind = next((kind for kind in KINDS if named and named[0] in kind.architectures), EncoderExporter)
    return kind(checkpoint, settings, options)
