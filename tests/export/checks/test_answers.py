"""The answers of a decoder in a lower precision are compared with those of fp32, and the bundle has the figures."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from export import contract
from export.bundle import export_bundle
from export.checks.answers import FIRST, Fp32Answers
from export.checks.decoder_parity import Steps
from export.checks.golden_texts import QUESTIONS
from export.checks.parity import Arrays, Feed
from export.errors import ExportError
from export.summary import render
from tests.exports import exported

VOCAB, END = 40, 7


def counting(*, wrong_at: int | None = None, noise: float = 0.0, n_positions: int | None = None) -> Steps:
    """A decoder whose next token is the last token + 1, or + 2 at the position `wrong_at`. Its state is the number of tokens."""

    def answer(feed: Feed) -> Arrays:
        positions = feed["positions"][:, None] + feed["wanted"]
        after = np.take_along_axis(feed["tokens"], feed["wanted"], 1) + np.where(positions == wrong_at, 2, 1)
        logits = 10 * np.eye(VOCAB, dtype=np.float32)[after % VOCAB]
        logits[..., 0] += noise
        state = feed["state_0_n"] + feed["lengths"][:, None].astype(np.float32)
        assert np.array_equal(feed["state_0_n"][:, 0], feed["positions"]), "a state of other tokens"
        return {"logits": logits, "new_state_0_n": state}

    states = (contract.StateTensor(name="state_0_n", shape=(1,)),)
    return Steps(answer, contract.decoder_interface(states, VOCAB, takes_positions=True)[0], n_positions=n_positions)


def figures(graph: Steps, *prompts: list[int], n_positions: int | None = None) -> contract.Answers:
    fp32 = Fp32Answers(counting(n_positions=n_positions), prompts, (END,), lambda share: None)
    return fp32.compare(graph, VOCAB, limited=True, show=lambda share: None)


def test_the_same_decoder_gives_the_same_answers() -> None:
    found = figures(counting(), [8, 9], [3], [5] * 300)  # the last prompt has several pieces
    assert (found.prompts, found.tokens) == (3, 38 + 4 + 2), "the answers are 10 to 39 and 0 to 7; 4 to 7; 6 and 7"
    assert found.measured == contract.AnswerFigures(same=3, mean_kl=0, logit_error=0)
    assert found.within_limits


@pytest.mark.parametrize(("place", "same"), [(0, 0), (FIRST - 1, 0), (FIRST, 1)])
def test_only_the_first_tokens_must_be_the_same(place: int, same: int) -> None:
    found = figures(counting(wrong_at=1 + place), [8, 9])  # the first token of the answer is chosen at position 1
    assert found.measured.same == same
    assert found.measured.logit_error == 10


def test_small_errors_of_logits_are_measured() -> None:
    found = figures(counting(noise=1.0), [1])
    assert (found.measured.same, found.measured.logit_error) == (1, 1)
    p, q = (np.exp(row) / np.exp(row).sum() for row in (np.eye(VOCAB)[1] * 10, np.eye(VOCAB)[1] * 10 + np.eye(VOCAB)[0]))
    assert found.measured.mean_kl == pytest.approx((p * np.log(p / q)).sum(), rel=1e-3)
    assert not found.within_limits, "the limit is 0.01 of the largest logit"


def test_answers_end_at_the_last_position() -> None:
    found = figures(counting(n_positions=30), [8, 9], n_positions=30)
    assert found.tokens == 30 - 2 + 1


@pytest.fixture(scope="module")
def checkpoint(decoder_bundle: Path) -> Path:
    """Which has a chat template."""
    return decoder_bundle.with_name(f"{decoder_bundle.name}-checkpoint")


def test_an_export_that_changes_answers_is_refused_with_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    said = (
        rf"int4 changes the answers of its weights: \d+ of {len(QUESTIONS)} begin with the same 16 tokens as in fp32 \(at least 45\), "
        r"mean KL divergence .+ nats a token \(at most 0\.005\), worst logit error .+ \(at most .+\)\. "
        r"Choose fp32, or accept these figures with --precision int4-rough"
    )
    with pytest.raises(ExportError, match=said):
        export_bundle(checkpoint, tmp_path / "bundle", precision="int4")
    assert not (tmp_path / "bundle").exists()


def test_a_rough_bundle_has_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    answers = exported(checkpoint, tmp_path / "bundle", precision="int4-rough").decoder.answers
    assert (answers.prompts, answers.limits) == (len(QUESTIONS), None)
    assert answers.measured.same < 45
    assert answers.measured.mean_kl > 0
    assert contract.verify(tmp_path / "bundle").decoder.answers == answers
    console = Console(width=400, file=StringIO())
    with console.capture() as capture:
        console.print(render(tmp_path / "bundle"))
    assert f"{answers.measured.same} of 50 begin with the same 16 tokens as in fp32" in capture.get()
    assert "(not limited)" in capture.get(), "no difference at random tokens is a passed check"
