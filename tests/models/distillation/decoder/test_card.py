"""Measurements of a tiny decoder: in pieces as in one call, kept after a stop, and told in the card."""

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from models.distillation.decoder.card import FULL, STUDENT, WINDOW, Figures, model_card
from models.distillation.decoder.evaluation import PIECE, Reader, bits_per_byte, copy, needle
from models.folders.byte_tokenizer import byte_tokenizer
from tests.decoders import random_decoder

IDS = torch.randint(256, (PIECE + 45,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(random_decoder(layers="causal_softmax"))


def test_bits_are_those_of_one_call(reader: Reader) -> None:
    with torch.no_grad():
        logits = reader.decoder(torch.tensor([IDS]))[0][0, :-1].double()
    expected = -logits.log_softmax(-1)[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])] / math.log(2)
    assert reader.bits(IDS) == pytest.approx(expected.tolist(), rel=1e-4)
    text = byte_tokenizer().encode("for a in b: c" * 20).ids
    found = bits_per_byte(reader, text, byte_tokenizer(), lengths=(16, 64, 1_000))
    assert found == {str(N): pytest.approx(sum(reader.bits(text)[: N - 1]) / (N - 1)) for N in (16, 64)}, "a byte is a token here"


def test_continuations_are_the_most_probable_tokens(reader: Reader) -> None:
    said = reader.continued(IDS, 3)
    for number in range(3):
        with torch.no_grad():
            assert said[number] == int(reader.decoder(torch.tensor([[*IDS, *said[:number]]]))[0][0, -1].argmax())


def test_needle_and_copy_count_the_last_tokens_only(reader: Reader) -> None:
    """A random model finds neither: about 8 bits for each of 256 tokens."""
    assert 5 * 4 < needle(reader, IDS, byte_tokenizer(), 20) < 5 * 16
    assert 4 < copy(reader, IDS, byte_tokenizer(), 20) < 16


def test_a_figure_is_measured_once(tmp_path: Path) -> None:
    console = Console(quiet=True)
    assert Figures(tmp_path / "f.json").of("a", lambda: 1.5, console) == 1.5
    assert Figures(tmp_path / "f.json").of("a", lambda: pytest.fail("measured again"), console) == 1.5
    assert json.loads((tmp_path / "f.json").read_text()) == {"a": 1.5}


def test_the_card_of_a_tuned_student_tells_the_tuning() -> None:
    both = {STUDENT: 1.25, WINDOW: 1.5, FULL: 1.0}
    names = ("student", "window", "long_window", "teacher")
    points = [{f"{kind}{name}_bits_64": bits for kind in ("", "python_") for name in names} for bits in (0.5, 0.25)]
    report = {
        "name": "tiny",
        "teacher_name": "t.gguf",
        "config": {"rank": 2, "context": 64, "batch": 4, "label_share": 0.25, "feedforward": False},
        "window": 8,
        "options": {"n_first": 2},
        "delta_bytes": 9_000_000,
        "parameters": 77,
        "changed_parameters": 55,
        "data": {"held_out": ["q/x.py", "q/README (metadata)"]},
        "evaluations": [point | {"student_kl": kl, "window_kl": 0.4} for point, kl in zip(points, (0.3, 0.1), strict=True)],
        "step": 1_500,
        "tokens": 24_000_000,
        "texts_read": 99,
        "packages_read": ["p"],
        "seconds": 240.0,
        "hardware": "a GPU",
        "tokens_per_s": 100_000.0,
        "tuned_before": [{"step": 1_000, "tokens": 8_000_000, "seconds": 60.0, "hardware": "a GPU", "date": "2026-11-25"}],
        "date": "2026-11-26",
        "torch": "2",
    }
    sources = {"rule": "made up", "packages": [{"name": name, "split": "train", "licence": name * 2, "bytes": 5} for name in "po"]}
    found = {
        "bits": {"Python (q/x.py)": {model: {"256": bits} for model, bits in both.items()}},
        "needle": {"400": {STUDENT: 20.0, WINDOW: 22.0, FULL: 0.4}},
        "copy": {"400": {STUDENT: 2.0, WINDOW: 10.0, FULL: 1.0}},
        "samples": [],
    }
    transfer = {"step": 69, "seconds": 600.0, "hardware": "a CPU", "date": "2026-11-24"}
    card = model_card(report, sources, found, transfer)
    lines = (
        "Every layer attends exactly to 8 tokens, the first\n2 among them",
        "rank 2,\n55 numbers), 9.0 MB",
        "| KL(teacher, this model), nats a token | 0.3000 | 0.1000 | 0.4000 |  | 0.0000 |",
        "| of the Python files among them, 64 tokens | 0.5000 | 0.2500 |",
        "with a share of 0.25 the loss of the true next token",
        "1,500 steps of 4 texts of 64 tokens: 24.0 million tokens, of 99 different texts, in 4.0 minutes on\na GPU (100,000 tokens/s)",
        "Before, a tuning of 1,000 steps, 8.0 million tokens, in 1.0 minutes on\na GPU, 2026-11-25.",
        "attention transfer of the maps alone: 69 steps in 10.0 minutes on\na CPU",
        "| pp | 1 |",
        "- Python, 256 tokens: of the bits that its windows alone lose, 50% are won back.",
        "lost beyond the windows: a number to find after 400 tokens.",
    )
    for line in lines:
        assert line in card
    assert "| oo |" not in card
    assert "a list to repeat" not in card, "it is found"
    assert "Its windows alone need fewer bits" not in card
    found["copy"]["400"][STUDENT] = 10.2
    long = {"layers": [5, 2], "window": 16}
    card = model_card(report | {"long": long}, sources, found, transfer)
    assert "2 layers (counted from 0: 2, 5) attend to\n16 tokens (`sink_window`). Each other layer attends exactly to 8 tokens" in card
    assert "Its windows alone need fewer bits for a list to repeat after 400 tokens." in card
    assert "lost beyond the windows: a list to repeat after 400 tokens." in card
    assert "no true tokens" not in card


def test_the_card_has_the_figures() -> None:
    both = {STUDENT: 1.25, WINDOW: 1.5, FULL: 1.0}
    report = {
        "name": "tiny",
        "teacher_name": "t.gguf",
        "config": {"window": 8, "n_first": 2, "texts": 3, "context": 64, "parts": 2},
        "delta_bytes": 3_000_000,
        "parameters": 77,
        "layers": [[0.1, 0.2], [0.3, 0.4]],
        "data": {"texts": ["p/a.py", "p/b.py", "o/c.py"]},
        "step": 4,
        "seconds": 60.0,
        "hardware": "a CPU",
        "tokens_per_s": 10.0,
        "date": "2026-11-24",
        "torch": "2",
    }
    sources = {"rule": "made up", "packages": [{"name": name, "split": "train", "licence": name * 2, "bytes": 5} for name in "po"]}
    found = {
        "bits": {"Python": {model: {"256": bits} for model, bits in both.items()}},
        "needle": {"400": both},
        "copy": {"400": both},
        "samples": [{"text": "q/x.py", "end": "def", STUDENT: " f", FULL: " g"}],
    }
    card = model_card(report, sources, found)
    assert "| pp | 1 |" in card
    assert "| oo |" not in card, "the run ended before its text"
    lines = (
        "| 256 | 1.2500 | 1.5000 | 1.0000 |",
        "needs 1.250 times the bits of full",
        "| 400 | 1.25 | 1.50 | 1.00 |",
        "| 1 | 0.3000 | 0.4000 | 0.75 |",
        "     f",
        "3.0 MB in float16",
    )
    for line in lines:
        assert line in card
