"""Short texts that have a graph of their own: which graph computes a text, and that it alone decides; and damaged graphs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from export import contract
from service.runtime.onnx import Array, OnnxSession
from tests.service.encoding.test_selftest import copied, refusal, spoil
from tests.service.test_hostile_bundles import nothing, rewritten

SHORT, LONGEST = 64, 200
SAME = 1e-6  # of numbers up to 1; hybrid attention adds up the far tokens of a padded text in another order
OUTPUTS = (contract.EMBEDDING, contract.POOLED, contract.TOKEN_EMBEDDINGS)


def text(length: int) -> list[int]:
    return [2, *(5 + (at * 7 + length) % 40 for at in range(length - 2)), 3]


@pytest.fixture(scope="module", params=[1, 2])
def session(hybrid_bundle: Path, request: pytest.FixtureRequest) -> OnnxSession:
    return OnnxSession(hybrid_bundle, contract.read_manifest(hybrid_bundle), threads=request.param, provider="cpu")


def graph(bundle: Path, name: str, ids: list[int]) -> dict[str, Array]:
    """What this graph of the bundle computes of one text."""
    import onnxruntime as ort

    alone = ort.InferenceSession(bundle / name, providers=["CPUExecutionProvider"])
    arrays = alone.run(OUTPUTS, {contract.INPUT_IDS: np.array([ids]), contract.ATTENTION_MASK: np.ones((1, len(ids)), np.int64)})
    return {output: array[0] for output, array in zip(OUTPUTS, arrays, strict=True)}


@pytest.mark.parametrize("alone", [True, False])
def test_the_length_of_a_text_chooses_its_graph(hybrid_bundle: Path, session: OnnxSession, alone: bool) -> None:
    for length, name, other in ((SHORT, "short.onnx", "model.onnx"), (SHORT + 1, "model.onnx", "short.onnx")):
        ids = text(length)
        rows = session.run(OUTPUTS, [ids], None, alone=alone)
        for output, wanted in graph(hybrid_bundle, name, ids).items():
            assert abs(rows[output][0] - wanted).max() <= 1e-5
        if length == SHORT:  # `other` reads longer texts too, so only their values tell them apart
            assert abs(rows[contract.EMBEDDING][0] - graph(hybrid_bundle, other, ids)[contract.EMBEDDING]).max() > 1e-3
        else:
            with pytest.raises(Exception, match="out of data bounds"):
                graph(hybrid_bundle, other, ids)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("lengths", [(SHORT, 3, 40), (LONGEST, SHORT + 1, 100)])
def test_a_text_in_a_batch_gets_what_it_gets_alone(session: OnnxSession, lengths: Sequence[int], alone: bool) -> None:
    together = session.run(OUTPUTS, [text(length) for length in lengths], None, alone=alone)
    assert together[contract.TOKEN_EMBEDDINGS].shape[:2] == (len(lengths), max(lengths))
    for at, length in enumerate(lengths):
        own = session.run(OUTPUTS, [text(length)], None, alone=alone)
        for output in OUTPUTS:
            row, wanted = together[output][at], own[output][0]
            assert abs(row[: len(wanted)] - wanted).max() <= SAME * max(1, abs(wanted).max()), (output, length)
        assert not together[contract.TOKEN_EMBEDDINGS][at, length:].any(), "padding is 0"


# Damaged graphs --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [contract.GRAPH, contract.SHORT_GRAPH])
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_output_of_both_graphs_is_tried_at_start(hybrid_bundle: Path, tmp_path: Path, name: str, output: str) -> None:
    bundle = copied(hybrid_bundle, tmp_path)
    spoil(bundle / name, output)
    said = refusal(rewritten(bundle, nothing))
    wanted = "lowest cosine to the golden vectors nan" if output == contract.EMBEDDING else f"{output} has numbers that are not finite"
    assert f"{name}: self-test failed, {wanted}" in said


@pytest.mark.parametrize("name", [contract.GRAPH, contract.SHORT_GRAPH])
def test_a_graph_that_computes_something_else_is_named(hybrid_bundle: Path, tmp_path: Path, name: str) -> None:
    """Each coordinate of its vectors has the place of the one before it."""
    bundle = copied(hybrid_bundle, tmp_path)
    model = onnx.load(bundle / name, load_external_data=False)
    for node in model.graph.node:
        node.output[:] = [f"{each}_in_place" if each == contract.EMBEDDING else each for each in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.roll(np.arange(48), 1), "places"))
    model.graph.node.append(helper.make_node("Gather", [f"{contract.EMBEDDING}_in_place", "places"], [contract.EMBEDDING], axis=1))
    onnx.save(model, bundle / name)
    assert f"{name}: self-test failed, lowest cosine to the golden vectors" in refusal(rewritten(bundle, nothing))


def test_a_graph_that_reads_fewer_tokens_than_the_manifest_says_is_refused(hybrid_bundle: Path, tmp_path: Path) -> None:
    def longer(described: dict) -> None:
        described["short_graph"]["max_tokens"] = 65

    golden = json.loads((hybrid_bundle / contract.GOLDEN).read_text(encoding="utf-8"))
    said = refusal(rewritten(copied(hybrid_bundle, tmp_path), longer, golden=json.dumps(golden).encode()))
    assert "short.onnx: self-test failed, an input of 65 tokens fails, and the manifest allows 65" in said


@pytest.mark.parametrize(("kept", "untested"), [(slice(0, 1), "model.onnx"), (slice(-1, None), "short.onnx")])
def test_golden_texts_for_both_graphs_are_needed(hybrid_bundle: Path, tmp_path: Path, kept: slice, untested: str) -> None:
    golden = json.loads((hybrid_bundle / contract.GOLDEN).read_text(encoding="utf-8"))
    golden |= {"texts": golden["texts"][kept], "outputs": golden["outputs"][kept]}
    bundle = copied(hybrid_bundle, tmp_path)
    said = refusal(rewritten(bundle, nothing, golden=json.dumps(golden).encode()))
    assert f"has no text that {untested} computes" in said
