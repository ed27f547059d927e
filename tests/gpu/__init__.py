"""What only a GPU can show. Tests of other folders that run on one too carry the same marks."""

import onnxruntime as ort
import pytest

from service.runtime.onnx import CUDA

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="this onnxruntime has no CUDA (docs/gpu.md)"),
]
