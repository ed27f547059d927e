"""Computes attention maps of a text, with a bundle that has an attention graph, or with a checkpoint folder in torch.

torch is imported only for a checkpoint.
"""

from pathlib import Path

import numpy as np

from export import contract
from export.checks.parity import open_graph
from export.errors import ExportError
from export.maps.heatmaps import Maps, tokens_of


def maps_of_bundle(bundle: Path, text: str) -> Maps:
    """Return the attention maps of `text`. Raises BundleError for a damaged bundle, and ExportError without an attention graph or a fitting
    text.
    """
    manifest = contract.verify(bundle)
    graph = manifest.attention_graph
    if graph is None:
        raise ExportError(f"{bundle} {contract.no_attention_graph(manifest)}")
    ids, tokens = tokens_of(bundle / contract.TOKENIZER, text, longest=graph.max_tokens)
    A = open_graph(bundle / graph.file).run(None, {contract.INPUT_IDS: np.array([ids], np.int64)})
    return Maps(tokens, tuple(layer.attention for layer in graph.layers), tuple(A))


def maps_of_checkpoint(checkpoint: Path, text: str) -> Maps:
    """Return the attention maps of `text`, even if the model cannot be exported. Raises CheckpointError for an invalid folder, and
    ExportError if the model has no maps or the text is too long or empty.
    """
    import torch

    from export.kinds.exporter import Options
    from export.kinds.load import load
    from models.maps.model import attention_maps

    loaded = load(checkpoint, Options())
    longest = min(contract.LONGEST_ATTENTION, loaded.max_tokens)
    ids, tokens = tokens_of(loaded.source.tokenizer_file, text, longest=longest)
    maps = attention_maps(loaded.map_model(), torch.tensor([ids]))
    return Maps(tokens, tuple(each.layer for each in maps), tuple(each.A.float().numpy() for each in maps))
