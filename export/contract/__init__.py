"""The interface between export and service: one directory, the bundle, described by its `manifest.json`.

    NAME/
      manifest.json       all fields of `Manifest`
      model.onnx          the graph (and model.onnx.data if the weights are in a second file)
      tokenizer.json      the `tokenizers` file of the checkpoint, unchanged
      golden.json         texts with torch's outputs for them
      short.onnx          optional: a second graph for short texts, with the same weights
      attention.onnx      optional: a second graph that returns attention matrices, with the same weights
      gpu.onnx            optional: a second graph for GPUs, with weights of its own

The manifest has the sha256 of every other file. The fingerprint is the hash of these hashes and of the manifest's other fields, so it
changes if any byte of the bundle changes. `service` imports only this folder of `export`, so it imports no library larger than pydantic.

`names.py` (files and tensors), `tensors.py` (kinds, limits, tensors, states), `retrieval.py` (encoders for search), `interfaces.py`
(inputs and outputs of every graph),
`manifest.py`, `golden.py`, `contradictions.py` (between fields of a manifest), `hashing.py` (reads and checks a bundle).
"""

from export.contract.contradictions import *  # noqa: F403  # this folder's names are read as `contract.NAME`
from export.contract.golden import *  # noqa: F403
from export.contract.hashing import *  # noqa: F403
from export.contract.interfaces import *  # noqa: F403
from export.contract.manifest import *  # noqa: F403
from export.contract.names import *  # noqa: F403
from export.contract.retrieval import *  # noqa: F403
from export.contract.tensors import *  # noqa: F403
