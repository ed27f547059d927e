"""The step graph keeps its bits with every feature map of linear attention and every kernel of the Performer."""

from pathlib import Path

import pytest

from export.checks.decoder_parity import Steps, compare, inexact
from export.checks.parity import answers, open_graph
from export.graphs.decoder_step import step_graph, trace
from export.graphs.onnx_file import optimise
from models.attention.linear.feature_maps import FEATURE_MAPS
from models.attention.linear.random_features import KERNELS
from models.layers import LAYERS
from tests.decoders import random_decoder

VOCAB = 61
CHOICES = [("causal_linear", "feature_map", name) for name in FEATURE_MAPS if name != "elu"]
CHOICES += [("causal_performer", "kernel", name) for name in KERNELS if name != "positive"]  # the defaults: test_decoder_step.py


@pytest.mark.parametrize(
    "choices", [CHOICES[-3:-1], pytest.param(CHOICES, marks=pytest.mark.exhaustive)], ids=["two choices", "all choices"]
)
def test_same_numbers_as_torch_and_the_same_bits_however_cut(choices: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """One decoder has a layer of each choice."""
    decoder = random_decoder(vocab_size=VOCAB, layers=tuple(layer for layer, _, _ in choices), n_layers=len(choices))
    for block, (layer, option, choice) in zip(decoder.blocks, choices, strict=True):
        weights = block.layer.state_dict()
        block.layer = LAYERS[layer](decoder.config.d_model, decoder.config.n_heads, **{option: choice}).eval()
        block.layer.load_state_dict({name: weights[name] for name in block.layer.state_dict() if name in weights}, strict=False)
    trace(decoder, tmp_path / "traced.onnx")
    file, graph = optimise(tmp_path / "traced.onnx", tmp_path / "optimised"), step_graph(decoder)

    def steps(threads: int = 1) -> Steps:
        return Steps(answers(open_graph(file, threads=threads), graph.outputs), graph.inputs)

    compare(steps(), Steps(graph.answer, graph.inputs), vocab_size=VOCAB)
    assert inexact(steps, vocab_size=VOCAB) is None
