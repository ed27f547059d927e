"""Computes attention maps of a text in torch from a checkpoint folder, even if the model cannot be exported."""

from pathlib import Path

import torch

from export.contract import LONGEST_ATTENTION
from export.kinds.exporter import Options
from export.kinds.load import load
from export.maps.heatmaps import Maps, tokens_of
from models.maps.model import attention_maps


def maps_of_checkpoint(checkpoint: Path, text: str) -> Maps:
    """Return the attention maps of `text`. Raises CheckpointError for an invalid folder, and ExportError if the model has no maps or the
    text is too long or empty."""
    loaded = load(checkpoint, Options())
    model = loaded.map_model()
    ids, tokens = tokens_of(loaded.source.tokenizer_file, text, longest=min(LONGEST_ATTENTION, loaded.max_tokens))
    maps = attention_maps(model, torch.tensor([ids]))
    return Maps(tokens, tuple(each.layer for each in maps), tuple(each.A.float().numpy() for each in maps))
