"""An encoder-decoder's folder goes in, and a bundle that gives torch's numbers comes out, or none."""

from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console

from export import contract
from export.bundle import export_bundle
from export.checks.encoder_decoder_parity import ReaderAndStep
from export.checks.parity import answers, open_graph
from export.errors import ExportError
from export.kinds.exporter import Options
from export.kinds.load import load
from export.summary import render
from models.encoder_decoder.checkpoint import load_encoder_decoder
from models.encoder_decoder.search import attended
from tests.encoder_decoders import END, EXAMPLES, KINDS, tiny_encoder_decoder
from tests.exports import exported

TOLERANCE = 1e-4  # as at export


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, encoder_decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "additive":
        return encoder_decoder_bundle.with_name(f"{encoder_decoder_bundle.name}-checkpoint")
    return tiny_encoder_decoder(tmp_path_factory.mktemp(request.param) / "checkpoint", request.param)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, encoder_decoder_bundle: Path) -> Path:
    if checkpoint.parent == encoder_decoder_bundle.parent:
        return encoder_decoder_bundle
    exported(checkpoint, checkpoint.with_name("bundle"), name="tiny-writer")
    return checkpoint.with_name("bundle")


def writer(bundle: Path) -> ReaderAndStep:
    manifest = contract.verify(bundle)
    assert manifest.encoder_decoder is not None
    reader, step = manifest.encoder_decoder.reader, manifest.graph
    return ReaderAndStep(
        answers(open_graph(bundle / reader.file, threads=1), reader.outputs),
        answers(open_graph(bundle / step.file, threads=1), step.outputs),
        manifest.encoder_decoder.begin_token_id,
    )


def test_the_manifest_says_what_it_is(bundle: Path) -> None:
    manifest = contract.verify(bundle)
    both = manifest.encoder_decoder
    assert both is not None
    assert (manifest.kind, manifest.precision, manifest.limits.max_tokens, manifest.decoder) == ("encoder_decoder", "fp32", 40, None)
    assert (both.begin_token_id, both.end_token_id, both.max_output) == (0, END, 7)
    names = {tensor.name for tensor in both.reader.outputs}
    assert names == {tensor.name for tensor in manifest.graph.inputs} - {contract.PREVIOUS, contract.ATTENTION_MASK}
    assert {file.name for file in manifest.files} == {"model.onnx", "reader.onnx", "tokenizer.json", "golden.json"}
    assert manifest.parity.max_abs_error < TOLERANCE * 20
    assert manifest.parity.min_cosine > 0.9999
    said = Console(file=StringIO(), width=300)
    said.print(render(bundle))
    for words in ("encoder_decoder", "fp32", "7 tokens at most", f"{both.parameters:,}", "memory_", "attention float32 (B, N)"):
        assert words in said.file.getvalue()


def test_it_writes_what_torch_writes_and_attends_as_torch_does(checkpoint: Path, bundle: Path) -> None:
    model, graph = load_encoder_decoder(checkpoint).model, writer(bundle)
    golden = contract.read_golden(bundle, contract.EncoderDecoderGolden)
    assert golden.texts == EXAMPLES
    for ids, output in zip(golden.token_ids, golden.outputs, strict=True):
        source = torch.tensor([ids])
        tokens, weights = attended(model, source, torch.ones_like(source, dtype=torch.bool))
        assert tuple(tokens[0].tolist()) == output
        assert graph.greedy(list(ids), end_token_id=END, max_output=7)[0] == list(output)
        array = np.array([ids])
        _, attention = graph.logits(array, np.ones_like(array), np.array([output]))
        np.testing.assert_allclose(attention[0], weights[0].numpy(), atol=TOLERANCE)


def test_rows_of_any_length_and_age_go_together(checkpoint: Path, bundle: Path) -> None:
    """Two sources, one of which is three steps ahead, in one call: each gets what it would get alone."""
    graph = writer(bundle)
    sources = [np.array([list(text.encode())], np.int64) for text in ("seventeen", "four")]
    known = [dict(graph.reader({contract.INPUT_IDS: ids, contract.ATTENTION_MASK: np.ones_like(ids)})) for ids in sources]
    outputs = ([5, 6, 7], [])
    previous = []
    for at, (ids, output) in enumerate(zip(sources, outputs, strict=True)):
        previous.append(0)
        for token in output:
            made = graph.step({contract.PREVIOUS: np.array([previous[at]]), contract.ATTENTION_MASK: np.ones_like(ids), **known[at]})
            known[at] |= {name.removeprefix("new_"): value for name, value in made.items() if name.startswith("new_")}
            previous[at] = token
    alone = [
        graph.step({contract.PREVIOUS: np.array([token]), contract.ATTENTION_MASK: np.ones_like(ids), **each})[contract.STEP_LOGITS]
        for token, ids, each in zip(previous, sources, known, strict=True)
    ]
    N = max(ids.shape[1] for ids in sources)

    def padded(value: np.ndarray, name: str) -> np.ndarray:
        lacking = N - value.shape[1] if not name.startswith("state_") else 0
        return np.pad(value, [(0, 0), (0, lacking), *[(0, 0)] * (value.ndim - 2)]) if value.ndim > 1 else value

    together = {name: np.concatenate([padded(each[name], name) for each in known]) for name in known[0]}
    mask = np.concatenate([padded(np.ones_like(ids), "mask") for ids in sources])
    got = graph.step({contract.PREVIOUS: np.array(previous), contract.ATTENTION_MASK: mask, **together})[contract.STEP_LOGITS]
    np.testing.assert_allclose(got, np.concatenate(alone), atol=TOLERANCE * 10)


def test_a_graph_with_other_weights_is_refused(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(bundle / "model.onnx")
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight)[::-1].copy()  # the rows in another order
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"logits: at B=1, N=1 the steps are .* away from the model"):
        load(checkpoint, Options()).check(
            {"reader.onnx": bundle / "reader.onnx", "model.onnx": tmp_path / "model.onnx"}, "fp32", lambda step, fraction: None
        )


def test_what_is_not_for_it_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="leave out precision, attention"):
        export_bundle(checkpoint, tmp_path / "out", precision="int8")
    assert not (tmp_path / "out").exists()
