"""onnxruntime computes what torch computes, for the layers of encoders, for the causal layers whose state grows, and for those with a
running maximum at the edges of its chunks. Causal layers with a state of constant size are in graphs/test_decoder_step.py.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.comparison import layer_graph
from models.attention.layers.running_max import CHUNK, GROUP
from models.layers import LAYERS

SAME = 1e-4  # float32 on both sides, sums in another order
D, H = 16, 2
LARGEST_N = 100
EXAMPLE = (3, 7)  # B, N with which a graph is traced; sizes of 1 would be taken for constants
SIZES = [(1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, LARGEST_N)]

# Whole encoders with these are exported elsewhere: a Reformer, BERT, the student of tests/bundles.py, DeBERTa, test_every_attention.py.
ELSEWHERE = {"lsh", "softmax", "hybrid", "disentangled", "linear", "differential"}
BOTH_WAYS = [name for name, layer in LAYERS.items() if not layer.capabilities.causal and name not in ELSEWHERE]
# One layer of each form of graph; `make test-all` has the others too.
FORMS = {"cosine", "longformer", "bigbird", "vq", "flash", "synthesizer", "performer"}
FORMS |= {"causal_softmax", "causal_lsh", "causal_synthesizer", "causal_sparse"}
GROWING = [name for name, layer in LAYERS.items() if layer.capabilities.causal and layer.capabilities.state != "constant"]
FEWER_ROUNDS = {"nystromformer": {"n_iterations": 2}, "lsh": {"n_rounds": 2}}  # each is written out in the graph


class Together(nn.Module):
    """Layers that all see the same tokens, as one layer, which needs one export. Their outputs are stacked: (layers, B, N, D)."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: LAYERS[name](D, H, **options(name)) for name in names})
        self.capabilities = LAYERS[names[0]].capabilities
        shapes = {name: layer.state_shapes for name, layer in self.layers.items() if self.capabilities.causal}
        self.state_shapes = {f"{name}_{tensor}": shape for name, each in shapes.items() for tensor, shape in each.items()}

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        answers = {name: layer(x, mask) for name, layer in self.layers.items()}
        if not self.capabilities.causal:
            return torch.stack([*answers.values()])
        states = {f"{name}_{tensor}": value for name, (_, state) in answers.items() for tensor, value in state.items()}
        return torch.stack([y for y, _ in answers.values()]), states

    def opened(self, file: Path, monkeypatch: pytest.MonkeyPatch, *, longest: int) -> ort.InferenceSession:
        monkeypatch.setattr(layer_graph, "EXAMPLE", EXAMPLE)
        layer_graph.write(self.eval(), file, d_model=D, longest=longest)
        return ort.InferenceSession(file, providers=["CPUExecutionProvider"])

    def differences(self, session: ort.InferenceSession, x: Tensor, mask: Tensor) -> dict[str, float]:
        """Those of the graph from torch that are too large, by layer or state. The output at padding is not compared, the state is."""
        with torch.no_grad():
            answer = self(x, mask)
        expected, states = answer if isinstance(answer, tuple) else (answer, {})
        y, *after = session.run(None, feed(x, mask))
        found = {name: np.abs(a - b)[mask.numpy()].max() for name, a, b in zip(self.layers, y, expected.numpy(), strict=True)}
        for (name, want), got in zip(states.items(), after, strict=True):
            found[name] = np.abs(got - want.numpy()).max(initial=0) / max(1.0, float(want.abs().max()) if want.numel() else 0.0)
        return {name: float(error) for name, error in found.items() if not error <= SAME}


def feed(x: Tensor, mask: Tensor) -> dict[str, Any]:
    return {"x": x.numpy(), "mask": mask.long().numpy()}


def options(name: str) -> dict[str, Any]:
    positions = {"n_positions": LARGEST_N} if "n_positions" in inspect.signature(LAYERS[name]).parameters else {}
    return {**LAYERS[name].examples.small, **positions, **FEWER_ROUNDS.get(name, {})}


@pytest.mark.parametrize(
    "names",
    [
        [name for name in BOTH_WAYS if name in FORMS],
        [name for name in GROWING if name in FORMS],
        *(pytest.param([name], marks=pytest.mark.exhaustive) for name in ("lsh", *BOTH_WAYS, *GROWING) if name not in FORMS),
    ],
    ids="-".join,
)
def test_layers_and_their_states_at_every_size(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding and, where there is more than one row, a row of padding only."""
    layers = Together(names)
    session = layers.opened(tmp_path / "layers.onnx", monkeypatch, longest=LARGEST_N)
    assert [output.name for output in session.get_outputs()] == ["y", *(f"state_{tensor}" for tensor in layers.state_shapes)]
    wrong = {}
    for B, N in SIZES:
        x, mask = torch.randn(B, N, D), torch.arange(N) < torch.tensor([N, 0, (N + 1) // 2])[:B, None]
        wrong |= {(B, N, name): error for name, error in layers.differences(session, x, mask).items()}
    assert wrong == {}


def test_a_running_maximum_at_every_edge_of_chunks_and_of_their_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is traced with less than a chunk. Keys grow, so that every chunk has a new maximum; and they fall, so that none has."""
    layers, block, wrong = Together(["causal_efficient"]), CHUNK * GROUP, {}
    session = layers.opened(tmp_path / "layers.onnx", monkeypatch, longest=4 * block)
    for N in (1, CHUNK - 1, CHUNK, CHUNK + 1, block - 1, block, block + 1, 3 * block + CHUNK + 1):
        growth, half = torch.linspace(0.1, 3, N)[:, None], (N + 1) // 2
        x = torch.randn(3, N, D) * torch.stack([growth, growth.flip(0), growth])
        mask = torch.arange(N) < torch.tensor([N, N, half])[:, None]
        wrong |= {(N, name): error for name, error in layers.differences(session, x, mask).items()}
        y, alone = (session.run(["y"], feed(a, b))[0] for a, b in ((x, mask), (x[2:, :half], mask[2:, :half])))
        assert np.abs(y[:, 2:, :half] - alone).max() <= SAME, N  # neither padding nor the other rows
    assert wrong == {}
