"""Attention maps of a text from a checkpoint folder, computed in torch: also of a model that cannot be exported."""

from pathlib import Path

import torch

from export.contract import LONGEST_ATTENTION
from export.kinds.exporter import Options
from export.kinds.load import load
from export.maps.heatmaps import Maps, tokens_of
from models.maps.model import attention_maps


def maps_of_checkpoint(checkpoint: Path, text: str) -> Maps:
    """Raises CheckpointError for the folder, ExportError for a model without maps and for a text that is too long or empty."""
    loaded = load(checkpoint, Options())
    model = loaded.map_model()
    ids, tokens = tokens_of(loaded.source.tokenizer_file, text, longest=min(LONGEST_ATTENTION, loaded.max_tokens))
    maps = attention_maps(model, torch.tensor([ids]))
    return Maps(tokens, tuple(each.layer for each in maps), tuple(each.A.float().numpy() for each in maps))
