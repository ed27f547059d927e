"""The graph for GPUs computes what torch computes with padding. A CPU computes it here by the graph's twin."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from export import contract
from export.gpu.cpu_twin import write_cpu_twin
from export.gpu.packed_encoder import unsupported
from export.graphs.onnx_file import describe
from models.encoder.heads import SentenceEncoder, SequenceClassifier, TokenClassifier
from models.encoder.model import Encoder, EncoderConfig
from service.encoding.gpu import session as packed
from service.encoding.gpu.session import PackedSession
from service.runtime.onnx import CPU
from tests.export.gpu.variants import MAX_TOKENS, SMALL, VOCABULARY, encoder_graph, random_classifier, random_encoder

SAME = 1e-6  # largest difference of a number of a vector of length 1, in float32 on both sides, summed in another order
NEVER = 1  # an id that no text has; its embedding is not a number
FORMS = ("bert", "rotary", "classifier", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("roberta", "sinusoidal")))

Texts = list[list[int]]
texts = st.lists(st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=MAX_TOKENS), min_size=1, max_size=50)


class Both:
    """A model, and a session of its graph for GPUs on a CPU."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = random_classifier() if name == "classifier" else random_encoder(name)
        with torch.no_grad():
            self.model.encoder.embeddings.tokens.weight[NEVER] = torch.nan
        graph = encoder_graph(self.model)
        graph.export(folder / "gpu.onnx", weights_beside=True)
        write_cpu_twin(folder / "gpu.onnx", folder / "twin.onnx")
        described = describe(folder / "twin.onnx", graph.inputs, graph.outputs, "")
        gpu = contract.GpuGraph(graph=described, pooling=self.model.pooling, min_cosine=1, largest=1)
        self.session = PackedSession(folder / "twin.onnx", gpu, max_tokens=MAX_TOKENS, most_tokens=1024, provider=CPU)

    def padded(self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> np.ndarray:
        """What torch computes of padded rows."""
        N = max(map(len, ids))
        rows = [torch.tensor([[*row, *[0] * (N - len(row))] for row in rows]) for rows in (ids, [[1] * len(row) for row in ids], types)]
        with torch.inference_mode():
            answer = self.model(*rows)
        return (answer if isinstance(self.model, SequenceClassifier) else answer.embedding).numpy()

    def difference(self, ids: Texts) -> float:
        """The largest difference between the packed and the padded computation."""
        types = [[int(at > len(row) // 2) for at in range(len(row))] for row in ids]
        if not isinstance(self.model, SequenceClassifier):
            types = [[0] * len(row) for row in ids]
        name = self.session.outputs[0]
        got, want = self.session.run([name], ids, types)[name], self.padded(ids, types)
        return float(np.abs(got - want).max() / max(1, np.abs(want).max()))


@pytest.fixture(scope="module", params=FORMS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(request.param, tmp_path_factory.mktemp(request.param))


@settings(max_examples=20, deadline=None)
@given(ids=texts)
def test_packed_equals_padded(both: Both, ids: Texts) -> None:
    assert both.difference(ids) <= SAME


def test_the_packing_matters(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts' ends one token too early or too late, or a wrong position, show in the vectors."""
    ids = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
    pack = packed.pack
    rotated = "full" in both.model.encoder.rotations  # the scores of rotary positions depend on differences of positions only

    for name, change in ((contract.CU_SEQLENS, 1), (contract.CU_SEQLENS, -1), *([(contract.POSITION_IDS, 1)] * (not rotated))):

        def changed(arrays, *arguments, name=name, change=change) -> None:
            pack(arrays, *arguments)
            arrays[name][1:] += change

        monkeypatch.setattr(packed, "pack", changed)
        assert both.difference(ids) > 1000 * SAME, (name, change)


def test_padding_reaches_no_vector(both: Both) -> None:
    """Even if what is computed for it is not a number."""
    ids = [[5, 6, 7], [8, 9]]
    name = both.session.outputs[0]
    before = both.session.run([name], ids, None)[name]
    bound = both.session.bound(0)
    bound.arrays[contract.INPUT_IDS][5:] = NEVER
    bound.arrays[contract.POSITION_IDS][5:] = 3
    after = bound([name])[name][:2]
    assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SentenceEncoder(Encoder(EncoderConfig(**SMALL, attention="linear")), pooling="mean"), "its attention is 'linear'"),
        (SentenceEncoder(Encoder(EncoderConfig(**SMALL, windows=(None, 3))), pooling="mean"), "windows"),
        (SentenceEncoder(Encoder(EncoderConfig(**SMALL, n_relative_buckets=8)), pooling="mean"), "a bias for each distance"),
        (SentenceEncoder(Encoder(EncoderConfig(**SMALL)), pooling="max"), "its pooling is 'max'"),
        (TokenClassifier(Encoder(EncoderConfig(**SMALL)), n_labels=2), "one output for each text"),
    ],
    ids=["linear", "windows", "biases", "max", "tokens"],
)
def test_what_has_no_graph_for_gpus_says_why(model: nn.Module, reason: str) -> None:
    assert reason in (unsupported(model) or "")
