"""Loads the teacher of a decoder: a checkpoint folder, or a GGUF file, which is unpacked to a temporary folder."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from models.checkpoints.decoder import DecoderCheckpoint, load_decoder
from models.checkpoints.gguf.file import gguf_file
from models.checkpoints.gguf.unpack import unpack
from models.folders.folder import read_tokenizer


def load_teacher(path: Path) -> tuple[DecoderCheckpoint, Tokenizer]:
    """Return the decoder and its tokenizer. Raises CheckpointError if `path` is neither a checkpoint folder nor a GGUF file."""
    if (gguf := gguf_file(path)) is None:
        checkpoint = load_decoder(path)
        return checkpoint, read_tokenizer(checkpoint.tokenizer_file)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / gguf.stem
        unpack(gguf, folder)
        checkpoint = load_decoder(folder)
        return checkpoint, read_tokenizer(checkpoint.tokenizer_file)
