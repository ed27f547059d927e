"""One graph is prefill and decode: it gives torch's numbers, and the same bits however a prompt is cut and whoever is beside it."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from export import contract
from export.checks.decoder_parity import Steps, compare, inexact
from export.checks.parity import Arrays, Feed, answers, open_graph
from export.errors import ExportError
from export.graphs.decoder_operators import with_operators
from export.graphs.decoder_step import step_graph, trace
from export.graphs.onnx_file import optimise
from models.attention.layers.recurrence import chunkwise
from models.decoder.model import Decoder
from tests.cases import in_one_test
from tests.decoders import EVERY_CONSTANT_STATE, SETTLES, random_decoder

CONFIGS = {
    "no positions": {"positions": "none", "norm": "layer", "bias": True, "tied": False, "gated": False, "activation": "gelu"},
    "sinusoids": {
        "positions": "sinusoidal",
        "norm": "scale",
        "layers": "gated_delta",
        "layer_options": {"gated_delta": {"n_key_heads": 1, "d_value": 6}},
    },
}
VOCAB = 61
# of a layer; 1 unless said
N_RECURRENCES = {"sliding_window": 0, "sink_window": 0, "causal_flash": 4, "causal_longformer": 0, "causal_efficient": 2}


class Exported:
    """A decoder and its graph."""

    def __init__(self, decoder: Decoder, file: Path) -> None:
        self.decoder, self.file = decoder, file
        self.vocab_size = decoder.config.vocab_size
        graph = step_graph(decoder)
        self.inputs, self.outputs = graph.inputs, graph.outputs
        self.n_positions = decoder.config.n_positions
        self.reference = Steps(graph.answer, self.inputs, n_positions=self.n_positions)

    def steps(self, threads: int = 1) -> Steps:
        return Steps(answers(open_graph(self.file, threads=threads), self.outputs), self.inputs, n_positions=self.n_positions)


@pytest.fixture(scope="module")
def made() -> dict[str, Exported]:
    return {}


@pytest.fixture(params=["every layer", *CONFIGS])
def exported(
    request: pytest.FixtureRequest, made: dict[str, Exported], constant_states_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    """Every layer with a state of constant size, and the parts that a model may have instead of others (learned positions:
    kinds/test_decoder.py). One export of each."""
    if request.param not in made and request.param in CONFIGS:
        decoder, folder = random_decoder(vocab_size=VOCAB, **CONFIGS[request.param]), tmp_path_factory.mktemp("step-graph")
        trace(decoder, folder / "traced.onnx")
        made[request.param] = Exported(decoder, optimise(folder / "traced.onnx", folder / "optimised"))
    return made.get(request.param) or Exported(random_decoder(**EVERY_CONSTANT_STATE), constant_states_bundle / "model.onnx")


def test_torch_gives_the_same_numbers(exported: Exported) -> None:
    assert compare(exported.steps(), exported.reference, vocab_size=exported.vocab_size) > 0


def test_no_cut_no_neighbour_and_no_padding_changes_a_bit(exported: Exported) -> None:
    assert inexact(exported.steps, vocab_size=exported.vocab_size) is None


def test_logits_are_given_where_they_are_wanted_and_may_be_wanted_nowhere(exported: Exported) -> None:
    steps, tokens = exported.steps(), np.arange(10).reshape(2, 5)
    call = tokens, np.array([5, 3]), np.array([0, 7]), steps.begin(2)
    everywhere, states = steps.run(*call)
    some, _ = steps.run(*call, np.array([[4, 0], [2, 2]]))
    none, same = steps.run(*call, np.empty((2, 0), np.int64))
    assert np.array_equal(some, np.stack([everywhere[0, [4, 0]], everywhere[1, [2, 2]]]))
    assert none.shape == (2, 0, exported.vocab_size)
    assert all(np.array_equal(states[name], same[name]) for name in states)


def test_a_row_that_gets_nothing_keeps_its_state_to_the_bit(exported: Exported) -> None:
    steps = exported.steps()
    _, states = steps.run(np.arange(12).reshape(2, 6), np.array([6, 4]), np.array([0, 0]), steps.begin(2))
    _, after = steps.run(np.ones((2, 3), np.int64), np.array([0, 2]), np.array([6, 4]), states)
    assert all(np.array_equal(states[name][0], after[name][0]) for name in states)
    settled = tuple(f"_{name}" for name in SETTLES)
    assert not any(np.array_equal(states[name][1], after[name][1]) for name in states if not name.endswith(settled))


def test_the_operators_are_those_that_are_exact(exported: Exported) -> None:
    operators = Counter(node.op_type for node in onnx.load(exported.file, load_external_data=False).graph.node)
    layers = exported.decoder.config.layer_names
    assert operators["LinearAttention"] == sum(N_RECURRENCES.get(layer, 1) for layer in layers)
    assert not {"Elu", "Log", "Softplus", "Conv", "Scan", "Loop"} & set(operators)


@pytest.mark.parametrize("layer", ["gated_delta", pytest.param("causal_linear", marks=pytest.mark.exhaustive)])
def test_a_layer_moves_whole_tokens_only(layer: str, tmp_path: Path) -> None:
    """To transpose tokens, or to gather a state number by number, took a third of a decode step."""
    trace(random_decoder(layers=layer, n_layers=1, positions="none"), tmp_path / "traced.onnx")
    operators = Counter(node.op_type for node in onnx.load(optimise(tmp_path / "traced.onnx", tmp_path / "optimised")).graph.node)
    assert not {"Transpose", "GatherElements", "Expand"} & set(operators)
    assert operators["MatMul"] == 1 + 1 + 3 + 1  # into the heads, out of them, feed-forward, logits


def test_the_decoder_is_left_as_it_was() -> None:
    decoder = random_decoder(layers="gated_delta", positions="none")
    layer = decoder.blocks[0].layer
    with with_operators(decoder, whole_layers=True):
        assert layer.recurrence is not chunkwise
    assert layer.recurrence is chunkwise
    replaced = {"advance", "recurrence", "convolve", "take"}
    assert not replaced & (vars(layer).keys() | vars(layer.convolution).keys() | vars(decoder).keys())


# What the checks find


def altered(exported: Exported, change: object) -> Steps:
    """The graph with its outputs changed by `change(feed, outputs)`."""
    answer = answers(open_graph(exported.file, threads=1), exported.outputs)

    def changed(feed: Feed) -> Arrays:
        outputs = dict(answer(feed))
        change(feed, outputs)  # type: ignore[operator]
        return outputs

    return Steps(changed, exported.inputs)


def add_to(name: str, amount: object) -> object:
    """A change that adds the least of what float32 can hold near 1 to a tensor, as often as `amount(feed)` says."""

    def change(feed: Feed, outputs: dict[str, NDArray[np.float32]]) -> None:
        outputs[name] = outputs[name] + np.float32(2**-20) * amount(feed)  # type: ignore[operator]

    return change


DEPENDENCIES = {
    "the batch": (lambda feed: len(feed[contract.TOKENS]) > 1, "a batch changes"),
    "the length of a call": (lambda feed: feed[contract.TOKENS].shape[1] == 7, "pieces of 7 changes"),
    "single steps": (lambda feed: feed[contract.TOKENS].shape[1] == 1, "pieces of 7 changes"),  # 64 = 9 * 7 + 1
    "padding": (lambda feed: feed[contract.LENGTHS].min() < feed[contract.TOKENS].shape[1], "padding changes"),
}


one_of_them = pytest.mark.parametrize("exported", ["no positions"], indirect=True)


@one_of_them
@in_one_test(("when", "said"), DEPENDENCIES.values(), ids=DEPENDENCIES)
@in_one_test("name", [contract.STEP_LOGITS, "new_state_0_S"])
def test_a_bit_that_depends_on_others_is_found(exported: Exported, name: str, when: object, said: str) -> None:
    what = inexact(lambda threads: altered(exported, add_to(name, when)), vocab_size=exported.vocab_size)
    assert what is not None
    assert said in what


@one_of_them
def test_a_graph_that_is_wrong_is_found(exported: Exported) -> None:
    with pytest.raises(ExportError, match=r"^logits: at B=1, N=1 the graph is .* away from the model"):
        compare(altered(exported, add_to(contract.STEP_LOGITS, lambda feed: 1e4)), exported.reference, vocab_size=exported.vocab_size)
    wrong = add_to("new_state_0_S", lambda feed: np.nan if feed[contract.TOKENS].shape[1] == 9 else 0)
    with pytest.raises(ExportError, match=r"^state_0_S: at B=1, N=9 the graph is nan away"):
        compare(altered(exported, wrong), exported.reference, vocab_size=exported.vocab_size)
