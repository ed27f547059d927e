"""Tuning of a tiny student: only maps and changes move, the divergence falls, a stop changes nothing, and the difference has it all."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from models.checkpoints.decoder import load_decoder
from models.decoder.window import hybrid, windowed
from models.distillation.decoder import tokens as token_files
from models.distillation.decoder.config import TransferConfig, TuningConfig
from models.distillation.decoder.delta import assemble, description, map_names, read_delta, read_student, write_delta
from models.distillation.decoder.layers import more_bits
from models.distillation.decoder.next_token import divergence, token_figures
from models.distillation.decoder.parallel import hidden_states, in_parallel
from models.distillation.decoder.tokens import TokenFile, make_tokens, read_tokens, write_tokens
from models.distillation.decoder.tuning import TRANSFER, TuningTask, tune
from models.distillation.delta import DESCRIPTION, WEIGHTS
from models.folders.byte_tokenizer import byte_tokenizer
from models.folders.folder import CheckpointError
from models.training import checkpoints
from models.training.corpus import CorpusError, write_texts
from models.training.trainer import TrainingError, train
from tests.decoders import tiny_decoder
from tests.models.training.texts import SOURCES, documents

TRANSFERRED = TransferConfig(window=12, n_first=2, context=64)
CONFIG = TuningConfig(
    rank=2, context=64, batch=4, steps=24, minutes=0.0, rate=2e-2, map_rate=2e-2, evaluations=2, held_out=3, checkpoint_steps=10
)
TEACHER = {"layers": "causal_softmax", "n_layers": 2, "n_heads": 4, "layer_options": {"causal_softmax": {"n_kv_heads": 2}}}
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("teacher") / "tiny", **TEACHER)


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """Untrained maps."""
    folder, source = tmp_path_factory.mktemp("delta"), load_decoder(teacher)
    student = hybrid(source.model, TRANSFERRED.window, TRANSFERRED.options)
    maps = {name: parameter for name, parameter in student.named_parameters() if name in map_names(student)}
    write_delta(folder, description(source, "tiny", window=TRANSFERRED.window, options=TRANSFERRED.options), maps)
    (folder / "run.json").write_text('{"name": "transfer"}')
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, {"train": documents(("p0", "p1"), files=20, seed=0), "held_out": documents(("q0",), files=6, seed=1)}, SOURCES)
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens.npz"
    write_tokens(file, make_tokens(data, byte_tokenizer(), context=80, n=500, held_out=3))
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, teacher: Path, tokens: Path, delta: Path) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "student"
    assert tune(teacher, tokens, delta, out, CONFIG, QUIET)
    return out


# The run


def test_the_student_gets_nearer_to_its_teacher(made: Path) -> None:
    report = json.loads((made / "run.json").read_text())
    first, last = report["evaluations"][0], report["evaluations"][-1]
    assert (first["step"], last["step"], len(report["evaluations"])) == (0, CONFIG.steps, 3)
    assert last["student_kl"] < 0.9 * first["student_kl"]
    assert {key: first[key] for key in first if "window" in key} == {key: last[key] for key in last if "window" in key}
    assert {key.rpartition("_")[2] for key in last if "bits" in key} == {"64"}
    assert 0 < report["texts_read"] <= CONFIG.steps * CONFIG.batch
    assert report["packages_read"] == ["p0", "p1"]
    assert json.loads((made / TRANSFER).read_text()) == {"name": "transfer"}
    assert json.loads((made / "sources.json").read_text()) == SOURCES
    assert (made / "curve.png").stat().st_size > 1_000


def test_the_untrained_student_is_that_of_the_delta(teacher: Path, tokens: Path, delta: Path) -> None:
    """Its bits are those of the layers' own forward pass, and the teacher's are its own."""
    task, source = TuningTask(teacher, tokens, delta, CONFIG, "student"), load_decoder(teacher)
    found, student = task.evaluate(), read_student(delta, source).eval()
    for name, model in (("student", student), ("teacher", source.model)):
        bits, n_bytes = 0.0, 0
        for ids in task.tokens.held_out[:, :64].astype(np.int64):
            with torch.no_grad():
                log_p = model(torch.from_numpy(ids)[None])[0][0, :-1].log_softmax(-1)
            bits -= float(log_p.gather(1, torch.from_numpy(ids[1:, None])).sum()) / np.log(2)
            n_bytes += 63
        assert found[f"{name}_bits_64"] == pytest.approx(bits / n_bytes, rel=1e-5)


def test_gradients_reach_maps_and_changes_and_nothing_else(teacher: Path, tokens: Path, delta: Path) -> None:
    task = TuningTask(teacher, tokens, delta, replace(CONFIG, feedforward=True), "student")
    fresh = {name: tensor.clone() for name, tensor in task.source.model.state_dict().items()}
    for name, parameter in task.trained.items():
        if name.endswith(".up"):
            torch.nn.init.normal_(parameter, std=0.1)
    task.loss(0).objective.backward()
    assert len(task.trained) == 2 * (4 + 2 * 7)
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in task.trained.values())
    assert {id(p) for p in task.student.parameters() if p.requires_grad} == {id(p) for p in task.trained.values()}
    assert {id(p) for p in task.model.parameters()} == {id(p) for p in task.trained.values()}
    assert not any(parameter.requires_grad for parameter in task.teacher.parameters())
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in task.source.model.state_dict().items())


def test_stopped_and_taken_up_again_it_ends_with_the_same_bits(
    made: Path, teacher: Path, tokens: Path, delta: Path, tmp_path: Path
) -> None:
    task, steps, kept = TuningTask(teacher, tokens, delta, CONFIG, "student"), iter([False] * 7 + [True]), []
    folder = tmp_path / "checkpoints"
    assert train(task, folder, stopping=lambda: next(steps), on_checkpoint=lambda: kept.append(task.keep(tmp_path))).step == 7
    assert len(kept) == 2, "before the evaluation at first, and at the stop"
    assert set(load_file(tmp_path / WEIGHTS)) == set(task.trained)
    again = TuningTask(teacher, tokens, delta, CONFIG, "student")
    assert train(again, folder).step == CONFIG.steps
    whole = load_file(made / WEIGHTS)
    assert whole.keys() == again.trained.keys()
    assert all(torch.equal(whole[name], parameter.half()) for name, parameter in again.trained.items())
    with pytest.raises(checkpoints.ResumeError, match="has a run with another config: rank"):
        tune(teacher, tokens, delta, made, replace(CONFIG, rank=3), QUIET)


def test_a_signal_leaves_the_student_and_its_report(teacher: Path, tokens: Path, delta: Path, made: Path, tmp_path: Path) -> None:
    """And a tuning of a tuned student tells of the first one."""
    signals = iter([False] * 3)

    def loss(self: TuningTask, step: int) -> object:
        if next(signals, True):
            signal.raise_signal(signal.SIGTERM)
        return of_step(self, step)

    of_step = TuningTask.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TuningTask, "loss", loss)
        assert not tune(teacher, tokens, made, tmp_path, CONFIG, QUIET)
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["step"] == 4
    assert report["texts_read"] == 4 * CONFIG.batch
    assert [(before["step"], before["tokens"]) for before in report["tuned_before"]] == [(CONFIG.steps, CONFIG.steps * 4 * 64)]
    assert json.loads((tmp_path / TRANSFER).read_text()) == {"name": "transfer"}
    assert load_file(tmp_path / WEIGHTS).keys() == load_file(made / WEIGHTS).keys()
    assert tune(teacher, tokens, made, tmp_path, CONFIG, QUIET), "and the same command goes on"
    assert json.loads((tmp_path / "run.json").read_text())["step"] == CONFIG.steps


def test_every_text_is_read_once_in_an_epoch(teacher: Path, tokens: Path, delta: Path) -> None:
    task = TuningTask(teacher, tokens, delta, CONFIG, "student")
    steps = len(task.tokens.train) // CONFIG.batch
    first, second = ([row for step in range(begin, begin + steps) for row in task.rows(step)] for begin in (0, steps))
    assert len(set(first)) == len(first) == steps * CONFIG.batch
    assert first != second


# The difference


def test_the_difference_has_maps_and_changes(made: Path, teacher: Path, tmp_path: Path) -> None:
    source, untouched = load_decoder(teacher), load_decoder(teacher)
    student, delta = read_student(made, source).eval(), read_delta(made, source)
    assert (delta.rank, delta.scale, len(delta.factors)) == (2, 2.0, 8)
    name = "blocks.1.layer.to_v"
    down, up = delta.factors[name]
    expected = source.model.get_submodule(name).weight + 2.0 * up @ down
    assert torch.allclose(student.get_submodule(name).weight, expected, atol=1e-6)
    assert not torch.equal(expected, source.model.get_submodule(name).weight)
    assert all(torch.equal(a, b) for a, b in zip(source.model.parameters(), untouched.model.parameters(), strict=True))
    assemble(teacher, made, tmp_path / "whole")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "whole").model(ids)[0], student(ids)[0])


def test_the_saved_student_is_the_trained_one(made: Path, teacher: Path, tokens: Path) -> None:
    """Up to the rounding of the file, through the layers' own forward pass; and a tuning can begin with it."""
    report = json.loads((made / "run.json").read_text())
    task = TuningTask(teacher, tokens, made, CONFIG, "student")
    assert task.evaluate()["student_kl"] == pytest.approx(report["evaluations"][-1]["student_kl"], rel=1e-2)
    student, source = read_student(made, load_decoder(teacher)).eval(), load_decoder(teacher).model
    kl = []
    for ids in torch.from_numpy(task.tokens.held_out[:, :64].astype(np.int64)):
        with torch.no_grad():
            log_q, log_p = (model(ids[None])[0][0, :-1].log_softmax(-1) for model in (student, source))
        kl.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    assert task.evaluate()["student_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)


def test_a_tuned_difference_needs_the_same_changes(made: Path, teacher: Path, tokens: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 2, scale 2\.0, not of 8, rank=3 and scale=2\.0; give the same"):
        TuningTask(teacher, tokens, made, replace(CONFIG, rank=3), "student")
    with pytest.raises(CheckpointError, match="changes 8 projections"):
        TuningTask(teacher, tokens, made, replace(CONFIG, feedforward=True), "student")


def test_changes_that_do_not_fit_are_refused(made: Path, teacher: Path, tmp_path: Path) -> None:
    source, tensors, described = load_decoder(teacher), load_file(made / WEIGHTS), json.loads((made / DESCRIPTION).read_text())
    name = "blocks.0.layer.to_q"

    def read(changed: dict[str, torch.Tensor], told: dict[str, object] = described) -> None:
        save_file(changed, tmp_path / WEIGHTS)
        (tmp_path / DESCRIPTION).write_text(json.dumps(told))
        read_student(tmp_path, source)

    with pytest.raises(CheckpointError, match=r"to_q\.up is missing"):
        read({key: tensor for key, tensor in tensors.items() if key != f"{name}.up"})
    with pytest.raises(CheckpointError, match="only one of them has low-rank changes"):
        read(tensors, {key: value for key, value in described.items() if key != "low_rank"})
    with pytest.raises(CheckpointError, match="which do not fit a projection of shape"):
        read(tensors | {f"{name}.up": tensors[f"{name}.up"][:-1].contiguous()})
    renamed = {key.replace(name, "blocks.0.layer.to_x"): tensor for key, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="to_x is not a projection of the teacher"):
        read(renamed)


# Layers with a longer window


def test_some_layers_may_have_a_longer_window_in_place_of_maps(teacher: Path, tokens: Path, made: Path, tmp_path: Path) -> None:
    """A tuning that begins with the maps of all layers drops those of the others, and its student is the trained one."""
    config = replace(CONFIG, long_layers="1", long_window=24, steps=4)
    assert tune(teacher, tokens, made, tmp_path / "student", config, QUIET)
    described = json.loads((tmp_path / "student" / DESCRIPTION).read_text())
    assert (described["window"], described["long"]) == (12, {"layers": [1], "window": 24})
    tensors = load_file(tmp_path / "student" / WEIGHTS)
    assert {name.split(".")[1] for name in tensors if ".phi_" in name} == {"0"}
    assert {name.split(".")[1] for name in tensors if name.endswith(".up")} == {"0", "1"}
    report = json.loads((tmp_path / "student" / "run.json").read_text())
    student, source = read_student(tmp_path / "student", load_decoder(teacher)).eval(), load_decoder(teacher).model
    assert student.config.layer_names == ("causal_hybrid", "sink_window")
    kl = []
    for ids in torch.from_numpy(read_tokens(tokens, vocab_size=256).held_out[:, :64].astype(np.int64)):
        with torch.no_grad():
            log_q, log_p = (model(ids[None])[0][0, :-1].log_softmax(-1) for model in (student, source))
        kl.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    assert report["evaluations"][-1]["student_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-2)
    assemble(teacher, tmp_path / "student", tmp_path / "whole")
    whole, ids = load_decoder(tmp_path / "whole").model, torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(whole(ids)[0], student(ids)[0])
    again = TuningTask(teacher, tokens, tmp_path / "student", replace(CONFIG, steps=4), "student")
    assert again.described["long"] == described["long"], "a later tuning keeps them"
    assert {key: again.facts()["config"][key] for key in ("long_layers", "long_window")} == {"long_layers": "1", "long_window": 24}
    with pytest.raises(ValueError, match=r"the delta has no maps for layers \[1\]; name them in long_layers too"):
        TuningTask(teacher, tokens, tmp_path / "student", replace(CONFIG, long_layers="0", long_window=24), "student")
    (tmp_path / "student" / DESCRIPTION).write_text(json.dumps(described | {"long": {"layers": [1]}}))
    with pytest.raises(CheckpointError, match=r"does not describe a student of this teacher \('window'\); copy it again"):
        read_student(tmp_path / "student", load_decoder(teacher))


@torch.no_grad()
def test_layers_are_ranked_by_the_bits_that_they_lose_with_a_short_window(teacher: Path, tokens: Path) -> None:
    source, ids = load_decoder(teacher).model, torch.from_numpy(read_tokens(tokens, vocab_size=256).train[:1, :64].astype(np.int64))
    shown: list[None] = []
    found = more_bits(source, ids, short=12, long=24, show=lambda: shown.append(None))

    def bits(short: set[int]) -> float:
        model = in_parallel(windowed(source, 24))
        for number in short:
            model.blocks[number].layer = in_parallel(windowed(source, 12)).blocks[number].layer
        log_p = (hidden_states(model, ids) @ source.unembedding.weight.T)[0, :-1].log_softmax(-1)
        return -float(log_p.gather(1, ids[0, 1:, None]).mean()) / np.log(2)

    assert len(shown) == len(found) == 2
    assert found == pytest.approx([bits({number}) - bits(set()) for number in range(2)], abs=1e-5)
    assert max(map(abs, found)) > 1e-3
    with pytest.raises(ValueError, match="short=12, long=64 and texts of 64 tokens must ascend; choose shorter windows"):
        more_bits(source, ids, short=12, long=64)


# The loss


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_divergence_and_its_gradient_are_those_of_the_formula(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.distillation.decoder.next_token.CHUNK", 5)
    torch.manual_seed(0)
    ours, theirs, weight = torch.randn(2, 7, 6).double().requires_grad_(), torch.randn(2, 7, 6).double(), torch.randn(11, 6).double()
    ids = torch.randint(11, (2, 7))
    log_p, log_q = ((x @ weight.T).log_softmax(-1) for x in (theirs, ours))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    of_label = torch.nn.functional.pad(-log_q[:, :-1].gather(2, ids[:, 1:, None]).squeeze(-1), (0, 1))
    is_labelled = torch.arange(7) < 6
    expected = torch.where(is_labelled, (1 - share) * kl + share * of_label, kl).mean()
    (gradient,) = torch.autograd.grad(3 * expected, ours)
    loss, found_kl = divergence(ours, theirs, weight, ids, label_share=share)
    (found,) = torch.autograd.grad(3 * loss, ours)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found_kl.item() == pytest.approx(kl.mean().item(), rel=1e-12)
    assert (found - gradient).abs().max() < 1e-12
    figures = token_figures(ours, theirs, weight, ids)
    assert torch.allclose(figures.kl, kl[:, :-1])
    assert torch.allclose(figures.bits, of_label[:, :-1] / np.log(2))


# What cannot be used


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"steps": 0, "minutes": 0.0}, "the run would not end"),
        ({"scale": 0.0}, r"scale=0\.0 must be above 0"),
        ({"label_share": 1.5}, r"label_share=1\.5 must be from 0 to 1"),
        ({"minutes": -1.0}, r"minutes=-1\.0 must be 0 or more"),
        ({"long_layers": "1;2"}, "long_layers='1;2' are not numbers of layers; write them as 3,17"),
        ({"long_layers": "1"}, "long_layers='1', long_window=0: give both, or neither"),
        ({"long_window": 24}, "long_layers='', long_window=24: give both, or neither"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 9}, "rank=9 must be from 1 to 8"),
        ({"context": 12}, "context=12 must exceed the window of 12 tokens"),
        ({"context": 81}, "context=81, but the texts have 80 tokens"),
        ({"batch": 1_000}, "batch=1000, but there are"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(teacher: Path, tokens: Path, delta: Path, changes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TuningTask(teacher, tokens, delta, replace(CONFIG, **changes), "student")


def test_files_that_cannot_be_used_are_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"none\.npz is missing or is not a regular file; `python -m models\.distillation"):
        read_tokens(tmp_path / "none.npz", vocab_size=256)
    good = read_tokens(tokens, vocab_size=256)
    with pytest.raises(CorpusError, match=r"train has a token \d+, and the teacher has a vocabulary of 50"):
        read_tokens(tokens, vocab_size=50)
    (tmp_path / "cut.npz").write_bytes(tokens.read_bytes()[:-100])
    with pytest.raises(CorpusError, match="cannot be read"):
        read_tokens(tmp_path / "cut.npz", vocab_size=256)
    write_tokens(tmp_path / "odd.npz", replace(good, names=good.names[1:]))
    with pytest.raises(CorpusError, match="write it again"):
        read_tokens(tmp_path / "odd.npz", vocab_size=256)


def test_the_delta_to_start_from_is_not_overwritten(teacher: Path, tokens: Path, delta: Path) -> None:
    with pytest.raises(TrainingError, match=r"is also the delta to start from.* choose another --out"):
        tune(teacher, tokens, delta, delta, CONFIG, Console())


def test_a_vocabulary_of_more_than_16_bits_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "LARGEST_VOCABULARY", 100)
    with pytest.raises(CorpusError, match=r"the tokenizer has \d+ tokens, and the file has 16 bits for each: at most 100"):
        make_tokens(data, byte_tokenizer(), context=80, n=2, held_out=1)


def test_tokens_are_pieces_of_documents_and_joined_rests(data: Path, tokens: Path) -> None:
    made = read_tokens(tokens, vocab_size=256)
    assert isinstance(made, TokenFile)
    assert made.train.shape == (len(made.names), 80)
    assert (made.context, made.held_out.shape, made.sources) == (80, (3, 80), SOURCES)
    assert all(name.startswith("q0/") for name in made.held_out_names)
    whole = {f"{d.package}/{d.file}": d.text for d in documents(("p0", "p1"), files=20, seed=0)}
    pieces = [(name, ids) for name, ids in zip(made.names, made.train, strict=True) if " and " not in name]
    assert pieces
    assert all(byte_tokenizer().decode(ids.tolist()) in whole[name] for name, ids in pieces)
    with pytest.raises(CorpusError, match="has no training sequence of 60000 tokens"):
        make_tokens(data, byte_tokenizer(), context=60_000, n=2, held_out=1)
