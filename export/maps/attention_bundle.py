"""Writes the attention graph of a bundle, which shares the served graph's weights, and compares it with torch."""

from pathlib import Path

import numpy as np
import torch

from export import contract
from export.checks.parity import open_graph
from export.errors import ExportError
from export.graphs.shared_weights import share
from export.maps.attention_graph import trace_maps
from models.decoder.model import Decoder
from models.encoder.model import Encoder
from models.layers import LAYERS
from models.maps.model import attention_maps

TOLERANCE = 1e-4  # largest error of an attention weight; both compute in float32 and sum in different orders


def add_attention_graph(
    model: Encoder | Decoder, folder: Path, scratch: Path, *, max_tokens: int, vocab_size: int
) -> contract.AttentionGraph:
    """Write the attention graph into `folder`, beside the served graph.

    Raises ExportError if an attention weight differs from torch's by more than TOLERANCE.
    """
    longest = min(max_tokens, contract.LONGEST_ATTENTION)
    traced, file = scratch / contract.ATTENTION_GRAPH, folder / contract.ATTENTION_GRAPH
    trace_maps(model, traced, longest=longest)
    share(traced, folder / contract.GRAPH)
    traced.rename(file)
    session, random = open_graph(file), np.random.default_rng(0)
    largest = 0.0
    for N in dict.fromkeys(min(N, longest) for N in (1, 2, 17, longest)):
        ids = random.integers(0, vocab_size, (1, N))
        wanted, got = attention_maps(model, torch.from_numpy(ids)), session.run(None, {contract.INPUT_IDS: ids})
        if (found := [A.shape for A in got]) != (shapes := [tuple(each.A.shape) for each in wanted]):
            raise ExportError(f"the attention graph gives {found} at N={N}, but the model {shapes}")
        error = max(float(np.abs(each.A.float().numpy() - A).max()) for each, A in zip(wanted, got, strict=True))
        if not error <= TOLERANCE:  # not written as `error > TOLERANCE`, which is false for NaN
            raise ExportError(f"at N={N} a weight of the attention graph differs from torch's by {error:.3g}; the limit is {TOLERANCE:g}")
        largest = max(largest, error)
    layers = tuple(
        contract.AttentionLayer(attention=each.layer, heads=len(each.A), effective=LAYERS[each.layer].capabilities.effective)
        for each in wanted
    )
    return contract.AttentionGraph(file=file.name, layers=layers, max_tokens=longest, max_abs_error=largest)
