"""A checkpoint folder is loaded by the exporter of its kind, which the architecture in config.json decides."""

from pathlib import Path

from export.kinds.decoder import DecoderExporter
from export.kinds.encoder import EncoderExporter
from export.kinds.encoder_decoder import EncoderDecoderExporter
from export.kinds.exporter import Exporter, Options
from models.checkpoints.decoder import CONFIG
from models.folders.folder import present, read_settings

KINDS: tuple[type[Exporter], ...] = (EncoderDecoderExporter, DecoderExporter)


def load(checkpoint: Path, options: Options) -> Exporter:
    """Raises CheckpointError for the folder, ExportError for options that are not for its kind.

    Every other architecture is an encoder's, and the config.json of an encoder may be in a subfolder.
    """
    settings = read_settings(checkpoint / CONFIG) if present(checkpoint / CONFIG) else None
    named = [] if settings is None else settings.get("architectures", [])
    kind = next((kind for kind in KINDS if named and named[0] in kind.architectures), EncoderExporter)
    return kind(checkpoint, settings, options)
