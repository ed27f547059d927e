"""Training learns, and a run that was killed or stopped ends with the same bits as one that was left alone."""

import json
import math
import signal
import subprocess
import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.attention.linear.random_features import redraw_features
from models.training import checkpoints, trainer
from models.training.config import TrainingConfig
from models.training.corpus import Tokens
from models.training.optimisation import optimizer_of
from models.training.task import Progress
from models.training.text import task
from models.training.text.task import TextTask, build
from models.training.trainer import Moment, TrainingError, stop_signals, train
from tests.models.training.texts import changed


def trained(config: TrainingConfig, tokens: Tokens, folder: Path, **options) -> tuple[Progress, dict[str, Tensor]]:
    """Progress and every tensor of the last checkpoint, optimizer included."""
    progress = train(TextTask(config, tokens, build(config, Path("config.yaml"))), folder, **options)
    return progress, everything(folder)


def everything(folder: Path) -> dict[str, Tensor]:
    checkpoint = checkpoints.newest(folder)
    assert checkpoint is not None
    return {
        f"{name}:{key}": tensor
        for name in (checkpoints.MODEL, checkpoints.OPTIMIZER)
        for key, tensor in load_file(checkpoint / name).items()
    }


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert any(key.endswith("exp_avg_sq") for key in one)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def killed(data: Path, folder: Path, config: TrainingConfig, *, step: int) -> int:
    """Train in a process that kills itself after a step; its return code."""
    arguments = [str(data), str(folder), config.model_dump_json(), str(step)]
    return subprocess.run([sys.executable, "-m", "tests.models.training.killed", *arguments], check=False, timeout=600).returncode


@pytest.mark.parametrize("layers", ["causal_linear", "gated_delta", "causal_vq"])
def test_training_learns(tokens: Tokens, config: TrainingConfig, tmp_path: Path, layers: str) -> None:
    """From knowing nothing, log2 V bits a token, to the patterns of the text; on packages it has not seen."""
    model = config.model | {"layers": layers, "positions": "none"}
    progress, _ = trained(changed(config, model=model, max_steps=100, batch=8), tokens, tmp_path)
    nothing = math.log2(config.vocab_size) / tokens.bytes_per_token
    assert progress.losses[0]["bits_per_byte"] == pytest.approx(nothing, rel=0.3)
    assert progress.losses[-1]["bits_per_byte"] < 0.5 * nothing
    assert progress.evaluations[-1]["bits_per_byte"] < 0.6 * nothing
    assert [point["step"] for point in progress.losses] == list(range(10, 101, 10))
    assert [point["step"] for point in progress.evaluations] == [50, 100]
    assert progress.losses[-1]["tokens"] == 100 * 8 * config.context


@pytest.mark.parametrize("layers", ["causal_linear", "gated_delta", "causal_vq"])
def test_killed_and_taken_up_again_it_ends_with_the_same_bits(
    data: Path, tokens: Tokens, config: TrainingConfig, tmp_path: Path, layers: str
) -> None:
    """SIGKILL after step 13: steps 11 to 13 are lost with the process, and done again from the checkpoint of step 10."""
    config = changed(config, model=config.model | {"layers": layers, "positions": "none"})
    straight, expected = trained(config, tokens, tmp_path / "straight")
    assert killed(data, tmp_path / "killed", config, step=13) == -signal.SIGKILL
    assert checkpoints.newest(tmp_path / "killed").name == "step-000010"
    resumed, found = trained(config, tokens, tmp_path / "killed")
    assert_same_bits(found, expected)
    assert (resumed.step, straight.step) == (20, 20)
    assert [point["bits_per_byte"] for point in resumed.losses] == [point["bits_per_byte"] for point in straight.losses]
    assert [point["bits_per_byte"] for point in resumed.evaluations] == [point["bits_per_byte"] for point in straight.evaluations]


def test_random_features_are_drawn_anew_and_the_same_ones_in_a_run_taken_up_again(
    tokens: Tokens, config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of steps 4 and 7, of which the second is the first one after a stop."""
    monkeypatch.setattr(task, "redraw_features", partial(redraw_features, every=3))
    config = changed(config, max_steps=8, model=config.model | {"layers": "causal_performer", "positions": "none"})
    drawn = build(config, Path("config.yaml")).state_dict()
    _, expected = trained(config, tokens, tmp_path / "straight")
    halted = iter([False] * 6 + [True])
    trained(config, tokens, tmp_path / "stopped", stopping=lambda: next(halted))
    before = everything(tmp_path / "stopped")
    assert_same_bits(trained(config, tokens, tmp_path / "stopped")[1], expected)
    projections = [name for name in drawn if name.endswith("projection")]
    assert projections
    for name in projections:
        three = (drawn[name], before[f"{checkpoints.MODEL}:{name}"], expected[f"{checkpoints.MODEL}:{name}"])
        assert not any(torch.equal(one, other) for one, other in combinations(three, 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    tokens: Tokens, config: TrainingConfig, tmp_path: Path, number: signal.Signals
) -> None:
    def at_step_7(moment: Moment) -> None:
        if moment.step == 7:
            signal.raise_signal(number)

    _, expected = trained(config, tokens, tmp_path / "straight")
    before = signal.getsignal(number)
    with stop_signals() as stopping:
        progress, _ = trained(config, tokens, tmp_path / "stopped", show=at_step_7, stopping=stopping)
    assert progress.step == 7
    assert signal.getsignal(number) is before
    assert_same_bits(trained(config, tokens, tmp_path / "stopped")[1], expected)


def test_a_failed_write_leaves_the_older_checkpoint(config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config, Path("config.yaml"))
    optimizer = optimizer_of(model, config)
    checkpoints.save(tmp_path, 5, model, optimizer, {"step": 5})
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(tmp_path, 10, model, optimizer, {"step": 10})
    assert checkpoints.load(checkpoints.newest(tmp_path), model, optimizer) == {"step": 5}


def test_a_budget_of_minutes(tokens: Tokens, config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every step takes six seconds, a minute is ten steps, and the rate follows the share that is used up."""
    ticks = iter(range(0, 6000, 6))
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(ticks))
    shares = []
    monkeypatch.setattr(task, "learning_rate", lambda share, config: shares.append(share) or 0.01)
    moments: list[Moment] = []
    progress, _ = trained(changed(config, max_steps=None, max_minutes=1.0), tokens, tmp_path, show=moments.append)
    assert (progress.step, progress.seconds) == (10, 60)
    assert shares == pytest.approx([i / 10 for i in range(10)])
    assert [moment.left_s for moment in moments] == pytest.approx([54 - 6 * i for i in range(10)])
    assert moments[-1].tokens_per_s == pytest.approx(config.batch * config.context / 6)


def test_whichever_budget_ends_first() -> None:
    values = {"name": "a", "model": {}, "vocab_size": 300, "context": 8, "batch": 1, "learning_rate": 0.1}
    config = TrainingConfig(**values, max_steps=100, max_minutes=2)
    assert config.budget.share(50, 30) == 0.5
    assert config.budget.share(10, 90) == 0.75
    assert config.budget.share(10, 900) == 1


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(
    tokens: Tokens, config: TrainingConfig, tmp_path: Path
) -> None:
    class Breaks(nn.Module):
        """Its logits become NaN in the eighth call."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(config.vocab_size, config.vocab_size)
            self.calls = 0

        def forward(self, tokens, lengths=None, states=None, positions=None, wanted=None):
            self.calls += self.training
            return self.embedding(tokens) * (math.nan if self.calls == 8 else 1.0), []

    with pytest.raises(TrainingError, match="the loss of step 8 is nan; lower learning_rate"):
        train(TextTask(config, tokens, Breaks()), tmp_path)
    progress = json.loads((checkpoints.newest(tmp_path) / checkpoints.PROGRESS).read_text())
    assert progress["step"] == 5
