"""Attention maps of a text from a checkpoint folder, computed in torch: also where no bundle can be made of it."""

from pathlib import Path

import torch

from export.contract import LONGEST_ATTENTION
from export.errors import ExportError
from export.kinds.decoder import is_decoder
from export.maps.heatmaps import Maps, tokens_of
from models.checkpoints.decoder import load_decoder
from models.checkpoints.published import UNLIMITED, load_checkpoint
from models.decoder.model import Decoder
from models.encoder.model import Encoder
from models.maps.model import attention_maps


def maps_of_checkpoint(checkpoint: Path, text: str) -> Maps:
    """Of an encoder's or a decoder's folder. Raises CheckpointError for the folder, ExportError for a text that is too long or empty."""
    model: Encoder | Decoder
    if is_decoder(checkpoint):
        decoder = load_decoder(checkpoint)
        model, file, longest = decoder.model, decoder.tokenizer_file, min(LONGEST_ATTENTION, decoder.config.n_positions or UNLIMITED)
    else:
        encoder = load_checkpoint(checkpoint)
        if not isinstance(encoder.model.encoder, Encoder):
            raise ExportError(f"{encoder.architecture} has no attention maps: its blocks are not those of an encoder")
        model, file, longest = encoder.model.encoder, encoder.tokenizer_file, min(LONGEST_ATTENTION, encoder.max_tokens)
    ids, tokens = tokens_of(file, text, longest=longest)
    maps = attention_maps(model, torch.tensor([ids]))
    return Maps(tokens, tuple(each.layer for each in maps), tuple(each.A.float().numpy() for each in maps))
