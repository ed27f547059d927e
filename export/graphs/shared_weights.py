"""Lets a bundle's second graph (for short texts, for attention) use the weight file of the first, so that every weight is stored once."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model

from export.graphs.onnx_file import weight_file

LEAST_BYTES = 1024  # smaller tensors are stored in both graphs


def share(file: Path, served: Path) -> None:
    """Rewrite the graph `file` to use equal tensors in the weight file of the graph `served`, of the same folder later; the others are
    stored in it.
    """
    places = dict(_tensors_beside(served))
    model = onnx.load(file, load_external_data=False)
    load_external_data_for_model(model, str(file.parent))
    for tensor in model.graph.initializer:
        place = places.get(_digest(tensor.raw_data)) if len(tensor.raw_data) >= LEAST_BYTES else None
        if place is not None:
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=str(value)) for key, value in place.items())
    weight_file(file).unlink(missing_ok=True)
    file.write_bytes(model.SerializeToString())


def _tensors_beside(graph: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for every tensor in a graph's weight file, the hash of its bytes and its location in that file."""
    data = weight_file(graph)
    if not data.is_file():
        return
    with data.open("rb") as stream:
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                info = ExternalDataInfo(tensor)
                stream.seek(info.offset or 0)
                yield _digest(stream.read(info.length)), {"location": data.name, "offset": info.offset or 0, "length": info.length}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
