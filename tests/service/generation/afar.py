"""The form that decoders have on GPUs, on the device that the CPU is to ONNX Runtime, and kept to what a GPU does with host memory."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from service.runtime.onnx import open_graph


class Bound(ort.IOBinding):
    """What is bound from the host is what it was then: what has changed since must be bound again."""

    def __init__(self, session: "Afar") -> None:
        super().__init__(session)
        self._names = session.from_host

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self._names.append(name)
        super().bind_cpu_input(name, array.copy())


class Afar(ort.InferenceSession):
    """A session whose device is not the host."""

    from_host: list[str]  # the names of inputs that came from there

    def io_binding(self) -> Bound:
        return Bound(self)


def open_afar(graph: Path | bytes, **options: Any) -> Afar:
    session = open_graph(graph, **options)
    session.__class__, session.from_host = Afar, []
    return session
