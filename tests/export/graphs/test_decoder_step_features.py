"""The step graph keeps its bits with every feature map of linear attention and every kernel of the Performer."""

from pathlib import Path

import pytest

from export.checks.decoder_parity import Steps, compare, inexact
from export.checks.parity import answers, open_graph
from export.graphs.decoder_step import step_graph, trace
from export.graphs.onnx_file import optimise
from models.attention.linear.feature_maps import FEATURE_MAPS
from models.attention.linear.random_features import KERNELS
from tests.decoders import random_decoder

VOCAB = 61
CHOICES = [("causal_linear", "feature_map", name) for name in FEATURE_MAPS if name != "elu"]
CHOICES += [("causal_performer", "kernel", name) for name in KERNELS if name != "positive"]  # the defaults: test_decoder_step.py


@pytest.mark.parametrize(("layer", "option", "choice"), CHOICES)
def test_same_numbers_as_torch_and_the_same_bits_however_cut(layer: str, option: str, choice: str, tmp_path: Path) -> None:
    decoder = random_decoder(vocab_size=VOCAB, layers=layer, layer_options={layer: {option: choice}})
    trace(decoder, tmp_path / "traced.onnx")
    file = optimise(tmp_path / "traced.onnx", tmp_path / "optimised")
    graph = step_graph(decoder)
    inputs, outputs = graph.inputs, graph.outputs

    def steps(threads: int = 1) -> Steps:
        return Steps(answers(open_graph(file, threads=threads), outputs), inputs)

    compare(steps(), Steps(graph.answer, inputs), vocab_size=VOCAB)
    assert inexact(steps, vocab_size=VOCAB) is None
