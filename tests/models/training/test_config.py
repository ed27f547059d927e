"""A config is checked when it is read, and the examples are equal but for their layers."""

from pathlib import Path

import pytest

from models.training.config import ConfigError, TrainingConfig, read_config
from models.training.text.task import build

EXAMPLES = sorted((Path(__file__).parents[3] / "models" / "training" / "configs").glob("python-*.yaml"))
MAX_BYTES = 16_000_000  # of the weights of a model that is shipped
VALID = """
name: a
model: {layers: delta, d_model: 8, n_layers: 1, n_heads: 2, d_feedforward: 8, positions: none}
vocab_size: 300
context: 8
batch: 1
max_steps: 1
learning_rate: 0.1
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("batch: 1", "batch: 0"), "batch: Input should be greater than or equal to 1"),
        (("batch: 1", "btach: 1"), "btach: Extra inputs are not permitted"),
        (("max_steps: 1", "seed: 1"), "max_steps or max_minutes must be given"),
        (("name: a", "name: ../a"), "name: "),
        (("name: a", "name: [a"), "is not YAML"),
        (("learning_rate: 0.1", "learning_rate: fast"), "learning_rate: "),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert VALID.count(change[0]) == 1
    with pytest.raises(ConfigError, match=message):
        read_config(written(tmp_path, VALID.replace(*change)), TrainingConfig)


@pytest.mark.parametrize(("change", "message"), [(("n_heads: 2", "n_heads: 3"), "n_heads=3"), (("d_model: 8", "width: 8"), "width")])
def test_a_shape_that_cannot_be_names_the_file(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = written(tmp_path, VALID.replace(*change))
    with pytest.raises(ConfigError, match=message) as error:
        build(read_config(file, TrainingConfig), file)
    assert str(file) in str(error.value)


def test_examples_are_equal_but_for_their_layers() -> None:
    configs = [read_config(file, TrainingConfig) for file in EXAMPLES]
    assert [file.stem for file in EXAMPLES] == ["python-gated-delta", "python-linear", "python-softmax"]
    shared = [config.model_dump(exclude={"name", "model", "chunk"}) for config in configs]
    assert all(values == shared[0] for values in shared)
    for config, file in zip(configs, EXAMPLES, strict=True):
        size = sum(p.numel() for p in build(config, file).parameters()) * {"fp32": 4, "bf16": 2}[config.weights]
        assert size < MAX_BYTES
