"""A decoder's folder goes in, and a bundle that gives torch's numbers comes out: exact, or not at all."""

from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

from export import contract
from export.bundle import export_bundle
from export.checks.golden import N_CONTINUED
from export.checks.golden_texts import PROMPTS
from export.errors import ExportError
from export.kinds import decoder as decoder_kind
from export.kinds.exporter import Options
from export.kinds.load import load
from export.maps.of_text import maps_of_bundle
from export.summary import render
from tests import decoders
from tests.exports import exported


@pytest.fixture(scope="module")
def checkpoint(decoder_bundle: Path) -> Path:
    return decoder_bundle.with_name(f"{decoder_bundle.name}-checkpoint")


@pytest.fixture(scope="module")
def bundle(decoder_bundle: Path) -> Path:
    return decoder_bundle


def test_the_manifest_says_what_the_decoder_is(checkpoint: Path, bundle: Path) -> None:
    manifest = contract.verify(bundle)
    decoder = manifest.decoder
    assert decoder is not None
    assert (manifest.kind, manifest.precision, manifest.source.attention) == ("decoder", "fp32", "gated_delta")
    shapes = {f"state_{layer}_{name}": shape for layer in range(2) for name, shape in (("S", (2, 16, 16)), ("conv", (3, 96)))}
    assert {state.name: state.shape for state in decoder.states} == shapes
    assert decoder.state_bytes == 4 * 2 * (2 * 16 * 16 + 96 * 3)
    assert decoder.exact
    assert decoder.eos_token_ids == (10,)
    assert not decoder.takes_positions
    assert decoder.bits_per_byte == decoder.fp32_bits_per_byte
    assert 7 < decoder.bits_per_byte < 16, "random weights know nothing of 256 bytes"
    assert (bundle / decoder.chat_template).read_text() == (checkpoint / "chat_template.jinja").read_text()
    assert {file.name for file in manifest.files} == {
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
        "golden.json",
        "chat_template.jinja",
    }


@pytest.mark.parametrize(("precision", "product"), [("int8-rough", "MatMulIntegerToFloat"), ("int4-rough", "MatMulNBits")])
def test_a_graph_of_rounded_weights_is_exact_too_and_says_what_it_costs(
    precision: contract.Precision, product: str, checkpoint: Path, tmp_path: Path
) -> None:
    manifest = exported(checkpoint, tmp_path / "rounded", precision=precision)
    decoder = manifest.decoder
    assert decoder is not None
    assert decoder.exact
    assert manifest.graph.optimisation == decoder_kind.HOW.get(precision, decoder_kind.in_blocks(precision))
    assert decoder.bits_per_byte != decoder.fp32_bits_per_byte
    assert decoder.bits_per_byte == pytest.approx(decoder.fp32_bits_per_byte, rel=0.02)
    assert manifest.graph.operators[product] >= 5
    assert "MatMul" not in manifest.graph.operators
    assert {tensor.dtype for tensor in manifest.graph.inputs if tensor.name.startswith("state_")} == {"float32"}


def test_the_tolerance_grows_with_the_layers(tmp_path: Path) -> None:
    """A correct graph of SmolLM2's 30 layers was refused on a CPU with AVX-512 for 1.2e-4."""
    for n_layers, tolerance in ((2, 1e-4), (24, 2e-4)):
        folder = decoders.tiny_decoder(tmp_path / str(n_layers), n_layers=n_layers)
        assert load(folder, Options()).tolerance("fp32") == pytest.approx(tolerance)


def test_fp16_halves_the_weights_and_keeps_states_in_float32(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    manifest = exported(checkpoint, tmp_path / "fp16", precision="fp16")
    assert {tensor.dtype for tensor in manifest.graph.outputs} == {"float32"}
    assert "not faster" in manifest.graph.optimisation
    half, full = ((folder / "model.onnx.data").stat().st_size for folder in (tmp_path / "fp16", bundle))
    assert half < 0.7 * full
    weights = onnx.load(tmp_path / "fp16" / contract.GRAPH, load_external_data=False).graph.initializer
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in weights)


# What is refused


@pytest.mark.parametrize(
    ("layers", "which"),
    [
        (("causal_linear", "causal_softmax"), "layer 1 of 2, counted from 0, is full attention \\(causal_softmax\\)"),
        (
            ("gated_softmax", "delta", "causal_softmax"),
            "layer 0 of 3, counted from 0 \\(and 1 more\\), is full attention \\(gated_softmax\\)",
        ),
    ],
)
def test_a_state_that_grows_is_refused_by_its_first_layer(tmp_path: Path, layers: tuple[str, ...], which: str) -> None:
    checkpoint = decoders.tiny_decoder(tmp_path / "checkpoint", layers=layers, n_layers=len(layers))
    with pytest.raises(ExportError, match=f"{which}, whose state grows with the text.* Or choose a checkpoint whose every layer is linear"):
        export_bundle(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_graph_that_is_not_exact_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_kind, "inexact", lambda open_steps, **sizes: "a batch changes logits of a prompt of 64 tokens")
    with pytest.raises(ExportError, match="not exact: a batch changes logits of a prompt of 64 tokens"):
        export_bundle(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = decoders.tiny_decoder(tmp_path / "checkpoint", vocab_size=200)
    with pytest.raises(ExportError, match="has 256 tokens, but the model 200"):
        export_bundle(checkpoint, tmp_path / "bundle")


# Learned positions


LAYERS = ("causal_linear", "gated_delta", "sliding_window")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with 40 positions, which is less than some golden prompts, passages and sizes of the comparison take."""
    checkpoint = tmp_path_factory.mktemp("learned") / "checkpoint"
    decoders.tiny_decoder(checkpoint, layers=LAYERS, n_layers=3, positions="learned", n_positions=40)
    exported(checkpoint, checkpoint.with_name("bundle"), maps=True)
    return checkpoint.with_name("bundle")


def test_learned_positions_are_a_limit_of_the_bundle(numbered: Path) -> None:
    manifest, golden = contract.verify(numbered), contract.read_golden(numbered, contract.DecoderGolden)
    assert (manifest.decoder.n_positions, manifest.limits.max_tokens, manifest.attention_graph.max_tokens) == (40, 40, 40)
    assert manifest.decoder.takes_positions
    assert manifest.decoder.exact
    assert manifest.parity.shapes == ((1, 1), (2, 1), (1, 9))
    assert 0 < len(golden.prompts) < len(PROMPTS)
    assert max(len(ids) + N_CONTINUED for ids in golden.token_ids) <= 40
    assert 7 < manifest.decoder.bits_per_byte < 16
    console = Console(width=160, file=StringIO())
    with console.capture() as capture:
        console.print(render(numbered))
    assert "40 tokens, vocabulary of 256" in capture.get()


def test_a_decoder_has_maps(numbered: Path) -> None:
    """Of a layer with a normaliser, one with a norm behind its recurrence, and a window. The export has held them against torch."""
    maps, graph = maps_of_bundle(numbered, "to be, or not"), contract.verify(numbered).attention_graph
    assert maps.layers == LAYERS
    assert not any(np.triu(A, 1).any() for A in maps.A)
    assert [layer.effective for layer in graph.layers] == [True, True, False]


def test_too_few_positions_to_prove_a_server_are_refused(tmp_path: Path) -> None:
    checkpoint = decoders.tiny_decoder(tmp_path / "checkpoint", positions="learned", n_positions=19)
    with pytest.raises(ExportError, match="n_positions=19 is too small for a prompt and the 16 tokens after it"):
        export_bundle(checkpoint, tmp_path / "bundle")


def test_a_picture_has_a_position_for_every_pixel_it_reads(tmp_path: Path) -> None:
    checkpoint = decoders.tiny_decoder(
        tmp_path / "checkpoint", positions="learned", n_positions=29, image=decoders.tiny_image(width=6, height=5)
    )
    with pytest.raises(ExportError, match="a prompt and its pixels need 30 positions, and the model has n_positions=29"):
        export_bundle(checkpoint, tmp_path / "bundle")


# Pixels


def test_what_a_decoder_draws_goes_into_the_bundle(image_bundle: Path) -> None:
    assert contract.verify(image_bundle).decoder.image == contract.Image(**asdict(decoders.tiny_image()))
    console = Console(width=160, file=StringIO())
    with console.capture() as capture:
        console.print(render(image_bundle))
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9: 4 x 3 pixels in 4 grey levels" in capture.get()
