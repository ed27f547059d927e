"""Computes attention maps of a text with a bundle that has an attention graph. This file imports neither torch nor onnx."""

from pathlib import Path

import numpy as np

from export import contract
from export.checks.parity import open_graph
from export.errors import ExportError
from export.maps.heatmaps import Maps, tokens_of


def maps_of_bundle(bundle: Path, text: str) -> Maps:
    """Return the attention maps of `text`. Raises BundleError for a damaged bundle, and ExportError if the bundle has no attention graph,
    or if the text is too long or empty."""
    manifest = contract.verify(bundle)
    graph = manifest.attention_graph
    if graph is None:
        raise ExportError(f"{bundle} {contract.no_attention_graph(manifest)}")
    ids, tokens = tokens_of(bundle / contract.TOKENIZER, text, longest=graph.max_tokens)
    A = open_graph(bundle / graph.file).run(None, {contract.INPUT_IDS: np.array([ids], np.int64)})
    return Maps(tokens, tuple(layer.attention for layer in graph.layers), tuple(A))
