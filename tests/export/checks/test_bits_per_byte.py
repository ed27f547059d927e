"""Bits per byte by the graph that is served: the figure that training gives, whatever is read beside a document and however it is cut."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from export import contract
from export.bundle import export_bundle
from export.checks import bits_per_byte as held_out
from export.checks.bits_per_byte import HeldOutText, bits_per_byte, read_text
from export.checks.decoder_parity import Steps
from export.checks.golden_texts import PROMPTS
from export.checks.parity import Arrays, Feed, answers, open_graph
from export.errors import ExportError
from export.graphs.decoder_step import step_graph
from export.kinds import decoder as decoder_bundle
from export.summary import render
from models.checkpoints.decoder import load_decoder
from models.decoder.model import Decoder
from models.training.corpus import TextDocument, TokenDocument, write_texts
from models.training.text.evaluation import evaluate
from service.generation.session import OnnxStepSession
from tests.decoders import byte_tokenizer, tiny_decoder
from tests.exports import exported

EOS = 10  # of the tiny decoders
DOCUMENTS = ("def f(x):\n    return x\n", "é" * 300, "", "a", "".join(chr(32 + 7 * at % 90) for at in range(700)))
TEXT = HeldOutText("documents", DOCUMENTS)
# The same sums in another order: single logits are 1e-5 apart, and a mean over a thousand of them less.
RELATIVE = 1e-6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("held-out") / "checkpoint", layers=("causal_linear", "sliding_window"), n_layers=2)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    exported(checkpoint, checkpoint.with_name("bundle"))
    return checkpoint.with_name("bundle")


def steps(bundle: Path) -> Steps:
    manifest = contract.verify(bundle)
    return Steps(answers(open_graph(bundle / manifest.graph.file, threads=1), manifest.graph.outputs), manifest.graph.inputs)


def served(bundle: Path) -> Steps:
    """The session that the service runs."""
    manifest = contract.verify(bundle)
    session = OnnxStepSession(bundle, manifest, threads=1)

    def answer(feed: Feed) -> Arrays:
        states, out = (session.states(len(feed["tokens"])) for _ in range(2))
        for state, array in zip(session.decoder.states, states.arrays, strict=True):
            array[:] = feed[state.name]
        logits = session.run(*(feed[name] for name in ("tokens", "lengths", "positions", "wanted")), states, out)
        return {"logits": logits.copy(), **{state.output: new for state, new in zip(session.decoder.states, out.arrays, strict=True)}}

    return Steps(answer, manifest.graph.inputs)


def measured(steps: Steps, text: HeldOutText = TEXT, *, bos: int | None = None, eos: int | None = EOS) -> float:
    return bits_per_byte(steps, byte_tokenizer(), text, bos_token_id=bos, eos_token_id=eos)


def trained(decoder: Decoder) -> float:
    """The figure that training gives."""
    encoded = [byte_tokenizer().encode(document).ids for document in DOCUMENTS]
    documents = [
        TokenDocument(package="p", file=str(at), size_bytes=len(text.encode()), tokens=np.array([*ids, EOS], np.uint16))
        for at, (text, ids) in enumerate(zip(DOCUMENTS, encoded, strict=True))
    ]
    return evaluate(decoder, documents, end_of_text=EOS).overall


def test_it_is_the_figure_that_training_gives(checkpoint: Path, bundle: Path) -> None:
    assert measured(steps(bundle)) == pytest.approx(trained(load_decoder(checkpoint).model), rel=RELATIVE)
    assert measured(served(bundle)) == measured(steps(bundle)), "and what the service runs"


def test_with_learned_positions_too(tmp_path: Path) -> None:
    """In windows of as many tokens as there are positions."""
    decoder = load_decoder(tiny_decoder(tmp_path, layers="causal_linear", positions="learned", n_positions=40)).model
    read = Steps(step_graph(decoder).answer, step_graph(decoder).inputs, n_positions=40)
    assert measured(read) == pytest.approx(trained(decoder), rel=RELATIVE)


@pytest.mark.parametrize(("chunk", "rows", "logits"), [(1000, 1, 1 << 24), (7, 3, 1 << 24), (256, 16, 256 * 20), (256, 16, 1)])
def test_no_cut_and_no_neighbour_changes_it(chunk: int, rows: int, logits: int, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(steps(bundle))
    for name, value in (("CHUNK", chunk), ("ROWS", rows), ("LOGITS", logits)):
        monkeypatch.setattr(held_out, name, value)
    assert measured(steps(bundle)) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("bos", "eos", "tokens"), [(None, None, "ab"), (7, None, "\x07ab"), (None, EOS, "\nab\n"), (7, EOS, "\x07ab\n")])
def test_each_token_that_has_another_before_it_counts_once(bos: int | None, eos: int | None, tokens: str, bundle: Path) -> None:
    """Uniform logits: log2 V bits a token. The byte tokenizer's ids are not the bytes, but there are as many."""

    def uniform(feed: Feed) -> Arrays:
        return {**steps(bundle).answer(feed), "logits": np.zeros((*feed["wanted"].shape, 256), np.float32)}

    counted = Steps(uniform, contract.verify(bundle).graph.inputs)
    assert measured(counted, HeldOutText("two", ("ab",)), bos=bos, eos=eos) == pytest.approx(8 * (len(tokens) - 1) / 2)


# The text


def test_a_file_is_a_document_and_a_data_folder_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"a\r\n\xc3\xa9")
    assert read_text(tmp_path / "notes.txt") == HeldOutText("notes.txt", ("a\r\né",))
    documents = {
        "train": [TextDocument(package="p", file="a", text="seen")],
        "held_out": [TextDocument(package="q", file=t, text=t) for t in "xyé"],
    }
    write_texts(tmp_path / "data", documents, sources={})
    text = read_text(tmp_path / "data")
    assert text == HeldOutText("data", ("x", "y", "é"))
    assert (text.described.documents, text.described.size_bytes) == (3, 4)


@pytest.mark.parametrize(("content", "words"), [(b"ab\xff", "not UTF-8: byte 2 is 0xff"), (b"", "is empty")])
def test_a_file_that_is_no_text_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ExportError, match=words):
        read_text(tmp_path / "text")


# The bundle


def test_the_bundle_states_what_its_precision_costs(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(DOCUMENTS), encoding="utf-8")
    manifest = export_bundle(checkpoint, tmp_path / "int8", precision="int8-rough", held_out=text)
    decoder = manifest.decoder
    assert decoder is not None
    assert decoder.held_out == read_text(text).described
    assert decoder.answers.prompts == len(PROMPTS), "the questions need a chat template"
    assert decoder.fp32_bits_per_byte == pytest.approx(measured(steps(bundle), read_text(text)), rel=1e-12)
    assert decoder.bits_per_byte == pytest.approx(measured(steps(tmp_path / "int8"), read_text(text)), rel=1e-12)
    assert decoder.bits_per_byte != decoder.fp32_bits_per_byte
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(tmp_path / "int8"))
    said = f"{decoder.bits_per_byte:.4f} against {decoder.fp32_bits_per_byte:.4f} in fp32, on text (documents: 1, 1,324 B)"
    assert said in capture.get()


def test_a_precision_that_costs_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_bundle, "ROUNDED", decoder_bundle.ErrorLimits(1.0, logit_error=0.25, lost_bits=-0.5))
    with pytest.raises(ExportError, match=r"int8-rough takes \d+\.\d+ bits per byte; the limit is \d+\.\d+\. Keep fp32"):
        export_bundle(tiny_decoder(tmp_path / "checkpoint"), tmp_path / "int8", precision="int8-rough")
    assert not (tmp_path / "int8").exists()


def test_an_encoder_is_not_judged_by_a_text(encoder_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is for decoders"):
        export_bundle(encoder_checkpoint, tmp_path / "bundle", held_out=tmp_path)
