"""Which of ONNX Runtime's providers computes each node of a graph."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort

RECORD = "session.record_ep_graph_assignment_info"  # the session option without which ONNX Runtime does not tell


def assigned(session: "ort.InferenceSession") -> Counter[tuple[str, str]]:
    """Return the number of nodes of each (provider, operator). The session needs the option RECORD."""
    return Counter((part.ep_name, node.op_type) for part in session.get_provider_graph_assignment_info() for node in part.get_nodes())


def elsewhere(session: "ort.InferenceSession", provider: str) -> dict[str, int]:
    """Return the number of nodes of each operator that `provider` does not compute."""
    return {operator: n for (where, operator), n in sorted(assigned(session).items()) if where != provider}
